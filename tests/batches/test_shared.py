"""Several servers with one PostgreSQL store and one folder, each with a stand-in for its engine."""

from __future__ import annotations

import contextlib
import logging

import openai
import pytest
import sqlalchemy as sa

from cosched.batches.config import BatchesConfig
from cosched.batches.database import servers
from tests.batches.api import Api, line, serving, until
from tests.batches.stand_in import StandIn
from tests.batches.test_store import asked

LEASE_S = 1.5


@pytest.fixture
def two(folder, postgres_url):
    """Two of (stand-in, `Api`)."""
    config = BatchesConfig(folder=str(folder), url=postgres_url, lease_s=LEASE_S)
    with contextlib.ExitStack() as stack:
        stand_ins = [StandIn(config), StandIn(config)]
        yield [(one, Api(stack.enter_context(serving(one)))) for one in stand_ins]


def lines(count):
    return [line(f"{n}") for n in range(count)]


def both_live(stand_in):
    def look():
        with stand_in.service._database.read() as connection:
            return len(connection.execute(sa.select(servers)).all()) == 2

    until(look)


def test_any_server_is_asked_and_all_answer(two):
    (first, at_first), (second, at_second) = two
    both_live(first)
    file = at_first.upload(lines(1500))
    batch = at_second.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="1h"
    )
    ended = at_first.wait(batch)
    outcome = at_second.outcome(ended)
    assert outcome == {f"{n}": f"to {n}" for n in range(1500)}
    assert first.asked and second.asked
    assert (first.asked + second.asked).total() == 1500, "no line is sent twice"


def test_a_cancelled_batch_is_let_go_by_all(two):
    (first, at_first), (second, _) = two
    for stand_in in (first, second):
        stand_in.is_held = True
    batch = at_first.create(lines(1500))
    until(lambda: first.num_under_way and second.num_under_way)
    at_first.batches.cancel(batch.id)
    ended = at_first.wait(batch)
    assert ended.status == "cancelled"
    assert first.hung_up and second.hung_up
    assert set(at_first.outcome(ended).values()) == {"batch_cancelled"}


def test_a_server_that_ends_leaves_its_lines_at_once(folder, postgres_url):
    config = BatchesConfig(folder=str(folder), url=postgres_url, lease_s=10_000)
    first, second = StandIn(config), StandIn(config)
    first.is_held = True
    with serving(second) as url:
        with serving(first):
            until(lambda: first.service._feeder is not None)
            both_live(first)
            second.is_held = True
            batch = Api(url).create(lines(600))
            until(lambda: first.num_under_way and second.num_under_way)
            second.is_held = False
        assert len(Api(url).outcome(Api(url).wait(batch))) == 600


def test_what_another_server_validates_is_left_to_it(folder, postgres_url):
    config = BatchesConfig(folder=str(folder), url=postgres_url, lease_s=10_000)
    stand_in = StandIn(config)
    store = stand_in.service.store
    store.join("other", lease_s=10_000)
    first = store.create(asked())
    assert store.begin_validation(first.id, server="other")
    with serving(stand_in) as url:
        api = Api(url)
        assert len(api.outcome(api.wait(api.create(lines(10))))) == 10
        assert store.get(first.id).status == "validating"
        store.leave("other")
        until(lambda: store.get(first.id).status == "failed")  # there is no such file


def test_a_server_that_was_taken_for_dead_goes_on(two, caplog):
    (first, at_first), (second, _) = two
    first.is_held = True
    batch = at_first.create(lines(900))
    until(lambda: first.num_under_way)
    with caplog.at_level(logging.WARNING, logger="cosched.batches.feeder"):
        for name in (first.service._feeder._name, second.service._feeder._name):
            first.service.store.leave(name)
        first.is_held = False
        ended = at_first.wait(batch)
    assert "nothing was heard of this server" in caplog.text
    assert at_first.outcome(ended) == {f"{n}": f"to {n}" for n in range(900)}
    assert ended.usage.output_tokens == 2 * 900


def test_a_database_that_goes_away_for_a_moment_costs_nothing(two):
    (first, at_first), (second, _) = two
    batch = at_first.create(lines(1500))
    for count in (100, 300, 600):
        until(lambda n=count: (first.asked + second.asked).total() > n)
        with first.service._database.write() as connection, contextlib.suppress(sa.exc.DBAPIError):
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'tests' "
                "AND pid <> pg_backend_pid()"
            )
    with contextlib.suppress(openai.InternalServerError):  # its connection was cut
        at_first.batches.retrieve(batch.id)
    outcome = at_first.outcome(at_first.wait(batch))
    assert outcome == {f"{n}": f"to {n}" for n in range(1500)}
