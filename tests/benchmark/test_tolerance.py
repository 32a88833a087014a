"""What a tolerance of the online latency buys."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cosched import bench
from cosched.benchmark import tolerance
from cosched.benchmark.tolerance import (
    Found,
    ToleranceSweep,
    plot_tolerances,
    print_tolerances,
    sweep_tolerances,
)


def test_more_tolerance_never_buys_less_and_is_kept(small_spec, ran, store, monkeypatch):
    ranges = tolerance._ranges
    monkeypatch.setattr(tolerance, "_ranges", lambda run: ranges(run) | {"budget": (8.0, 100.0)})
    sweep = sweep_tolerances(
        replace(small_spec, duration_s=1.0),
        ["mean_tbt"],
        [0.2, 1.0],
        precision=0.95,
        num_jobs=1,
        quiet=True,
        store=store,
    )
    assert [(f.policy, f.tolerance) for f in sweep.found] == [
        ("hygen", 0.2),
        ("hygen", 1.0),
        ("hygen-throttled", 0.2),
        ("hygen-throttled", 1.0),
    ]
    assert len(ran) == len(set(ran)), "searches share their runs"
    num_compared = 0
    for small, large in (sweep.found[:2], sweep.found[2:]):
        assert large.value is not None and large.interference <= 1.0
        if small.value is not None:
            assert small.value <= large.value
            assert small.offline_tokens_per_s <= 1.01 * large.offline_tokens_per_s
            num_compared += 1
    assert num_compared, "a small tolerance bought something too"
    [unaware] = sweep.unaware
    assert unaware.policy == "sarathi" and unaware.interference is not None
    assert unaware.total_tokens_per_s > unaware.offline_tokens_per_s > 0


def test_what_no_value_keeps_is_shown_as_such(capsys, tmp_path):
    common = {"policy": "hygen", "metric": "p99_tbt", "key": "latency_budget_ms"}
    kept = Found(
        **common,
        tolerance=0.1,
        value=30.0,
        interference=0.08,
        attainment=1.0,
        offline_tokens_per_s=5000.0,
        total_tokens_per_s=6000.0,
    )
    sweep = ToleranceSweep(
        alone={"p99_tbt": 0.03},
        alone_tokens_per_s=1000.0,
        unaware=(Found(policy="sarathi", metric="p99_tbt"),),
        found=(Found(**common, tolerance=0.05), kept),
    )
    print_tolerances(sweep)
    *_, missed, found, unaware = capsys.readouterr().out.splitlines()
    assert missed == "| p99_tbt | +5% | hygen | - | - | - | - | - |"
    assert found == (
        "| p99_tbt | +10% | hygen | latency_budget_ms 30 | +8.0% | 100.0 | 5,000 | 6,000 |"
    )
    assert unaware.startswith("| p99_tbt | - | sarathi | - |")
    assert plot_tolerances(sweep, tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(sweep.to_dict()))["found"][1]["value"] == 30.0


@pytest.mark.parametrize("command", ["tolerance", "robustness"])
def test_one_class_alone_is_refused(command, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main([command, "--online", "alpaca", "--online-rate", "1"])
    assert ended.value.code == 2
    assert "needs both classes" in capsys.readouterr().err
