"""Tests over several axes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest


def crossed(**axes: Any) -> pytest.MarkDecorator:
    """``parametrize`` over all combinations of the axes. Each value is in one of as many as the
    longest axis has; the others are `long`. An axis: values, or a dictionary from ids to values."""
    named = [
        [*axis.items()] if isinstance(axis, dict) else [(str(value), value) for value in axis]
        for axis in axes.values()
    ]
    longest = max(map(len, named))
    covering = [tuple(axis[index % len(axis)][0] for axis in named) for index in range(longest)]
    cases = []
    for case in itertools.product(*named):
        ids, values = zip(*case, strict=True)
        marks = () if ids in covering else pytest.mark.long
        cases.append(pytest.param(*values, id="-".join(ids), marks=marks))
    return pytest.mark.parametrize(tuple(axes), cases)
