"""Memory does not grow with the lines of a file."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.serving import ROOT


def test_a_file_of_ten_times_as_many_lines_takes_as_much_memory():
    def peaks(num_lines):
        command = [sys.executable, "-m", "tests.batch.ingest_memory", "--lines", str(num_lines)]
        command += ["--chars", "2000"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    small, large = peaks(1000), peaks(10_000)
    assert large["file_mb"] > 15
    assert large["cancelled"] - large["at_start"] < small["cancelled"] - small["at_start"] + 20
