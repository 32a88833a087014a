"""Kernel tables: made-up ones for every test, real ones where the machine has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cosched.lab.cost_models.kernel_table import KernelTableModel
from tests.lab.cost_models.synthetic import GPU, MODEL, write_tables

DATA = Path(
    os.environ.get("COSCHED_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data"
)


@pytest.fixture(scope="session")
def real_tables() -> Path:
    """Folder of the public data sets; the test is skipped where there is none."""
    if not (DATA / "profiles" / "aiconfigurator").is_dir():
        pytest.skip(f"no kernel tables in {DATA} (COSCHED_DATA)")
    return DATA


@pytest.fixture(scope="session")
def table_dir(tmp_path_factory) -> Path:
    """Tables of the made-up GPU, 3 % noise."""
    return write_tables(tmp_path_factory.mktemp("tables"), noise=0.03)


@pytest.fixture(scope="session")
def toy(table_dir) -> KernelTableModel:
    return KernelTableModel(model=MODEL, gpu=GPU, data_dir=table_dir)
