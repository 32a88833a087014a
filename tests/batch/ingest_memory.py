"""What a large file costs in memory while it is ingested and fed.

    python -m tests.batch.ingest_memory --lines 500000

A server with a stand-in for the engine, in this process: a file of that many lines is uploaded,
validated, and its first lines are sent. Prints one JSON object: peak memory [MB] at each step.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path

import httpx

from cosched.batch.config import BatchesConfig
from tests.batch.api import Api, line, serving
from tests.batch.stand_in import StandIn


def peak_mb():
    """Of this process, since it began."""
    status = Path("/proc/self/status").read_text()
    return round(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1000, 1)


def write(path, num_lines, num_chars):
    """Every hundredth line begins like each other hundredth."""
    with path.open("w") as file:
        for number in range(num_lines):
            head = f"{number % 100:02d}" * (num_chars // 2)
            file.write(json.dumps(line(f"c{number}", f"{head} {number}")) + "\n")


def run(folder, num_lines, num_chars):
    """Peak memory at each step [MB], and what the last two took [s]."""
    source = folder / "in.jsonl"
    write(source, num_lines, num_chars)
    size = source.stat().st_size
    config = BatchesConfig(
        folder=str(folder / "batches"), max_lines=num_lines, max_file_mb=size / 1e6 + 1
    )
    stand_in = StandIn(config)
    stand_in.is_held = True  # no line is answered, so as many as allowed are in flight
    with serving(stand_in) as url:
        api = Api(url)
        seen = {"lines": num_lines, "file_mb": round(size / 1e6, 1), "at_start": peak_mb()}
        with source.open("rb") as content:
            # As a stream: a client in this process must not hold it.
            form = {"data": {"purpose": "batch"}, "files": {"file": content}}
            headers = {"authorization": "Bearer key"}
            reply = httpx.post(f"{url}/v1/files", **form, headers=headers, timeout=600)
        seen["uploaded"] = peak_mb()
        began_s = time.monotonic()
        batch = api.batches.create(
            input_file_id=reply.json()["id"], endpoint="/v1/completions", completion_window="24h"
        )
        api.wait(batch, "in_progress", timeout_s=1200)
        seen["validated"], seen["validation_s"] = peak_mb(), round(time.monotonic() - began_s, 1)
        deadline_s = time.monotonic() + 120
        while stand_in.num_in_flight < min(num_lines, config.high_watermark):
            assert time.monotonic() < deadline_s, stand_in.num_in_flight
            time.sleep(0.05)
        seen["in_flight"], seen["fed"] = stand_in.num_in_flight, peak_mb()
        assert api.batches.retrieve(batch.id).request_counts.total == num_lines
        api.batches.cancel(batch.id)
        ended = api.wait(batch, timeout_s=1200)
        assert ended.request_counts.failed == num_lines, ended
        seen["cancelled"] = peak_mb()
        stand_in.is_held = False
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lines", type=int, default=500_000)
    parser.add_argument("--chars", type=int, default=400, help="of each prompt")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cosched-ingest-") as folder:
        print(json.dumps(run(Path(folder), arguments.lines, arguments.chars)))


if __name__ == "__main__":
    main()
