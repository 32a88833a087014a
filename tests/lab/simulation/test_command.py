"""What ``cosched simulate`` says."""

import json
from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched import simulate
from cosched.lab.simulation import virtual

SMALL = ("--offline", "documents", "--offline-requests", "4", "--quiet")


def test_a_run_that_ends_early_says_why(capsys):
    simulate.main([*SMALL, "--duration", "60"])
    shown = capsys.readouterr()
    assert " of 60 s: all 4 offline requests were finished" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["end_s"] < 60
    simulate.main([*SMALL, "--duration", "0.2"])
    assert "It ended at" not in capsys.readouterr().err


def test_requests_under_way_that_exceed_the_memory_end_the_run_in_one_sentence(capsys, monkeypatch):
    free = SimpleNamespace(available=100_000)
    monkeypatch.setattr(virtual, "psutil", SimpleNamespace(virtual_memory=lambda: free))
    with pytest.raises(SystemExit) as ended:
        simulate.main([*SMALL, "--duration", "60"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("cosched: ") and shown.count("\n") == 1
    assert "this machine's memory holds 2,666 tokens" in shown
