"""A long input is a stream: memory does not grow with it, but for a few bytes a line."""

from __future__ import annotations

import asyncio
import json
import tracemalloc

from cosched.batch.jsonl.source import read_source
from tests.batch.api import line

NUM_LINES = 50_000
NUM_LONG, LONG_BYTES = 500, 20_000
LINE_BYTES = 600  # as text the file is 30 MB


def validated(batch, num_lines):
    text = json.dumps(line("ID", "x" * (LINE_BYTES - 120)))
    with open(batch.input, "w") as file:
        for number in range(num_lines):
            file.write(text.replace("ID", f"request-{number:012d}") + "\n")
    return batch.end(batch.start("--validate"))


def test_many_lines_take_little_more_memory_than_few(batch):
    few, many = validated(batch, 100), validated(batch, NUM_LINES)
    assert many["counts"]["valid"] == NUM_LINES
    grown_bytes = (many["peak_rss_mib"] - few["peak_rss_mib"]) * (1 << 20)
    assert grown_bytes / NUM_LINES < 64, f"{grown_bytes / NUM_LINES:.0f} bytes a line"


def test_lines_are_sorted_without_being_held(tmp_path):
    """Of 20,000 bytes each: only their places and keys are."""
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for number in range(NUM_LONG):
            file.write(json.dumps(line(f"a{number}", f"{number % 7} " * 10_000)) + "\n")
    source = read_source(str(path))

    async def peak_bytes():
        found = source.lines_in_prefix_order(max_line_bytes=1 << 20, is_done=set().__contains__)
        tracemalloc.start()
        try:
            assert len([one.number async for one in found]) == NUM_LONG
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert asyncio.run(peak_bytes()) < NUM_LONG * LONG_BYTES / 4
