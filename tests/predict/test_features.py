"""Totals that grow request by request, and tables of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import QUERY_TILE, BatchShape, BatchTotals, Prefill
from cosched.predict.fitted import TotalsTable

PREFILLS = st.lists(st.builds(Prefill, st.integers(1, 9000), st.integers(0, 40000)), max_size=4)
DECODES = st.lists(st.integers(1, 40000), max_size=6)
BATCHES = st.builds(lambda p, d: BatchShape(prefills=p, decodes=d), PREFILLS, DECODES)


@given(BATCHES)
def test_grown_request_by_request_they_are_those_of_the_batch(batch):
    totals = BatchTotals()
    for context in batch.decodes:
        totals.add_decode(context)
    for new, cached in batch.prefills:
        totals.add_prefill(new, cached)
    assert totals == BatchTotals.of(batch)
    assert totals.num_prefills + totals.num_decodes == batch.num_sequences
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


def test_a_copy_grows_alone():
    totals = BatchTotals.of(BatchShape(prefills=[Prefill(5, 7)], decodes=[9]))
    totals.add_load(100)
    copy = totals.copy()
    assert copy == totals
    copy.add_prefill(1, 0)
    assert copy != totals
    assert totals.num_new == 5 and totals.num_loaded == 100


@given(BATCHES)
def test_decodes_only_leaves_the_prefills_out(batch):
    alone = BatchTotals.of(batch).decodes_only()
    assert alone == BatchTotals.of(BatchShape(decodes=batch.decodes))
