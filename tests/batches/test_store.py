"""The store against a model of it: whatever happens in whatever order, also a process that ends,
every line of a batch has one result."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cosched.batches.data import Fault, Finished, NewBatch, NewLine, Status
from cosched.batches.database import VERSION, Database
from cosched.batches.errors import ApiError
from cosched.batches.files import FileStore
from cosched.batches.store import BatchStore, records_of
from cosched.errors import ConfigError
from cosched.jobs.lines import RequestLine
from cosched.jobs.records import Answer, Failure

WINDOW_S = 100
URL = "/v1/completions"


class Clock:
    now_s = 1_000_000.0

    def __call__(self):
        return self.now_s


def asked(owner="a", window_s=WINDOW_S, **changes):
    fields = {
        "owner": owner,
        "tenant": "",
        "endpoint": URL,
        "input_file_id": "file-1",
        "window": "100s",
        "window_s": window_s,
        "metadata": None,
        "output_expires_after_s": None,
    }
    return NewBatch(**(fields | changes))


def new_line(number, key=b""):
    return NewLine(number=number, custom_id=f"c{number}", offset=0, num_bytes=10, prefix_key=key)


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
    """`model`: batch -> line -> what is known of it: None, or the code of its result."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.model = {}
        self.taken = {}
        self.start()

    def start(self):
        self.database = Database(f"sqlite:///{self.folder / 'b.sqlite'}")
        self.store = BatchStore(self.database, clock=self.clock)
        self.files = FileStore(self.database, self.folder, clock=self.clock)
        self.store.take_back_all()
        self.taken = {name: set() for name in self.model}

    def teardown(self):
        for name in self.model:
            self.end_and_check(name)
        self.database.close()
        shutil.rmtree(self.folder)

    def some(self, data, *statuses):
        found = [name for name in self.model if self.store.get(name).status in statuses]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(num_lines=st.integers(1, 8), window_s=st.integers(1, 200))
    def create(self, num_lines, window_s):
        batch = self.store.create(asked(window_s=window_s))
        assert self.store.add_lines(batch.id, [new_line(n) for n in range(1, num_lines + 1)])
        self.store.accept(batch.id)
        self.model[batch.id] = dict.fromkeys(range(1, num_lines + 1))
        self.taken[batch.id] = set()

    @rule(data=st.data(), limit=st.integers(1, 5))
    def take(self, data, limit):
        name = self.some(data, *Status)
        if name is None:
            return
        lines = self.store.take(name, limit=limit, max_bytes=10**6, lease_owner="me", lease_s=1)
        numbers = {line.number for line in lines}
        free = {n for n, code in self.model[name].items() if code is None} - self.taken[name]
        is_fed = self.store.get(name).status is Status.IN_PROGRESS
        assert numbers <= free and len(numbers) == (min(limit, len(free)) if is_fed else 0)
        self.taken[name] |= numbers

    @rule(data=st.data(), good=st.booleans())
    def finish(self, data, good):
        name = self.some(data, *Status)
        if name is None:
            return
        # Any line: one that was never taken, or has a result, or whose batch has ended.
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.model[name])), max_size=4))
        num_kept = self.store.finish([result(name, n, good=good) for n in numbers])
        expected = set(numbers) & self.taken[name]
        assert num_kept == len(expected)
        for number in expected:
            self.model[name][number] = "" if good else "http_400"
        self.taken[name] -= expected

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
        self.taken[name] = set()  # nothing is under way by then
        code = {Status.EXPIRED: "batch_expired", Status.CANCELLED: "batch_cancelled"}
        for _ in range(steps):
            self.store.close_lines(name, limit=limit)
        ended = code.get(self.store.get(name).ending)
        for record in self.results(name, is_errors=True):
            if record["error"]["code"] == ended:
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
        self.taken[name] = set()
        while not self.store.close_lines(name, limit=2):
            pass
        self.store.end(name)
        self.store.end(name)  # once more does nothing
        after = self.store.get(name)
        assert after.status is batch.ending and after.status in after.times
        closed = {Status.EXPIRED: "batch_expired", Status.CANCELLED: "batch_cancelled"}
        for number, code in self.model[name].items():
            if code is None:
                self.model[name][number] = closed[after.status]
        good = self.content(after.output_file_id)
        bad = self.content(after.error_file_id)
        assert {r["custom_id"]: "" for r in good} | {
            r["custom_id"]: r["error"]["code"] for r in bad
        } == {f"c{n}": code for n, code in self.model[name].items()}
        assert len(good) + len(bad) == after.total == len(self.model[name])
        assert after.input_tokens == 2 * len(good) and after.output_tokens == 3 * len(good)

    def content(self, file_id):
        if file_id is None:
            return []
        file = self.files.get(file_id, owner="a")
        data = b"".join(self.files.content(file))
        assert len(data) == file.num_bytes
        return [json.loads(line) for line in data.splitlines()]

    def results(self, name, *, is_errors):
        with self.database.read() as connection:
            found = connection.exec_driver_sql(
                "SELECT data FROM results JOIN batches ON seq = batch WHERE id = ? "
                "AND is_errors = ?",
                (name, is_errors),
            )
            return [json.loads(row.data) for row in found]

    @invariant()
    def counts_are_those_of_the_results(self):
        for name, lines in self.model.items():
            batch = self.store.get(name)
            assert batch.total == len(lines)
            assert batch.completed == sum(code == "" for code in lines.values())
            assert batch.failed == sum(bool(code) for code in lines.values())


Machine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestStore = Machine.TestCase


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def database(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'b.sqlite'}")
    yield database
    database.close()


@pytest.fixture
def store(database, clock):
    return BatchStore(database, clock=clock)


def in_progress(store, lines, **changes):
    batch = store.create(asked(**changes))
    store.add_lines(batch.id, lines)
    store.accept(batch.id)
    return batch.id


def take(store, name, limit=100, max_bytes=10**6):
    lines = store.take(name, limit=limit, max_bytes=max_bytes, lease_owner="me", lease_s=1)
    return [line.number for line in lines]


def test_lines_are_taken_in_prefix_order(store):
    keys = [b"b", b"a", b"ba", b"a", b"b"]
    name = in_progress(store, [new_line(n, key) for n, key in enumerate(keys, 1)])
    assert take(store, name, limit=3) == [2, 4, 1]
    assert take(store, name) == [5, 3]


def test_a_page_has_few_bytes_but_one_line_at_least(store):
    name = in_progress(store, [new_line(n) for n in range(1, 8)])
    assert take(store, name, max_bytes=1) == [1]
    assert take(store, name, max_bytes=30) == [2, 3, 4]


def test_lines_of_an_interrupted_validation_are_forgotten(store):
    batch = store.create(asked())
    store.add_lines(batch.id, [new_line(1), new_line(2)])
    store.drop_lines(batch.id)
    store.add_lines(batch.id, [new_line(1)])
    store.accept(batch.id)
    assert store.get(batch.id).total == 1


def test_a_batch_that_is_cancelled_while_it_is_validated_has_no_results(store):
    batch = store.create(asked())
    store.add_lines(batch.id, [new_line(1)])
    store.cancel(batch.id)
    assert not store.add_lines(batch.id, [new_line(2)])
    store.accept(batch.id)
    store.reject(batch.id, [Fault(code="c", message="m", param=None, line=1)])
    while not store.close_lines(batch.id, limit=1):
        pass
    store.end(batch.id)
    ended = store.get(batch.id)
    assert ended.status is Status.CANCELLED and ended.total == 0
    assert ended.output_file_id is None and ended.error_file_id is None


def test_owners_see_their_own_only(store, database, tmp_path, clock):
    mine, other = store.create(asked(owner="a")), store.create(asked(owner="b"))
    assert [batch.id for batch in store.page(owner="a", after=None, limit=10)[0]] == [mine.id]
    with pytest.raises(ApiError, match="no batch"):
        store.get(other.id, owner="a")
    with pytest.raises(ApiError, match="no batch"):
        store.cancel(other.id, owner="a")
    with pytest.raises(ApiError, match="no batch"):
        store.page(owner="a", after=other.id, limit=10)


def test_pages_of_batches_are_newest_first_and_whole(store):
    names = [store.create(asked()).id for _ in range(7)]
    seen, after, has_more = [], None, True
    while has_more:
        page, has_more = store.page(owner="a", after=after, limit=3)
        seen += [batch.id for batch in page]
        after = seen[-1]
    assert seen == names[::-1]


def test_tables_of_a_later_version_are_refused(database, tmp_path):
    with database.write() as connection:
        connection.exec_driver_sql(f"UPDATE schema_version SET version = {VERSION + 1}")
    with pytest.raises(ConfigError, match=f"version {VERSION + 1}, this cosched knows {VERSION}"):
        Database(f"sqlite:///{tmp_path / 'b.sqlite'}")


def test_what_is_no_database_is_refused(tmp_path):
    (tmp_path / "b.sqlite").write_text("something else" * 1000)
    with pytest.raises(ConfigError, match="not a database"):
        Database(f"sqlite:///{tmp_path / 'b.sqlite'}")
    with pytest.raises(ConfigError, match=r"batches\.url"):
        Database("nonsense")
