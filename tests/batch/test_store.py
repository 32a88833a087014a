"""The store against a model of it: whatever happens in whatever order, also servers that end or are
silent for too long, every line of a batch has one result."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cosched.batch.batch_records import Batch, Fault, Finished, NewBatch, NewLine, Status
from cosched.batch.database import VERSION, Database, batches, results, store_row
from cosched.batch.documents import Claim, Part
from cosched.batch.errors import ApiError
from cosched.batch.files import FileStore
from cosched.batch.jsonl.line_results import Answer, Failure
from cosched.batch.jsonl.lines import RequestLine
from cosched.batch.storage import FolderStorage
from cosched.batch.store import BatchStore, records_of
from cosched.errors import ConfigError
from tests.batch import postgres
from tests.batch.stand_in import Clock
from tests.request_lines import error_of

WINDOW_S = 100
LEASE_S = 30
URL = "/v1/completions"


def asked(owner="a", window_s=WINDOW_S, **changes):
    fields = {
        "owner": owner,
        "tenant": "",
        "endpoint": URL,
        "input_file_id": "file-1",
        "completion_window": "100s",
        "window_s": window_s,
        "metadata": None,
        "output_expires_after_s": None,
    }
    return NewBatch(**(fields | changes))


def batch_of(**changes):
    """As the store tells of one."""
    fields = {
        "id": "batch_1",
        "status": Status.IN_PROGRESS,
        "ending": None,
        "created_at": 0,
        "expires_at": 0,
        "times": {},
        "faults": (),
        "total": 20,
        "completed": 0,
        "failed": 0,
        "closed": 0,
        "input_tokens": 0,
        "output_tokens": 0,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "device_s": 0.0,
        "output_file_id": None,
        "error_file_id": None,
    }
    return Batch(**(asdict(asked()) | fields | changes))


def new_line(number, key=b""):
    return NewLine(number=number, custom_id=f"c{number}", start=0, num_bytes=10, prefix_key=key)


def result(batch_id, number, *, good=True):
    line = RequestLine(number=number, custom_id=f"c{number}", url=URL, body=b"")
    answer = Answer(status=200, request_id="", body=b"{}", prompt_tokens=2, completion_tokens=3)
    outcome = answer if good else Failure(code="http_400", message="no")
    record = records_of(batch_id).record(line, outcome)
    return Finished(
        batch_id=batch_id,
        number=number,
        is_answer=good,
        data=record.data,
        input_tokens=2 if good else 0,
        output_tokens=3 if good else 0,
    )


class Machine(RuleBasedStateMachine):
    """`model`: batch -> line -> what is known of it: None, or the code of its result. `taken`:
    batch -> line -> the server that has leased it. `living`: server -> until when."""

    names = ("one",)

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.model = {}
        self.start()

    def url(self):
        return f"sqlite:///{self.folder / 'b.sqlite'}"

    def start(self):
        """All servers begin."""
        self.database = Database(self.url())
        self.store = BatchStore(self.database, clock=self.clock)
        self.files = FileStore(self.database, FolderStorage(self.folder), clock=self.clock)
        self.taken = {name: {} for name in self.model}
        self.living = {}
        for server in self.names:
            self.join(server)

    def join(self, server):
        self.store.join(server, lease_s=LEASE_S)
        self.living[server] = self.clock() + LEASE_S

    def teardown(self):
        for name in self.model:
            self.end_and_check(name)
        self.database.close()
        shutil.rmtree(self.folder)

    def lose(self, server):
        for leases in self.taken.values():
            for number in [n for n, owner in leases.items() if owner == server]:
                del leases[number]

    @rule(data=st.data())
    def beat(self, data):
        server = data.draw(st.sampled_from(self.names))
        is_known = server in self.living
        num_living = self.store.beat(server, lease_s=LEASE_S)
        if not is_known:
            assert num_living == 0
            self.join(server)
            return
        self.living[server] = self.clock() + LEASE_S
        for other in [one for one, until in self.living.items() if until < self.clock()]:
            del self.living[other]
            self.lose(other)
        assert num_living == len(self.living)

    @rule(data=st.data())
    def leave(self, data):
        server = data.draw(st.sampled_from(self.names))
        self.store.leave(server)
        self.living.pop(server, None)
        self.lose(server)

    def some(self, data, *statuses):
        found = [name for name in self.model if self.store.get(name).status in statuses]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(num_lines=st.integers(1, 8), window_s=st.integers(1, 200))
    def create(self, num_lines, window_s):
        batch = self.store.create(asked(window_s=window_s))
        lines = [new_line(n) for n in range(1, num_lines + 1)]
        for server in self.names:
            if server in self.living:
                assert self.store.begin_validation(batch.id, server=server)
                assert self.store.add_lines(batch.id, lines, server=server)
                self.store.accept(batch.id, server=server)
                break
        else:
            self.store.cancel(batch.id)
            assert self.store.end(batch.id)
            return
        self.model[batch.id] = dict.fromkeys(range(1, num_lines + 1))
        self.taken[batch.id] = {}

    @rule(data=st.data(), limit=st.integers(1, 5), num_ahead=st.integers(0, 3))
    def take(self, data, limit, num_ahead):
        if not self.model:
            return
        names = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        server = data.draw(st.sampled_from(self.names))
        num_here = st.integers(0, 3)
        claim = Claim(
            parts=tuple(Part(batch_id=n, most=99, num_here=data.draw(num_here)) for n in names),
            limit=limit,
            num_ahead=num_ahead if len(self.names) > 1 else 0,
        )
        found = self.store.take(claim, max_bytes=10**6, server=server)
        lines = [(name, line.number) for name, line in found]
        assert len(set(lines)) == len(lines)
        free = {
            (name, number)
            for name in names
            for number, code in self.model[name].items()
            if self.store.get(name).status is Status.IN_PROGRESS
            and code is None
            and number not in self.taken[name]
        }
        assert set(lines) <= free
        if server not in self.living:
            assert not lines
        elif len(self.names) == 1:
            assert len(lines) == min(limit, len(free))
        else:
            assert bool(lines) == bool(free), "lines wait, and this server gets none"
        for name, number in lines:
            self.taken[name][number] = server

    @rule(data=st.data(), good=st.booleans())
    def finish(self, data, good):
        name = self.some(data, *Status)
        if name is None:
            return
        # Any line: one that was never taken, or has a result, or whose batch has ended.
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.model[name])), max_size=4))
        num_kept = self.store.finish([result(name, n, good=good) for n in numbers])
        expected = {n for n in numbers if self.model[name][n] is None}
        assert num_kept == len(expected)
        for number in expected:
            self.model[name][number] = "" if good else "http_400"
            self.taken[name].pop(number, None)

    @rule(data=st.data())
    def cancel(self, data):
        name = self.some(data, *Status)
        if name is None:
            return
        before = self.store.get(name).status
        if before in (Status.IN_PROGRESS, Status.CANCELLING):
            assert self.store.cancel(name).status is Status.CANCELLING
        else:
            with pytest.raises(ApiError, match=before):
                self.store.cancel(name)

    @rule(seconds=st.integers(1, 60))
    def wait(self, seconds):
        self.clock.now_s += seconds
        self.store.expire_due()

    @rule(data=st.data(), limit=st.integers(1, 3), steps=st.integers(0, 3))
    def begin_to_end(self, data, limit, steps):
        name = self.some(data, Status.FINALIZING, Status.CANCELLING)
        if name is None:
            return
        self.drop(name)
        code = {Status.EXPIRED: "batch_expired", Status.CANCELLED: "batch_cancelled"}
        for _ in range(steps):
            self.store.close_lines(name, limit=limit)
        ended = code.get(self.store.get(name).ending)
        for record in self.results(name, is_errors=True):
            if error_of(record)["code"] == ended:
                self.model[name][record["line"]] = ended

    @rule()
    @precondition(lambda self: self.model)
    def restart(self):
        self.database.close()
        self.start()

    @rule(data=st.data())
    def end(self, data):
        name = self.some(data, Status.FINALIZING, Status.CANCELLING)
        if name is not None:
            self.end_and_check(name)

    def end_and_check(self, name):
        batch = self.store.get(name)
        if batch.status is Status.IN_PROGRESS:
            self.store.cancel(name)
            batch = self.store.get(name)
        if batch.ending is None:
            return
        if self.taken[name]:
            assert not self.store.end(name), "lines are in flight"
        self.drop(name)
        while self.store.close_lines(name, limit=2):
            pass
        assert self.store.end(name)
        assert self.store.end(name)  # once more does nothing
        after = self.store.get(name)
        assert after.status is batch.ending and after.status in after.times
        closed = {Status.EXPIRED: "batch_expired", Status.CANCELLED: "batch_cancelled"}
        for number, code in self.model[name].items():
            if code is None:
                self.model[name][number] = closed[after.status]
        good = self.content(after.output_file_id)
        bad = self.content(after.error_file_id)
        assert {r["custom_id"]: "" for r in good} | {
            r["custom_id"]: error_of(r)["code"] for r in bad
        } == {f"c{n}": code for n, code in self.model[name].items()}
        assert len(good) + len(bad) == after.total == len(self.model[name])
        assert after.input_tokens == 2 * len(good) and after.output_tokens == 3 * len(good)

    def drop(self, name):
        for server in self.names:
            self.store.release(name, server=server)
        self.taken[name] = {}

    def content(self, file_id):
        if file_id is None:
            return []
        file = self.files.get(file_id, owner="a")
        data = b"".join(self.files.content(file))
        assert len(data) == file.num_bytes
        return [json.loads(line) for line in data.splitlines()]

    def results(self, name, *, is_errors):
        with self.database.read() as connection:
            found = connection.execute(
                sa.select(results.c.data)
                .join(batches, batches.c.seq == results.c.batch)
                .where(batches.c.id == name, results.c.is_errors == is_errors)
            )
            return [json.loads(row.data) for row in found]

    @invariant()
    def counts_are_those_of_the_results(self):
        for name, lines in self.model.items():
            batch = self.store.get(name)
            assert batch.total == len(lines)
            assert batch.completed == sum(code == "" for code in lines.values())
            assert batch.failed == sum(bool(code) for code in lines.values())


class Shared(Machine):
    """Two servers with one PostgreSQL; `cluster` is its URL."""

    names = ("one", "two")
    cluster = ""

    def __init__(self):
        postgres.make_empty(self.cluster)
        super().__init__()

    def url(self):
        return self.cluster

    @rule()
    @precondition(lambda self: self.model)
    def restart(self):
        self.database.close()
        for server in self.names:
            self.store.leave(server)
        self.start()


MANY = settings(max_examples=30, stateful_step_count=25, deadline=None)
Machine.TestCase.settings = MANY
TestStore = Machine.TestCase


def test_a_store_that_servers_share(postgres_cluster):
    Shared.cluster = postgres_cluster
    run_state_machine_as_test(Shared, settings=MANY)


@pytest.fixture
def store(database, clock):
    """`me` lives for ever."""
    store = BatchStore(database, clock=clock)
    store.join("me", lease_s=10**9)
    return store


def validate(store, name, lines, *, server):
    assert store.begin_validation(name, server=server)
    assert store.add_lines(name, lines, server=server)
    store.accept(name, server=server)


def in_progress(store, lines, **changes):
    batch = store.create(asked(**changes))
    validate(store, batch.id, lines, server="me")
    return batch.id


def take(store, name, limit=100, max_bytes=10**6, server="me", num_ahead=0):
    parts = (Part(batch_id=name, most=10**6),)
    claim = Claim(parts=parts, limit=limit, num_ahead=num_ahead)
    return [line.number for _, line in store.take(claim, max_bytes=max_bytes, server=server)]


def test_lines_are_taken_in_prefix_order(store):
    keys = [b"b", b"a", b"ba", b"a", b"b"]
    name = in_progress(store, [new_line(n, key) for n, key in enumerate(keys, 1)])
    assert take(store, name, limit=3) == [2, 4, 1]
    # A page has few bytes, but one line at least.
    assert take(store, name, max_bytes=1) == [5]
    assert take(store, name) == [3]


@pytest.fixture
def shared(postgres_url, clock):
    """`me` and `you` live for `LEASE_S`."""
    with contextlib.closing(Database(postgres_url)) as database:
        store = BatchStore(database, clock=clock)
        for server in ("me", "you"):
            store.join(server, lease_s=LEASE_S)
        yield store


def test_lines_with_a_common_prefix_go_to_one_server(shared):
    name = in_progress(shared, [new_line(n, b"%d" % (n % 4)) for n in range(40)])
    taken = {"me": [], "you": []}
    has_more = True
    while has_more:
        found = {
            server: take(shared, name, limit=3, server=server, num_ahead=7) for server in taken
        }
        for server, numbers in found.items():
            taken[server] += numbers
        has_more = any(found.values())
    assert sorted(taken["me"] + taken["you"]) == list(range(40))
    for numbers in taken.values():
        assert 15 <= len(numbers) <= 25
        prefixes = [number % 4 for number in numbers]
        changes = sum(a != b for a, b in itertools.pairwise(prefixes))
        assert changes <= 4, prefixes


def test_servers_divide_a_batch_between_documents(shared):
    """Of ten lines each; a server that has none left takes a part of the other's."""
    name = in_progress(shared, [new_line(n, b"%04d%04d" % (n // 10, n)) for n in range(100)])
    asked, num_taken = set(), 0
    for server in itertools.cycle(("me", "you")):
        numbers = take(shared, name, limit=6, server=server, num_ahead=8)
        asked |= {(server, number // 10) for number in numbers}
        num_taken += len(numbers)
        if not numbers:
            break
    assert num_taken == 100 and len(asked) <= 11, asked


def test_servers_divide_batches_of_a_tenant_alike(shared):
    """Ten documents, of which each of two batches has four lines: whoever takes lines of one gets
    those of both, and no other server."""
    lines = [new_line(n, b"%04d%04d" % (n // 4, n)) for n in range(40)]
    parts = [Part(batch_id=in_progress(shared, lines), most=99) for _ in range(2)]
    asked = {}
    for server, some in (("me", parts), ("you", parts[::-1])):
        claim = Claim(parts=tuple(some), limit=6, num_ahead=10)
        asked[server] = []
        for _ in range(3):
            found = shared.take(claim, max_bytes=10**6, server=server)
            asked[server] += [line.number // 4 for _, line in found]
    assert not set(asked["me"]) & set(asked["you"])
    for documents in asked.values():
        assert len(documents) == 18 and len(set(documents)) <= 4


def test_a_batch_is_validated_by_one_server(shared, clock):
    batch = shared.create(asked())
    assert shared.begin_validation(batch.id, server="me")
    assert not shared.begin_validation(batch.id, server="you")
    assert shared.add_lines(batch.id, [new_line(1)], server="me")
    clock.now_s += LEASE_S + 1
    shared.beat("you", lease_s=LEASE_S)
    assert not shared.add_lines(batch.id, [new_line(2)], server="me")
    validate(shared, batch.id, [new_line(1), new_line(3)], server="you")
    shared.accept(batch.id, server="me")
    assert shared.get(batch.id).total == 2


def test_results_of_a_batch_that_is_gone_do_not_stop_the_others(store, clock):
    name = in_progress(store, [new_line(1)])
    assert store.finish([result("batch_0", 1), result(name, 1)]) == 1


@pytest.mark.parametrize("text", ["a\0b", "\\0", "\\", "\0", "\\\0\\\\0", "ö\n"])
def test_any_text_is_kept_as_it_is(store, text):
    metadata = {"tenant": text, text: text}
    name = store.create(asked(tenant=text, metadata=metadata)).id
    line = NewLine(number=1, custom_id=text, start=0, num_bytes=1, prefix_key=b"\0")
    validate(store, name, [line], server="me")
    found = store.get(name)
    assert found.tenant == text and found.metadata == metadata
    claim = Claim(parts=(Part(batch_id=name, most=1),), limit=1)
    [(_, line)] = store.take(claim, max_bytes=1, server="me")
    assert line.custom_id == text
    with pytest.raises(ApiError, match="no batch"):
        store.get(text)


def test_lines_of_an_interrupted_validation_are_forgotten(store):
    batch = store.create(asked())
    assert store.begin_validation(batch.id, server="me")
    store.add_lines(batch.id, [new_line(1), new_line(2)], server="me")
    validate(store, batch.id, [new_line(1)], server="me")
    assert store.get(batch.id).total == 1


def test_a_batch_that_is_cancelled_while_it_is_validated_has_no_results(store):
    batch = store.create(asked())
    assert store.begin_validation(batch.id, server="me")
    store.add_lines(batch.id, [new_line(1)], server="me")
    store.cancel(batch.id)
    assert not store.add_lines(batch.id, [new_line(2)], server="me")
    store.accept(batch.id, server="me")
    fault = Fault(code="c", message="m", param=None, line=1)
    store.reject(batch.id, [fault], server="me")
    assert not store.close_lines(batch.id, limit=1)
    assert store.end(batch.id)
    ended = store.get(batch.id)
    assert ended.status is Status.CANCELLED and ended.total == 0
    assert ended.output_file_id is None and ended.error_file_id is None


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_tables_of_another_version_are_refused(database, url, version):
    with database.write() as connection:
        connection.execute(store_row.update().values(version=version))
    with pytest.raises(ConfigError, match=f"version {version}, this cosched knows {VERSION}"):
        Database(url)


def test_what_is_no_database_is_refused(tmp_path):
    (tmp_path / "b.sqlite").write_text("something else" * 1000)
    with pytest.raises(ConfigError, match="not a database"):
        Database(f"sqlite:///{tmp_path / 'b.sqlite'}")
    for url, reason in (
        ("nonsense", "this is not a URL"),
        ("mysql://u:secret@h/d", "not mysql://"),
    ):
        with pytest.raises(
            ConfigError, match=rf"batches\.url must be postgresql.*{reason}"
        ) as error:
            Database(url)
        assert "secret" not in str(error.value)


def test_ended_batches_go_after_a_while_with_their_results_and_nothing_else(
    store, database, tmp_path, clock
):
    files = FileStore(database, FolderStorage(tmp_path), clock=clock)

    def ended():
        name = in_progress(store, [new_line(1)])
        take(store, name)
        store.finish([result(name, 1)])
        store.end(name)
        return name

    old, running = ended(), in_progress(store, [new_line(1)], window_s=10**6)
    clock.now_s += 100
    young = ended()
    assert store.remove_ended(kept_s=99) == 1
    assert [b.id for b in store.page(owner="a", after=None, limit=9)[0]] == [young, running]
    with pytest.raises(ApiError, match="no batch"):
        store.get(old)
    [left] = files.page(owner="a", purpose=None, after=None, limit=9, newest_first=True)[0]
    assert left.batch_id == young and b"".join(files.content(left))
    with database.read() as connection:
        assert len(connection.execute(sa.select(results)).all()) == 1
