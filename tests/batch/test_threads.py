"""Calls of one key take their own time and threads, not those of others."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

import cosched
import cosched_patches
from cosched.batch.config import BatchesConfig
from cosched.batch.database import Database, database_url
from cosched.batch.errors import ApiError, StoreUnavailableError
from cosched.batch.ingest import ValidationTurns
from cosched.batch.service import BatchService
from cosched.batch.threads import FairSlots, FairThreads
from tests.batch.api import lines, serving, until
from tests.batch.stand_in import StandIn
from tests.batch.test_store import batch_of

_DEFAULT_EXECUTOR = r"\bto_thread\(|run_in_executor\(\s*None"


def test_a_key_whose_calls_hang_keeps_only_itself_waiting():
    async def run():
        slots = FairSlots(3, per_key=2, max_waiting=4)
        threads = FairThreads("test", slots, answer_s=0.2)
        end = threading.Event()
        asyncio.get_running_loop().call_later(120, end.set)  # or a failure would never end
        hanging = [asyncio.create_task(threads.run("a", end.wait)) for _ in range(6)]
        await asyncio.sleep(0)
        threads._answer_s = 60.0  # the others are answered, however slow the machine is
        with pytest.raises(ApiError, match="2 such calls under way, and 4 that wait") as error:
            await threads.run("a", end.wait)
        assert error.value.status == 429 and error.value.retry_after_s
        assert await threads.run("b", lambda: "at once") == "at once"
        found = await asyncio.gather(*hanging, return_exceptions=True)
        assert {type(one) for one in found} == {StoreUnavailableError}
        # Calls that were given up keep their threads until they return.
        threads._answer_s = 0.1
        with pytest.raises(StoreUnavailableError):
            await threads.run("a", lambda: None)
        end.set()
        threads._answer_s = 60.0
        assert await threads.run("a", lambda: "again") == "again"
        threads.close()

    asyncio.run(run())


def test_a_slot_of_a_key_rests_after_a_call():
    """So that a key which calls without pause leaves the processor to chats."""

    async def run():
        threads = FairThreads("test", FairSlots(3, per_key=1), rest_s=60)
        await threads.run("a", lambda: None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(threads.run("a", lambda: None), 0.05)
        for _ in range(3):
            await threads.run_long("b", lambda: None)
            await threads.run(None, lambda: None)  # all clients of a server without keys
        threads.close()

    asyncio.run(run())


def test_the_cost_of_aborted_lines_is_written_in_a_thread_of_the_store(folder, monkeypatch):
    service = BatchService(BatchesConfig(folder=str(folder)))
    written = []

    def add_cost(batch, seconds):
        written.append((batch, seconds, threading.current_thread().name.rpartition("_")[0]))

    monkeypatch.setattr(service._opened.database, "add_cost", add_cost)

    async def run():
        for seconds in (1.0, 2.0):
            service._aborted("b", seconds)
        await asyncio.gather(*service._writing)

    asyncio.run(run())
    service.close()
    assert written == [("b", 1.0, "cosched-costs"), ("b", 2.0, "cosched-costs")]


def test_nothing_of_the_http_process_runs_in_the_threads_that_prepare_chats():
    """They are those of asyncio's default executor."""
    root = Path(cosched.__file__).parent
    files = [*root.glob("batch/*.py"), *root.glob("server/*.py"), *root.glob("limits/*.py")]
    files += Path(cosched_patches.__file__).parent.glob("*.py")
    assert len(files) > 50
    found = [path.name for path in files if re.search(_DEFAULT_EXECUTOR, path.read_text())]
    assert not found


def test_slots_go_round_over_keys():
    async def run():
        slots, order = FairSlots(1, per_key=1), []

        async def use(key):
            await slots.enter(key)
            order.append(key)
            await asyncio.sleep(0)
            slots.leave(key)

        await asyncio.gather(*map(use, "aaaabbc"))
        assert "b" in order[:3] and "c" in order[:4] and order[-1] == "a", order

    asyncio.run(run())


def test_one_batch_of_a_key_is_validated_after_at_most_one_of_each_other_key():
    turns, waiting = ValidationTurns(), [batch_of(id=f"a{n}", owner="a") for n in range(9)]
    order = []
    for number in range(9):
        if number == 3:
            waiting += [batch_of(id=f"b{n}", owner="b") for n in range(2)]
        if number == 4:
            waiting.append(batch_of(id="c0", owner="c"))
        batch = turns.next(waiting)
        waiting.remove(batch)
        order.append(batch.id)
    assert set(order[3:5]) == {"a3", "b0"} and "c0" in order[4:7], order
    assert order.index("b1") < order.index("a5") if "a5" in order else True


def test_a_large_file_counts_as_many_small_ones():
    turns = ValidationTurns()
    large = [batch_of(id=f"l{n}", owner="l", num_bytes=100_000_000) for n in range(3)]
    small = [batch_of(id=f"s{n}", owner="s", num_bytes=1000) for n in range(50)]
    order = []
    for waiting in [large + small for _ in range(30)]:
        batch = turns.next([one for one in waiting if one.id not in order])
        order.append(batch.id)
    assert sum(name.startswith("l") for name in order) == 1, order


def test_what_waits_for_a_lock_is_a_503_while_others_are_answered(
    folder, postgres_url, monkeypatch
):
    """A locked table of PostgreSQL. The store has its own threads: the default executor of asyncio,
    in which SGLang prepares chats, stays free."""
    monkeypatch.setattr("cosched.batch.service._ANSWER_S", 120.0)
    monkeypatch.setattr("cosched.batch.database._TIMEOUTS", "-c lock_timeout=120s")
    stand_in = StandIn(BatchesConfig(folder=str(folder), url=postgres_url))
    used = []

    async def prepare():
        await asyncio.get_running_loop().run_in_executor(None, used.append, 1)

    stand_in.app.add_api_route("/prepare", prepare)
    engine = sa.create_engine(database_url(postgres_url), poolclass=sa.NullPool)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    cancel = waiting.replace("count(*)", "pg_cancel_backend(pid)")
    with serving(stand_in) as url, engine.connect() as connection:
        found, headers = [], {"authorization": "Bearer a"}
        connection.exec_driver_sql("LOCK TABLE batches IN ACCESS EXCLUSIVE MODE")

        def ask():
            found.append(httpx.get(f"{url}/v1/batches/x", headers=headers, timeout=120))

        asking = [threading.Thread(target=ask) for _ in range(8)]
        for thread in asking:
            thread.start()
        until(lambda: connection.exec_driver_sql(waiting).scalar())
        for _ in range(3):
            httpx.get(f"{url}/prepare", timeout=120).raise_for_status()
        assert not found
        connection.exec_driver_sql(cancel)  # as PostgreSQL does after `lock_timeout`
        until(lambda: found)
        connection.rollback()
        for thread in asking:
            thread.join()
    refused = [reply for reply in found if reply.status_code == 503]
    assert refused and refused[0].json()["error"]["code"] == "store_away"
    assert refused[0].headers["retry-after"] == "5"
    assert {reply.status_code for reply in found} <= {404, 503}


def test_one_writer_of_sqlite_does_not_keep_others_waiting_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("cosched.batch.database._LOCK_S", 0.1)
    database = Database(f"sqlite:///{tmp_path / 'b.sqlite'}")
    with database.write(), pytest.raises(StoreUnavailableError) as error:
        with database.write():
            pass
    assert "another thread writes" in error.value.reason
    with database.write():
        pass
    database.close()


def test_showing_a_batch_reads_no_other(api, stand_in, monkeypatch):
    stand_in.is_held = True
    batch = api.create(lines(2))
    api.wait(batch, "in_progress")
    until(lambda: api.batches.retrieve(batch.id).cosched["running"] == 2)
    monkeypatch.setattr(stand_in.service._feeder, "_step", asyncio.Event().wait)
    monkeypatch.setattr(stand_in.service.store, "open", None)
    assert api.batches.retrieve(batch.id).cosched["running"] == 2
    stand_in.is_held = False
