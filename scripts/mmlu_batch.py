#!/usr/bin/env python3
"""MMLU as one batch, uploaded with the `openai` client, while chats are answered beside it.

    .venv/bin/python scripts/mmlu_batch.py --data DIR [--lines N] [--max-tokens 1] [--stop-after S]

Every test question is a line, behind the five worked examples of its subject, in mixed order
(``--seed``). A server with the tiny demo model (random weights) and the Batch API is started for
it. With ``--stop-after`` the batch is cancelled after so many seconds; the lines that have no
answer by then must be in the error file. Prints one JSON object, and ends with 1 when a line has no
result, or two, or a chat failed.

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
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import openai

from cosched.demo_model import ensure_demo_model
from tests.batches.replicas import Chats, told
from tests.serving import start_server

EXAMPLES = 5


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


def run(entries: list[dict[str, Any]], *, users: int, stop_after_s: float | None) -> dict[str, Any]:
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
        chats = stack.enter_context(Chats(server.url, users))
        began_s = time.monotonic()
        with source.open("rb") as content:
            file = client.files.create(file=content, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            time.sleep(1)
            batch = client.batches.retrieve(batch.id)
            batch_s = time.monotonic() - began_s
            if stop_after_s is not None and batch_s > stop_after_s:
                if batch.status in ("validating", "in_progress"):
                    batch = client.batches.cancel(batch.id)
        assert batch.status in ("completed", "cancelled") and batch.output_file_id, batch
        assert stop_after_s is not None or batch.status == "completed", batch
        results = _ids(client, batch.output_file_id)
        unanswered = _ids(client, batch.error_file_id)
        file_mb = source.stat().st_size / 1e6
    order = {entry["custom_id"]: number for number, entry in enumerate(entries)}
    assert sorted(results + unanswered, key=order.__getitem__) == list(order)
    assert results == sorted(results, key=order.__getitem__), "not in the order of the input"
    counts = batch.request_counts
    assert counts and (len(results), len(unanswered)) == (counts.completed, counts.failed)
    usage = batch.usage
    assert usage is not None
    return {
        "lines": len(entries),
        "answered": len(results),
        "status": batch.status,
        "file_mb": round(file_mb, 1),
        "batch_s": round(batch_s, 1),
        "input_tokens": usage.input_tokens,
        "cached_ratio": round(usage.input_tokens_details.cached_tokens / usage.input_tokens, 3),
        "output_tokens": usage.output_tokens,
        "chats": told(chats.seen),
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
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    entries = lines(options.data, seed=options.seed, max_tokens=options.max_tokens)
    seen = run(entries[: options.lines], users=options.users, stop_after_s=options.stop_after)
    print(json.dumps({"program": "mmlu_batch", "seed": options.seed, **seen}))
    return 1 if seen["chats"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
