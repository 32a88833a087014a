"""Servers of different speeds that share a store, in virtual time."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from cosched.batch.batch_records import Status
from cosched.batch.config import BatchesConfig
from cosched.batch.database import Database
from cosched.batch.free_places import FreePlaces, Here
from cosched.batch.store import BatchStore
from cosched.core.shares import Share
from tests.batch.stand_in import Clock
from tests.batch.test_documents import key
from tests.batch.test_store import in_progress, new_line, result

CONFIG = BatchesConfig(high_watermark=64, low_watermark=48)
ONE_TENANT = Share(("",), (1.0,))
PER_DOCUMENT = 10
NAMES = ("me", "you", "they")


@dataclass
class Server:
    """Answers so many lines in a step, in the order in which it got them. is_known: it says how
    many it runs: `num_running` at a time."""

    name: str
    speed: float
    num_running: int
    is_known: bool
    claims: FreePlaces
    at_server: deque = field(default_factory=deque)
    asked: list = field(default_factory=list)
    num_finished: int = 0
    num_given: int = 0
    last_step: int = 0
    _done: float = 0.0

    def step(self, store, num_servers, step):
        self._done += self.speed
        ended = [self.at_server.popleft() for _ in range(min(int(self._done), len(self.at_server)))]
        self._done -= int(self._done)
        if ended:
            self.last_step = step
            self.num_finished += store.finish([result(*line, good=True) for line in ended])
        if not self.claims.are_due(len(self.at_server)):
            return
        here = Here(
            in_flight=Counter(name for name, _ in self.at_server),
            num_finished=self.num_finished,
            num_running=min(self.num_running, len(self.at_server)) if self.is_known else None,
            num_servers=num_servers,
        )
        found = [batch for batch in store.open() if batch.status is Status.IN_PROGRESS]
        claims = self.claims.next(found, here)
        if not claims and num_servers > 1:
            for _ in range(self.claims.surplus(found, here)):
                name, number = self.at_server.pop()
                store.release(name, server=self.name, numbers=[number])
                self.num_given += 1
        for claim in claims:
            lines = store.take(claim, max_bytes=10**9, server=self.name)
            self.at_server += [(name, line.number) for name, line in lines]
            self.asked += [(name, line.number) for name, line in lines]
        assert len(self.at_server) <= CONFIG.high_watermark


def answered(num_documents, num_batches, speeds, *, is_known=True, later=0):
    """The servers, after they have answered batches of equal lines on the same documents. later:
    the step at which all but the first join."""
    with contextlib.closing(Database("sqlite://")) as database:
        database.is_shared = True  # as PostgreSQL; of one thread
        store = BatchStore(database, clock=Clock())
        servers = []
        for n, speed in enumerate(speeds):
            claims = FreePlaces(store, CONFIG, lambda owner, tenant: ONE_TENANT)
            servers.append(Server(NAMES[n], speed, 12, is_known, claims))
            store.join(servers[-1].name, lease_s=10**9)
        lines = range(num_documents * PER_DOCUMENT)
        for n in range(num_batches):
            mine = [new_line(i, key(i % num_documents, i)) for i in lines[n::num_batches]]
            in_progress(store, mine)
        step = 0
        while any(batch.status is Status.IN_PROGRESS for batch in store.open()):
            step += 1
            alive = servers if step > later else servers[:1]
            for server in alive:
                server.step(store, len(alive), step)
    return servers


def test_a_batch_that_comes_when_another_ends_begins_at_once():
    with contextlib.closing(Database("sqlite://")) as database:
        database.is_shared = True
        store = BatchStore(database, clock=Clock())
        store.join("me", lease_s=10**9)
        claims = FreePlaces(store, CONFIG, lambda owner, tenant: ONE_TENANT)
        first = in_progress(store, [new_line(n, key(n)) for n in range(20)])
        here = Here(in_flight={first: 10}, num_running=8, num_servers=2)
        assert not claims.next(store.open(), here), "the other ten are for the other server"
        in_progress(store, [new_line(n, key(n)) for n in range(1000)])
        assert claims.are_due(here.num)
        [claim] = claims.next(store.open(), here)
        assert claim.limit == CONFIG.high_watermark - here.num


def test_an_owner_without_a_line_at_the_scheduler_gets_the_next_place():
    """A page of another's lines would have to end before."""
    with contextlib.closing(Database("sqlite://")) as database:
        database.is_shared = True
        store = BatchStore(database, clock=Clock())
        store.join("me", lease_s=10**9)
        shares = {owner: Share((owner,), (1.0,)) for owner in ("large", "small")}
        claims = FreePlaces(store, CONFIG, lambda owner, tenant: shares[owner])
        large = in_progress(store, [new_line(n, key(n)) for n in range(200)], owner="large")
        for num_free in (0, 1, 5):
            here = Here(in_flight={large: CONFIG.high_watermark - num_free})
            found = store.open()
            assert not claims.are_due(here.num, found, here.in_flight)
            assert not claims.next(found, here)
        small = in_progress(store, [new_line(n, key(n)) for n in range(3)], owner="small")
        found = store.open()
        assert not claims.are_due(CONFIG.high_watermark, found, {large: CONFIG.high_watermark})
        assert claims.are_due(here.num, found, here.in_flight)
        taken = {one.parts[0].batch_id: one.limit for one in claims.next(found, here)}
        assert taken[small] == 3 and sum(taken.values()) <= 5
        here = Here(in_flight={large: CONFIG.high_watermark - 6, small: 1})
        assert not claims.are_due(here.num, found, here.in_flight), "pages as before"


@pytest.mark.parametrize(
    ("speeds", "is_known"), [((1.0, 0.6), True), ((1.0, 0.8, 0.5), True), ((1.0, 0.6), False)]
)
def test_servers_of_different_speeds_end_together_and_share_few_documents(speeds, is_known):
    num_documents, num_batches = 40, 3
    servers = answered(num_documents, num_batches, speeds, is_known=is_known)
    asked = [line for server in servers for line in server.asked]
    num_lines = num_documents * PER_DOCUMENT
    assert len(set(asked)) == len(asked) == num_lines
    few = 5 / min(speeds)  # lines of the slowest server
    assert max(server.last_step for server in servers) <= 1.03 * num_lines / sum(speeds) + few
    found = {(server.name, n % num_documents) for server in servers for _, n in server.asked}
    assert len(found) <= num_documents + 4 * (len(speeds) - 1)


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.5), (1.0, 1.0, 1.0)])
def test_a_server_that_joins_gets_its_part_of_lines_that_wait_at_another(speeds):
    """All lines of a batch below the watermark are at the first server by then."""
    servers = answered(num_documents=6, num_batches=1, speeds=speeds, later=12)
    num_lines, num_left = 60, 48
    done = [server.num_finished for server in servers]
    assert sum(done) == num_lines
    assert max(server.last_step for server in servers) <= 12 + num_left / sum(speeds) + 10
    asked = [line for server in servers for line in server.asked]
    assert len(asked) - len(set(asked)) <= servers[0].num_given <= num_left, "each moves once"
    assert sum(server.num_given for server in servers[1:]) == 0


def test_lines_are_not_given_back_without_need():
    with contextlib.closing(Database("sqlite://")) as database:
        database.is_shared = True
        store = BatchStore(database, clock=Clock())
        store.join("me", lease_s=10**9)
        claims = FreePlaces(store, CONFIG, lambda owner, tenant: ONE_TENANT)
        batch = in_progress(store, [new_line(n, key(n)) for n in range(60)])
        alone = Here(in_flight={}, num_running=0)
        [claim] = claims.next(store.open(), alone)
        store.take(claim, max_bytes=10**9, server="me")

        def surplus(num_servers, num_running):
            here = Here(in_flight={batch: 60}, num_running=num_running, num_servers=num_servers)
            return claims.surplus(store.open(), here)

        assert surplus(2, 12) == 30
        assert surplus(4, 12) == 45
        assert surplus(2, 50) == 10, "lines that run stay"
        assert surplus(2, None) == 0, "it is not known what runs"
        more = in_progress(store, [new_line(n, key(n)) for n in range(9)])
        assert surplus(2, 12) == 0, "others find lines in the store"
        assert store.get(more).num_left == 9
