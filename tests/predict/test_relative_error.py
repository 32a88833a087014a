"""Errors of predicted times."""

from __future__ import annotations

import pytest

from cosched.predict.fitted import summarise


def test_a_summary():
    summary = summarise([1.1, 0.9, 2.0], [1.0, 1.0, 2.0])
    assert summary.bias == pytest.approx(0)
    assert summary.mean == pytest.approx(0.2 / 3)
    assert summary.p50 == pytest.approx(0.1)
