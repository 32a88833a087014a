"""Reading the CSV files of kernel tables, and what is wrong with them."""

from __future__ import annotations

import pytest

from cosched.errors import ConfigError
from cosched.lab.cost_models.tables import find_tables, read_table
from tests.lab.cost_models.synthetic import ALLREDUCE, ATTENTION, GEMM, write

GOOD = ("T1", "bfloat16", 16, 2048, 1024, 0.25)


def test_plain_and_gzipped_files_read_alike(tmp_path):
    plain = write(tmp_path / "a.csv", GEMM, [GOOD])
    packed = write(tmp_path / "a.csv.gz", GEMM, [GOOD])
    assert read_table(plain, "gemm") == read_table(packed, "gemm") == [(16, 2048, 1024, 0.25e-3)]


def attention(kv_dtype="bfloat16", step=0, window=0):
    return ("T1", 2, 64, 8, 2, 128, "bfloat16", kv_dtype, step, window, 0.5)


REDUCES = [("T1", "bfloat16", 2, 128, 0.005, f"sglang_{kind}") for kind in ("graph", "eager")]


@pytest.mark.parametrize(
    ("kind", "header", "rows", "expected"),
    [
        ("gemm", "latency,k,framework,n,m", [(0.5, 64, "x", 32, 1)], [(1, 32, 64, 0.5e-3)]),
        # Other types, windows and prefixes are skipped.
        (
            "context_attention",
            ATTENTION,
            [attention(), attention("fp8"), attention(window=128), attention(step=512)],
            [(8, 2, 128, 2, 64, 0.5e-3)],
        ),
        # A decode attends to its new token too.
        (
            "generation_attention",
            ATTENTION,
            [("T1", 4, 1, 8, 2, 128, "bfloat16", "bfloat16", 1023, 0, 0.5)],
            [(8, 2, 128, 4, 1024, 0.5e-3)],
        ),
        # All-reduces come from graphs.
        ("allreduce", ALLREDUCE, REDUCES, [(2, 128, pytest.approx(5e-6))]),
    ],
)
def test_rows_are_read_by_the_names_of_their_columns(tmp_path, kind, header, rows, expected):
    assert read_table(write(tmp_path / "a.csv", header, rows), kind) == expected


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (("T1", "bfloat16", "many", 32, 32, 0.5), "'many'"),
        (("T1", "bfloat16", 1, 32, 32, "fast"), "'fast'"),
        (("T1", "bfloat16", 1, 32, 32, 0), "latency is 0 ms"),
        (("T1", "bfloat16", 1, 32, 32, "nan"), "latency is nan ms"),
        (("T1", "bfloat16", -1, 32, 32, 0.5), "negative size"),
        (("T1", "bfloat16", 1, 32), "4 cells, the header has 6"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, bad, message):
    path = write(tmp_path / "bad.csv.gz", GEMM, [GOOD, GOOD, bad])
    with pytest.raises(ConfigError) as error:
        read_table(path, "gemm")
    assert f"{path}:4: " in str(error.value)
    assert message in str(error.value)


def test_a_table_without_its_columns_or_usable_rows_or_file_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", "m,n,latency", [(1, 2, 3)])
    with pytest.raises(ConfigError, match=r"a\.csv:1: no column k; there are latency, m, n"):
        read_table(path, "gemm")
    path = write(tmp_path / "a.csv", GEMM, [("T1", "fp8", 16, 2048, 1024, 0.25)])
    with pytest.raises(ConfigError, match="no bfloat16 rows"):
        read_table(path, "gemm")
    with pytest.raises(ConfigError, match="No such file"):
        read_table(tmp_path / "none.csv", "gemm")


def test_tables_are_found_where_the_data_sets_keep_them(tmp_path, table_dir):
    with pytest.raises(ConfigError, match=r"no kernel tables in .*t1_\*_gemm"):
        find_tables(tmp_path, "t1")
    folder = tmp_path / "profiles" / "aiconfigurator"
    folder.parent.mkdir()
    folder.symlink_to(table_dir)
    paths = find_tables(tmp_path, "t1")
    assert paths["gemm"] == folder / "t1_any_gemm.csv.gz"
    assert paths["allreduce"] == folder / "t1_any_custom_allreduce.csv"
    with pytest.raises(ConfigError, match=r"no gemm table for h100_sxm .*t1_any_gemm"):
        find_tables(table_dir, "h100_sxm")


def test_two_versions_of_one_table_are_refused(tmp_path):
    for name in ("t1_old_gemm.csv", "t1_new_gemm.csv"):
        write(tmp_path / name, GEMM, [GOOD])
    with pytest.raises(ConfigError, match=r"2 gemm tables .*t1_new_gemm.*keep one"):
        find_tables(tmp_path, "t1")
