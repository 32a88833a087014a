"""What predictors are fitted to, and how: totals of batches, non-negative least squares, errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import QUERY_TILE, BatchShape, BatchTotals, Prefill
from cosched.predict.fitted import TotalsTable, nnls, summarise

PREFILLS = st.lists(st.builds(Prefill, st.integers(1, 9000), st.integers(0, 40000)), max_size=4)
DECODES = st.lists(st.integers(1, 40000), max_size=6)
BATCHES = st.builds(lambda p, d: BatchShape(prefills=p, decodes=d), PREFILLS, DECODES)


class TestNnls:
    @given(st.integers(0, 10_000))
    def test_meets_the_conditions_of_a_minimum(self, seed):
        rng = np.random.default_rng(seed)
        a, b = rng.standard_normal((20, 6)), rng.standard_normal(20)
        x = nnls(a.T @ a, a.T @ b)
        gradient = a.T @ (b - a @ x)
        assert np.all(x >= 0)
        assert np.all(gradient <= 1e-6)
        assert np.allclose(gradient[x > 0], 0, atol=1e-6)

    def test_columns_of_very_different_size(self):
        rng = np.random.default_rng(0)
        a = rng.random((50, 3)) * [1.0, 1e5, 1e9]
        truth = np.array([0.01, 2e-6, 3e-11])
        assert nnls(a.T @ a, a.T @ a @ truth) == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-6])
def test_a_coefficient_of_just_nothing_ends_the_search(scale):
    found = nnls(np.eye(3), np.array([scale, 0.0, -scale]))
    assert found.tolist() == pytest.approx([scale, 0.0, 0.0])


def test_a_summary_of_errors():
    summary = summarise([1.1, 0.9, 2.0], [1.0, 1.0, 2.0])
    assert summary.bias == pytest.approx(0)
    assert summary.mean == pytest.approx(0.2 / 3)
    assert summary.p50 == pytest.approx(0.1)


@given(BATCHES)
def test_grown_request_by_request_they_are_those_of_the_batch(batch):
    totals = BatchTotals()
    for context in batch.decodes:
        totals.add_decode(context)
    for new, cached in batch.prefills:
        totals.add_prefill(new, cached)
    assert totals == BatchTotals.of(batch)
    assert totals.num_prefills == len(batch.prefills)
    assert totals.num_decodes == len(batch.decodes)
    assert totals.num_new + totals.num_decodes == batch.num_tokens


@given(st.lists(BATCHES, min_size=1, max_size=5))
def test_a_table_holds_the_totals_of_each_batch(batches):
    table = TotalsTable.of([BatchTotals.of(batch) for batch in batches])
    assert len(table) == len(batches)
    for name in TotalsTable.__dataclass_fields__:
        assert getattr(table, name).tolist() == [
            getattr(BatchTotals.of(batch), name) for batch in batches
        ]


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_pairs_are_counted_query_by_query(new, cached):
    # Each query counts the keys before it and half of itself: n * (c + n / 2) in all.
    totals = BatchTotals.of(BatchShape(prefills=[Prefill(new, cached)]))
    doubled = [2 * (cached + i) + 1 for i in range(new)]
    assert totals.double_pairs == sum(doubled)
    assert totals.double_tail_pairs == sum(doubled[QUERY_TILE:])


@given(BATCHES)
def test_decodes_only_leaves_the_prefills_out(batch):
    alone = BatchTotals.of(batch).decodes_only()
    assert alone == BatchTotals.of(BatchShape(decodes=batch.decodes))


def test_what_is_read_once_for_several_decodes_counts_once():
    totals = BatchTotals.of(BatchShape(decodes=[1010, 1020, 30], num_repeated=1000))
    assert totals.decode_context == 1060 and totals.num_decodes == 3
    assert totals.max_decode_context == 1020
