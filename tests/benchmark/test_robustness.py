"""A policy with ever worse predictions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cosched.benchmark.robustness import (
    plot_robustness,
    print_robustness,
    rows_of,
    run_robustness,
)
from cosched.errors import ConfigError


def test_every_error_is_run_once_and_shown(small_spec, ran, store, capsys, tmp_path):
    options = {"num_jobs": 1, "quiet": True, "store": store}
    result = run_robustness(small_spec, ["hygen"], [0.5, 0.0], **options)
    assert [(s.scenario.name, dict(s.config)) for s in ran] == [
        ("s0", {}),
        ("hygen", {"predictor_error": 0.5}),
        ("hygen", {}),
    ]
    rows = rows_of(result)
    assert [(row["policy"], row["predictor_error"]) for row in rows] == [
        ("s0", 0.0),
        ("hygen", 0.0),
        ("hygen", 0.5),
    ]
    assert rows[1]["offline_tokens_per_s"] != rows[2]["offline_tokens_per_s"]
    print_robustness(result)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
    assert plot_robustness(result, tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert run_robustness(small_spec, ["hygen"], [0.5], **options).keys() == {"s0", "hygen"}
    assert len(ran) == 3


def test_a_gpu_that_becomes_slower_is_one_more_trouble(small_spec, ran, store, capsys):
    spec = replace(small_spec, cost=replace(small_spec.cost, slower=2.0, slower_after_s=1.0))
    result = run_robustness(spec, ["hygen"], [0.0, 0.2], num_jobs=1, quiet=True, store=store)
    rows = {(r["policy"], r["predictor_error"], r["slower"]): r for r in rows_of(result)}
    assert list(rows) == [
        *(("s0", 0.0, slower) for slower in (1.0, 2.0)),
        *(("hygen", error, slower) for error, slower in ((0.0, 1.0), (0.2, 1.0), (0.0, 2.0))),
    ]
    whole, slow = rows["hygen", 0.0, 1.0], rows["hygen", 0.0, 2.0]
    assert slow["offline_tokens_per_s"] < 0.9 * whole["offline_tokens_per_s"]
    print_robustness(result)
    assert "2x" in capsys.readouterr().out


def test_a_policy_that_predicts_nothing_is_refused(small_spec):
    with pytest.raises(ConfigError, match=r"'sarathi' predicts nothing; choose from .*hygen"):
        run_robustness(small_spec, ["sarathi"], [0.1], num_jobs=1, quiet=True, store=None)
