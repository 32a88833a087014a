"""Sums over an iteration."""

from cosched.core.batch import BatchShape, BatchTotals


def test_what_is_read_once_for_several_decodes_counts_once():
    totals = BatchTotals.of(BatchShape(decodes=[1010, 1020, 30], num_repeated=1000))
    assert totals.decode_context == 1060 and totals.num_decodes == 3
    assert totals.max_decode_context == 1020
