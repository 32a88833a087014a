"""A long input is a stream: memory does not grow with it, but for a few bytes a line."""

from __future__ import annotations

import json

NUM_LINES = 100_000
LINE_BYTES = 600  # as text the file is 60 MB


def write_many(batch, tools, num_lines):
    line = json.dumps(tools.completion("ID", prompt="x" * (LINE_BYTES - 120)))
    with open(batch.input, "w") as file:
        for number in range(num_lines):
            file.write(line.replace("ID", f"request-{number:012d}") + "\n")


def test_many_lines_take_little_more_memory_than_few(batch, tools):
    write_many(batch, tools, 100)
    few = batch.run("--validate")["peak_rss_mib"]
    write_many(batch, tools, NUM_LINES)
    report = batch.run("--validate")
    assert report["counts"]["valid"] == NUM_LINES
    grown_bytes = (report["peak_rss_mib"] - few) * (1 << 20)
    assert grown_bytes / NUM_LINES < 64, f"{grown_bytes / NUM_LINES:.0f} bytes a line"
