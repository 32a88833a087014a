"""`scripts/attack` runs the whole of these tests; else they take seconds, and start no server."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def is_full() -> bool:
    return bool(os.environ.get("COSCHED_ATTACK"))
