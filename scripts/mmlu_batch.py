#!/usr/bin/env python3
"""MMLU as one batch, uploaded with the `openai` client, while chats are answered beside it.

    .venv/bin/python scripts/mmlu_batch.py --data DIR [--lines N] [--max-tokens 1] [--stop-after S]

Every test question is a line, behind the five worked examples of its subject, in mixed order
(``--seed``). A server with the tiny demo model (random weights) and the Batch API is started for
it. Users chat, one question after the other, for ``--alone`` seconds before the batch, beside it,
and as long after it. With ``--stop-after`` the batch is cancelled after so many seconds; the lines
that have no answer by then must be in the error file. Prints one JSON object, and ends with 1 when
a line has no result, or two, or a chat failed.

DIR (default: $COSCHED_DATA/prompts/mmlu) holds ``mmlu_dev.jsonl`` and ``mmlu_test.jsonl``, perhaps
with ``.gz``: ``subject``, ``question``, ``choices`` and ``answer`` in each line. The project ships
neither.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import openai

from cosched.lab.demo_model import ensure_demo_model
from cosched.lab.metrics.stats import Distribution, to_dict
from cosched.versions import versions
from tests.batch.replicas import Chats
from tests.serving import start_server

EXAMPLES = 5
CHAT_TOKENS = 16
POLL_S = 2.0


def read(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    opened = path.open() if path.exists() else gzip.open(f"{path}.gz", "rt")
    with opened as file:
        yield from map(json.loads, file)


def asked(fields: dict[str, Any]) -> str:
    named = zip("ABCD", fields["choices"], strict=True)
    choices = "".join(f"{letter}. {text}\n" for letter, text in named)
    return f"{fields['question']}\n{choices}Answer:"


def lines(folder: Path, *, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    heads: dict[str, list[str]] = defaultdict(list)
    for fields in read(folder, "mmlu_dev"):
        heads[fields["subject"]].append(f"{asked(fields)} {fields['answer']}\n\n")
    made = []
    for number, fields in enumerate(read(folder, "mmlu_test")):
        prompt = "".join(heads[fields["subject"]][:EXAMPLES]) + asked(fields)
        body = {"model": "default", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        custom_id = f"{fields['subject']}-{number}"
        made.append(
            {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
        )
    random.Random(seed).shuffle(made)
    return made


class TimedChats(Chats):
    """Streamed, by `client`. `seen`: (when it began [s], TTFT [s], TPOT [s], what was wrong or
    None)."""

    pause_s = 0.5

    def __init__(self, client: openai.OpenAI, num_users: int) -> None:
        super().__init__(str(client.base_url), num_users)
        self._client = client

    def chat(self, user: int, number: int) -> tuple[float, float, float, str | None]:
        began_s, times, wrong = time.monotonic(), [], None
        try:
            question = f"I am user {user}. " + f"What do you think of {number}? " * 12
            stream = self._client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": question}],
                max_tokens=CHAT_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            num_tokens = 0
            for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    times.append(time.monotonic())
                num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
            if num_tokens != CHAT_TOKENS or not times:
                wrong = f"{num_tokens} tokens"
        except openai.OpenAIError as error:
            wrong = type(error).__name__
        ttft_s = times[0] - began_s if times else 0.0
        tpot_s = (times[-1] - times[0]) / (CHAT_TOKENS - 1) if times else 0.0
        return began_s, ttft_s, tpot_s, wrong

    def told(self, is_counted: Callable[[float], bool]) -> dict[str, Any]:
        """Of those that began when it `is_counted`; times in ms."""
        chosen = [one for one in self.seen if is_counted(one[0])]
        good = [one for one in chosen if one[3] is None]
        return {
            "answered": len(good),
            "failed": Counter(one[3] for one in chosen if one[3]),
            "ttft_ms": _in_ms([one[1] for one in good]),
            "tpot_ms": _in_ms([one[2] for one in good]),
        }


def _in_ms(samples_s: list[float]) -> dict[str, float]:
    found = to_dict(Distribution.of([1e3 * sample_s for sample_s in samples_s]))
    return {name: round(found[name] or 0.0, 1) for name in ("mean", "p50", "p99", "max")}


def run(
    entries: list[dict[str, Any]], *, users: int, alone_s: float, stop_after_s: float | None
) -> dict[str, Any]:
    """What was seen. AssertionError: a line has not just one result."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cosched-mmlu-")))
        model = ensure_demo_model(size="tiny", dtype="float32")
        flags = ("--cosched-policy", "cosched", "--cosched-batches", str(folder / "batches"))
        more = ("--max-total-tokens", "60000", "--enable-cache-report")
        server = stack.enter_context(start_server(model, *flags, *more, ready_timeout_s=1200.0))
        source = folder / "mmlu.jsonl"
        source.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        chats = stack.enter_context(TimedChats(client, users))
        time.sleep(alone_s)
        began_s = time.monotonic()
        with source.open("rb") as content:
            file = client.files.create(file=content, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            time.sleep(POLL_S)
            batch = client.batches.retrieve(batch.id)
            batch_s = time.monotonic() - began_s
            if stop_after_s is not None and batch_s > stop_after_s:
                if batch.status in ("validating", "in_progress"):
                    batch = client.batches.cancel(batch.id)
        time.sleep(alone_s)
        ended_s = began_s + batch_s
        assert batch.status in ("completed", "cancelled"), batch
        assert stop_after_s is not None or batch.status == "completed", batch
        results = _ids(client, batch.output_file_id)
        unanswered = _ids(client, batch.error_file_id)
        file_mb = source.stat().st_size / 1e6
    order = {entry["custom_id"]: number for number, entry in enumerate(entries)}
    times = Counter(results + unanswered)
    counts, usage = batch.request_counts, batch.usage
    assert counts is not None and usage is not None
    assert (len(results), len(unanswered)) == (counts.completed, counts.failed), counts
    assert results == sorted(results, key=order.__getitem__), "not in the order of the input"
    return {
        "lines": len(entries),
        "answered": len(results),
        "failed": len(unanswered),
        "missing": len(order.keys() - times.keys()),
        "repeated": times.total() - len(times),
        "status": batch.status,
        "file_mb": round(file_mb, 1),
        "batch_s": round(batch_s, 1),
        "input_tokens": usage.input_tokens,
        "cached_ratio": round(
            usage.input_tokens_details.cached_tokens / max(usage.input_tokens, 1), 3
        ),
        "output_tokens": usage.output_tokens,
        "chats": {
            "alone_before": chats.told(lambda at_s: at_s < began_s),
            "beside": chats.told(lambda at_s: began_s <= at_s < ended_s),
            "alone_after": chats.told(lambda at_s: at_s >= ended_s),
        },
    }


def _ids(client: openai.OpenAI, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    found = client.files.content(file_id).content.splitlines()
    return [json.loads(line)["custom_id"] for line in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    default = os.environ.get("COSCHED_DATA")
    parser.add_argument(
        "--data",
        type=Path,
        required=default is None,
        default=default and Path(default) / "prompts" / "mmlu",
    )
    parser.add_argument("--lines", type=int, help="so many; default: all")
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--stop-after", type=float, metavar="S")
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--alone", type=float, default=60, metavar="S", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    entries = lines(options.data, seed=options.seed, max_tokens=options.max_tokens)
    seen = run(
        entries[: options.lines],
        users=options.users,
        alone_s=options.alone,
        stop_after_s=options.stop_after,
    )
    about = {"seed": options.seed, "users": options.users, "load_average": os.getloadavg()[2]}
    print(json.dumps({"program": "mmlu_batch", **about, "versions": versions(), **seen}))
    is_failed = any(chats["failed"] for chats in seen["chats"].values())
    is_failed |= bool(seen["missing"] or seen["repeated"])
    is_failed |= bool(options.stop_after is None and seen["failed"])
    return 1 if is_failed else 0


if __name__ == "__main__":
    sys.exit(main())
