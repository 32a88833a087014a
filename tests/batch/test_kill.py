"""kill -9 in the middle of batches: tests/batch/kills.py, and scripts/kill_batches for more."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.batch import postgres
from tests.serving import ROOT, SEARCH_PATH


@pytest.mark.parametrize(("replicas", "place"), [(1, None), (2, "dir::file://{}/far")])
def test_no_finished_line_is_lost_or_sent_again(replicas, place, tmp_path):
    if replicas > 1:
        postgres.skip_if_missing()
    command = [sys.executable, "-m", "tests.batch.kills", "--kills", "3", "--seed", "3"]
    if place is not None:
        command += ["--files", place.format(tmp_path)]
    ended = subprocess.run(
        [*command, "--replicas", str(replicas)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": SEARCH_PATH},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["in_mid_batch"] and seen["lines"]
