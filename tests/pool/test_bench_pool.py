"""scripts/bench_pool.py on few requests."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.scripts import script


def test_the_last_line_says_what_was_measured(monkeypatch, capsys):
    module = script("bench_pool")
    few = ["--requests", "60", "--tokens", "40", "--short-requests", "0", "--no-stock"]
    monkeypatch.setattr(sys, "argv", ["bench_pool", *few, "--plan", "1"])
    in_process = ThreadPoolExecutor
    monkeypatch.setattr(module, "ProcessPoolExecutor", lambda *args, **more: in_process(*args))
    module.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(told["results"]) == list(module.SHAPES)
    assert all(row["num_requests"] == 60 for row in told["results"].values())
    assert told["pool"]["utility_ratio"] == told["config"]["utility_ratio"]
