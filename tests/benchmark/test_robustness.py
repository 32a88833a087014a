"""A policy with ever worse predictions."""

from __future__ import annotations

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


def test_a_policy_that_predicts_nothing_is_refused(small_spec):
    with pytest.raises(ConfigError, match=r"'sarathi' predicts nothing; choose from .*hygen"):
        run_robustness(small_spec, ["sarathi"], [0.1], num_jobs=1, quiet=True, store=None)
