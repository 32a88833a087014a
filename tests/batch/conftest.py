"""Stores on both databases; servers with a stand-in for the engine, in threads of this process."""

from __future__ import annotations

import contextlib

import pytest

from cosched.batch.config import BatchesConfig
from cosched.batch.database import Database
from tests.batch import postgres
from tests.batch.api import Api, serving
from tests.batch.stand_in import Clock, StandIn


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="session")
def postgres_cluster():
    """A PostgreSQL server of this worker's own."""
    postgres.skip_if_missing()
    with postgres.cluster() as cluster:
        yield cluster.url


@pytest.fixture
def postgres_url(postgres_cluster):
    """Of a database without tables."""
    postgres.make_empty(postgres_cluster)
    return postgres_cluster


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """Of a database without tables, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'b.sqlite'}"
    return request.getfixturevalue("postgres_url")


@pytest.fixture
def database(url):
    with contextlib.closing(Database(url)) as database:
        yield database


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
