"""Servers with a stand-in for the engine, in threads of this process."""

from __future__ import annotations

import pytest

from cosched.batches.config import BatchesConfig
from tests.batches.api import Api, serving
from tests.batches.stand_in import StandIn


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "batches"


@pytest.fixture
def stand_in(folder, request):
    """`@pytest.mark.parametrize("stand_in", [{...}], indirect=True)` gives it settings."""
    settings = getattr(request, "param", {})
    return StandIn(BatchesConfig(folder=str(folder), **settings))


@pytest.fixture
def api(stand_in):
    with serving(stand_in) as url:
        yield Api(url)
