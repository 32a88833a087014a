"""The error a table states of itself."""

from __future__ import annotations

import pytest

from cosched.cost_models.attention import ContextTable, GenerationTable
from cosched.cost_models.gemm import AllReduceTable, GemmTable
from cosched.cost_models.tables import (
    find_tables,
    read_allreduce,
    read_context_attention,
    read_gemm,
    read_generation_attention,
)
from cosched.errors import ConfigError
from cosched.latency.relative_error import summarise
from tests.scripts import script

REPORT = script("cost_model_report")


def test_a_summary():
    summary = summarise([1.1, 0.9, 2.0], [1.0, 1.0, 2.0])
    assert summary.bias == pytest.approx(0)
    assert summary.mean == pytest.approx(0.2 / 3)
    assert summary.p50 == pytest.approx(0.1)


def test_smooth_tables_predict_their_own_rows(table_dir):
    paths = find_tables(table_dir, "t1")
    gemm = REPORT.held_out_error(GemmTable(read_gemm(paths.gemm)), seed=1)
    assert gemm.rows.mean < 0.15
    assert gemm.curves is not None
    generation = REPORT.held_out_error(
        GenerationTable(read_generation_attention(paths.generation_attention)), seed=1
    )
    assert generation.rows.mean < 0.2
    context = REPORT.held_out_error(
        ContextTable(read_context_attention(paths.context_attention)), seed=1
    )
    assert context.rows.mean < 0.4


def test_the_same_seed_holds_out_the_same_rows(table_dir):
    table = AllReduceTable(read_allreduce(find_tables(table_dir, "t1").allreduce))
    first, again = (REPORT.held_out_error(table, fraction=0.3, seed=4) for _ in range(2))
    assert first == again


def test_a_wrong_fraction_is_named(table_dir):
    with pytest.raises(ConfigError, match=r"fraction is 1\.5"):
        REPORT.held_out_error(GemmTable(read_gemm(find_tables(table_dir, "t1").gemm)), fraction=1.5)


def test_the_report_says_what_it_cannot_find(tmp_path, capsys):
    assert REPORT.main(["--data-dir", str(tmp_path)]) == 1
    assert "no kernel tables in" in capsys.readouterr().err
