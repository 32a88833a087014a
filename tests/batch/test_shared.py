"""Several servers with one PostgreSQL store and one folder, each with a stand-in for its engine."""

from __future__ import annotations

import contextlib
import logging

import httpx
import openai
import pytest
import sqlalchemy as sa

from cosched.batch.config import BatchesConfig
from cosched.batch.database import servers
from tests.batch import postgres
from tests.batch.api import Api, lines, serving, until
from tests.batch.stand_in import StandIn
from tests.batch.test_store import asked

LEASE_S = 1.5
LONG_LEASE_S = 12.0  # a busy machine misses no heartbeat


def configured(folder, url, lease_s):
    """Each server holds few lines, so that few make work for all."""
    limits = {"high_watermark": 64, "low_watermark": 48}
    return BatchesConfig(folder=str(folder), url=url, lease_s=lease_s, **limits)


@pytest.fixture
def two(request, folder, postgres_url):
    """Two of (stand-in, `Api`)."""
    lease_s = getattr(request, "param", LONG_LEASE_S)
    config = configured(folder, postgres_url, lease_s)
    with contextlib.ExitStack() as stack:
        stand_ins = [StandIn(config), StandIn(config)]
        yield [(one, Api(stack.enter_context(serving(one)))) for one in stand_ins]


@pytest.fixture
def cluster():
    """A PostgreSQL server that may be stopped."""
    postgres.skip_if_missing()
    with postgres.cluster() as cluster:
        yield cluster


def answers(count):
    return {f"c{n}": f"to c{n}" for n in range(count)}


def listed(url):
    return httpx.get(f"{url}/v1/batches", headers={"authorization": "Bearer key"}).json()


def both_live(stand_in):
    def look():
        with stand_in.service._opened.database.read() as connection:
            return len(connection.execute(sa.select(servers)).all()) == 2

    until(look)


def test_any_server_is_asked_and_all_answer(two):
    (first, at_first), (second, at_second) = two
    both_live(first)
    file = at_first.upload(lines(400))
    ended = at_first.wait(at_second.start(file.id))
    outcome = at_second.outcome(ended)
    assert outcome == answers(400)
    assert first.asked and second.asked
    for api in (at_first, at_second):
        until(lambda at=api.url: listed(at)["cosched"] == {"servers": 2})
        assert "cosched:batches_servers 2.0" in httpx.get(f"{api.url}/cosched/metrics").text
    assert (first.asked + second.asked).total() == 400, "no line is sent twice"


def test_a_batch_that_one_server_could_hold_runs_on_both(two):
    (first, at_first), (second, at_second) = two
    for api in (at_first, at_second):
        until(lambda at=api.url: listed(at)["cosched"] == {"servers": 2})
    first.is_held = second.is_held = True
    batch = at_first.create(lines(40))
    until(lambda: first.num_in_flight + second.num_in_flight == 40)
    assert first.num_in_flight == second.num_in_flight == 20
    first.is_held = second.is_held = False
    assert at_first.outcome(at_first.wait(batch)) == answers(40)
    assert (first.asked + second.asked).total() == 40


def test_a_server_that_ends_leaves_its_lines_at_once(folder, postgres_url):
    config = configured(folder, postgres_url, 10_000)
    first, second = StandIn(config), StandIn(config)
    first.is_held = True
    with serving(second) as url:
        with serving(first):
            until(lambda: first.service._feeder is not None)
            both_live(first)
            second.is_held = True
            batch = Api(url).create(lines(300))
            until(lambda: first.num_in_flight and second.num_in_flight)
            second.is_held = False
        assert len(Api(url).outcome(Api(url).wait(batch))) == 300


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


@pytest.mark.parametrize("two", [LEASE_S], indirect=True)
def test_a_server_that_was_found_dead_continues(two, caplog):
    (first, at_first), (second, _) = two
    first.is_held = True
    batch = at_first.create(lines(200))
    until(lambda: first.num_in_flight)
    with caplog.at_level(logging.WARNING, logger="cosched.batch.storage"):
        for name in (first.service._feeder._name, second.service._feeder._name):
            first.service.store.leave(name)
        first.is_held = False
        ended = at_first.wait(batch)
    assert "this server sent no heartbeat" in caplog.text
    assert at_first.outcome(ended) == answers(200)
    assert ended.usage.output_tokens == 2 * 200


def test_a_database_that_goes_away_for_a_moment_costs_nothing(two):
    (first, at_first), (second, _) = two
    batch = at_first.create(lines(600))
    for count in (60, 180, 300):
        until(lambda n=count: (first.asked + second.asked).total() > n)
        with (
            first.service._opened.database.write() as connection,
            contextlib.suppress(sa.exc.DBAPIError),
        ):
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'tests' "
                "AND pid <> pg_backend_pid()"
            )
    with contextlib.suppress(openai.InternalServerError):  # its connection was cut
        at_first.batches.retrieve(batch.id)
    assert at_first.outcome(at_first.wait(batch)) == answers(600)


def test_a_stopped_database_is_reported_and_may_come_back(cluster, folder, caplog):
    """The rest of the server continues. Answers from that time are written afterwards."""
    config = configured(folder, cluster.url, LEASE_S)
    stand_in = StandIn(config)
    stand_in.is_held = True
    with serving(stand_in) as url, caplog.at_level(logging.INFO, logger="cosched"):
        api = Api(url)
        batch = api.create(lines(150))
        until(lambda: stand_in.num_in_flight > 50)
        cluster.stop()
        try:
            stand_in.is_held = False  # their answers come while there is nowhere to put them
            until(lambda: not stand_in.num_in_flight)
            for method, path in (
                ("GET", f"/v1/batches/{batch.id}"),
                ("POST", f"/v1/batches/{batch.id}/cancel"),
                ("GET", "/v1/batches"),
                ("GET", "/v1/files"),
                ("GET", "/v1/files/file-1/content"),
                ("GET", "/cosched/metrics"),
            ):
                reply = httpx.request(method, url + path, headers={"authorization": "Bearer key"})
                assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
                error = reply.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "store_away")
                message = "the store of batches cannot be used now; try again"
                assert error["message"] == message, "it names no host"
            with pytest.raises(openai.InternalServerError, match="cannot be used now"):
                api.upload(lines(1))
            assert len(list((folder / "files").iterdir())) == 1, "an upload was left behind"
            assert httpx.get(f"{url}/v1/models").status_code == 200
            asked_before = stand_in.asked.total()
        finally:
            cluster.start()
        outcome = api.outcome(api.wait(batch))
    assert outcome == answers(150)
    assert stand_in.asked.total() == 150 and asked_before < 150, "answers were thrown away"
    away = [one for one in caplog.records if "cannot be used now" in one.getMessage()]
    assert 1 <= len(away) <= 2 and "the store is back" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_server_ends_in_order_while_the_database_is_away(cluster, folder, caplog):
    stand_in = StandIn(BatchesConfig(folder=str(folder), url=cluster.url, lease_s=LEASE_S))
    with serving(stand_in) as url:
        batch = Api(url).create(lines(10))
        Api(url).wait(batch)
        cluster.stop()
    cluster.start()
    assert "are sent again" in caplog.text and "no line is sent" not in caplog.text
