"""Interpolation: numbers of heads that were not measured, gaps, edges and noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.errors import ConfigError
from cosched.lab.cost_models.kernels import (
    GenerationAttention,
    attention_cells,
    isotonic,
    neighbours,
    non_decreasing,
)

BATCHES = (1, 4, 16)
LENGTHS = (16, 256, 4096)


def rows(heads, seconds):
    return [
        (h, kv, 128, batch, length, seconds(h, batch, length))
        for h, kv in heads
        for batch in BATCHES
        for length in LENGTHS
    ]


def seconds(heads, batch, length):
    return 1e-5 + 1e-9 * heads * batch * length


def test_heads_between_measured_ones():
    cells = attention_cells(rows([(16, 4), (32, 4)], seconds), 28, 4, 128)
    between = GenerationAttention(cells).equal_s(4, 256)
    assert between == pytest.approx(seconds(28, 4, 256))


def test_ungrouped_heads_go_by_their_own_kind():
    cells = attention_cells(rows([(8, 8), (16, 16), (12, 8)], seconds), 12, 12, 128)
    assert GenerationAttention(cells).equal_s(4, 256) == pytest.approx(seconds(12, 4, 256))


@pytest.mark.parametrize("shape", [(64, 4, 128), (16, 3, 128), (16, 4, 64)])
def test_heads_outside_the_table_are_refused_by_name(shape):
    with pytest.raises(
        ConfigError, match=f"{shape[0]} query and {shape[1]} KV heads of {shape[2]}"
    ):
        attention_cells(rows([(16, 4), (32, 4)], seconds), *shape)


def test_more_kv_than_was_measured():
    cells = {(1, 16): 1e-5, (1, 1024): 2e-5, (1, 2048): 3e-5, (8, 16): 1.1e-5, (8, 1024): 9e-5}
    attention = GenerationAttention(cells)
    assert attention.equal_s(8, 2048) == pytest.approx(9e-5 + 8e-5)
    assert attention.equal_s(1, 4096) == pytest.approx(5e-5)
    assert attention.equal_s(16, 1024) == pytest.approx(18e-5)


def test_a_gap_in_the_grid_is_bridged():
    cells = {(1, 16): 1e-5, (1, 64): 1e-5, (1, 1024): 3e-5, (2, 16): 1e-5, (2, 1024): 5e-5}
    between = GenerationAttention(cells).equal_s(2, 64)
    assert 1e-5 < between < 2e-5


def test_the_least_of_repeated_measurements_counts():
    doubled = [*rows([(16, 4)], seconds), (16, 4, 128, 4, 256, 1.0)]
    cells = attention_cells(doubled, 16, 4, 128)
    assert GenerationAttention(cells).equal_s(4, 256) < 1e-3


numbers = st.lists(st.floats(-100, 100), min_size=1, max_size=30)


@given(numbers)
def test_isotonic_never_falls_and_keeps_the_sum(values):
    fitted = isotonic(values)
    assert np.all(np.diff(fitted) >= 0)
    assert fitted.sum() == pytest.approx(sum(values), abs=1e-6)


@given(numbers)
def test_isotonic_leaves_what_is_in_order(values):
    assert isotonic(sorted(values)).tolist() == sorted(values)


def test_a_disturbed_reading_is_cut_not_spread():
    smooth = non_decreasing(np.array([1.0, 1.0, 20.0, 1.1, 1.2, 1.3]))
    assert smooth.max() < 1.35


@pytest.mark.parametrize(
    ("value", "weights"),
    [(4, [(4, 1.0)]), (5, [(4, 0.75), (8, 0.25)]), (24, [(8, 3.0)]), (1, [(2, 1.0)])],
)
def test_neighbours_are_on_between_above_and_below_the_grid(value, weights):
    assert neighbours([2, 4, 8], value) == weights
