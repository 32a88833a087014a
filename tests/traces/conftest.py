"""The folder of real traces, where a machine has one."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """COSCHED_DATA, else ``../shared/data`` beside the repository; tests skip without it."""
    path = Path(os.environ.get("COSCHED_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no real traces in {path}; COSCHED_DATA names another folder")
    return path
