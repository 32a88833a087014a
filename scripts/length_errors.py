#!/usr/bin/env python3
"""Errors of predicted reply lengths by `length.mode`, on prompts with the lengths of replies.

    scripts/length_errors.py FILE... [--modes histogram,learned] [--seed 0]

Each FILE is JSONL with `prompt`, `response_tokens_est` [tokens] and, where several models replied,
`model`; it may be gzipped. The replies of each model are learned in random order: a request is
predicted when it arrives and learned from when some 20 more have come; the first 100 are not
counted. Words stand for tokens.

  constant   mean absolute error of the best single length, known afterwards [tokens]
  error      mean absolute error of the median [tokens]
  within     share of the replies within the upper estimate
  allocated  sum of the upper estimates over that of the lengths

The last line is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import statistics
import zlib
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cosched.predict.length_estimator import LengthConfig, LengthModel
from cosched.predict.length_histogram import Facts
from cosched.versions import versions

WARM_UP, UNDER_WAY = 100, 20
LIMIT = 4096

Replies: TypeAlias = list[tuple[str, int]]
"""Prompt, tokens of the reply."""


class Guess(NamedTuple):
    median: int
    upper: int
    length: int


def replies_of(path: Path) -> Mapping[str, Replies]:
    """By model."""
    found: dict[str, Replies] = defaultdict(list)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in map(json.loads, lines):
            found[line.get("model", "")].append((line["prompt"], line["response_tokens_est"]))
    return found


def tokens_of(text: str) -> Sequence[int]:
    return array("q", [zlib.crc32(word.encode()) for word in re.findall(r"\w+|[^\w\s]", text)])


def guesses(replies: Replies, mode: str, rng: random.Random) -> list[Guess]:
    model, under_way, made = LengthModel(LengthConfig(mode=mode)), [], []
    for i, (prompt, length) in enumerate(rng.sample(replies, len(replies))):
        belief = model.belief(Facts(str(i), "", tokens_of(prompt), LIMIT))
        found = belief.remaining(0)
        made.append(Guess(found.median, found.upper, length))
        under_way.append((belief, length))
        if len(under_way) > UNDER_WAY:
            model.learn(*under_way.pop(rng.randrange(len(under_way))))
    return made[WARM_UP:]


def judged(made: Sequence[Sequence[Guess]]) -> dict[str, float]:
    """made: of each model."""
    every = [guess for some in made for guess in some]
    best = [(statistics.median(g.length for g in some), some) for some in made]
    return {
        "requests": len(every),
        "constant": statistics.fmean(abs(g.length - one) for one, some in best for g in some),
        "error": statistics.fmean(abs(g.length - g.median) for g in every),
        "within": statistics.fmean(g.length <= g.upper for g in every),
        "allocated": sum(g.upper for g in every) / sum(g.length for g in every),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--modes", default="histogram,learned")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = []
    print(f"{'':24}{'':>12}{'constant':>10}{'error':>8}{'within':>8}{'allocated':>11}")
    for path in args.files:
        by_model = replies_of(path)
        for mode in args.modes.split(","):
            made = [guesses(r, mode, random.Random(args.seed)) for r in by_model.values()]
            row = judged(made)
            rows.append({"file": path.name, "mode": mode, **row})
            print(
                f"{path.name:24}{mode:>12}{row['constant']:10.1f}{row['error']:8.1f}"
                f"{row['within']:8.1%}{row['allocated']:11.2f}"
            )
    print(json.dumps({"seed": args.seed, "rows": rows, "versions": versions()}))


if __name__ == "__main__":
    main()
