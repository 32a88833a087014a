"""Numbers of heads that were not measured, gaps and edges of the grids."""

from __future__ import annotations

import pytest

from cosched.errors import ConfigError
from cosched.lab.cost_models.attention import ContextTable, GenerationAttention, GenerationTable
from cosched.lab.cost_models.tables import AttentionRow

BATCHES = (1, 4, 16)
LENGTHS = (16, 256, 4096)


def rows(heads, seconds):
    return [
        AttentionRow(h, kv, 128, batch, length, seconds(h, batch, length))
        for h, kv in heads
        for batch in BATCHES
        for length in LENGTHS
    ]


def seconds(heads, batch, length):
    return 1e-5 + 1e-9 * heads * batch * length


def test_heads_between_measured_ones():
    table = GenerationTable(rows([(16, 4), (32, 4)], seconds))
    between = table.attention(28, 4, 128).equal_s(4, 256)
    assert between == pytest.approx(seconds(28, 4, 256))


def test_ungrouped_heads_go_by_their_own_kind():
    table = GenerationTable(rows([(8, 8), (16, 16), (12, 8)], seconds))
    assert table.attention(12, 12, 128).equal_s(4, 256) == pytest.approx(seconds(12, 4, 256))


@pytest.mark.parametrize("shape", [(64, 4, 128), (16, 3, 128), (16, 4, 64)])
def test_heads_outside_the_table_are_refused_by_name(shape):
    table = ContextTable(rows([(16, 4), (32, 4)], seconds))
    with pytest.raises(
        ConfigError, match=f"{shape[0]} query and {shape[1]} KV heads of {shape[2]}"
    ):
        table.attention(*shape)


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
    doubled = [*rows([(16, 4)], seconds), AttentionRow(16, 4, 128, 4, 256, 1.0)]
    assert GenerationTable(doubled).attention(16, 4, 128).equal_s(4, 256) < 1e-3
