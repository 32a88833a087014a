"""Requests that are given up: which ones go, and what finding them costs."""

import math

import pytest
from sglang.srt.managers.io_struct import AbortReq

from tests.engine.conftest import assert_drained, prompt, without_model


class CountingRid(str):
    """Counts how often ids are looked at."""

    __slots__ = ()
    num_looks = 0

    def startswith(self, *arguments):
        CountingRid.num_looks += 1
        return super().startswith(*arguments)

    def __lt__(self, other):
        CountingRid.num_looks += 1
        return super().__lt__(other)

    __hash__ = str.__hash__


def with_waiting(make_engine, number, **flags):
    """An engine in which all but a few of so many requests wait, every fourth online."""
    engine = without_model(make_engine(policy="hygen", max_running_requests=2, **flags))
    for index in range(number):
        rid = CountingRid(f"r{index:04d}")
        priority = 0 if index % 4 == 0 else -1
        engine.submit(rid, prompt(index, 10), max_new_tokens=3, priority=priority)
    seen = []
    engine.run(lambda: seen.append(0) or len(seen) > 1)
    CountingRid.num_looks = 0
    return engine


def aborted(engine):
    return {rid for rid, reply in engine.replies.items() if reply.finish_reason == "abort"}


def test_an_abort_finds_its_request_without_walking_the_queue(make_engine):
    engine = with_waiting(make_engine, 200)
    scheduler = engine.scheduler
    num_waiting = len(scheduler.waiting_queue)
    for rid in ("r0160", "r0199", "r0123", "absent"):
        scheduler.abort_request(AbortReq(rid=rid))
    # Three bisections each (looking it up, taking it out of the ids), not 200 comparisons.
    assert CountingRid.num_looks < 4 * 6 * math.log2(200) < 200
    assert len(scheduler.waiting_queue) == num_waiting - 3
    assert aborted(engine) == {"r0160", "r0199", "r0123"}
    engine.run_until_idle()
    assert_drained(engine)


def test_an_abort_means_every_request_that_begins_so(make_engine):
    """SGLang's rule: the replies of one request with several have its id as their beginning."""
    engine = with_waiting(make_engine, 220)
    scheduler = engine.scheduler
    scheduler.abort_request(AbortReq(rid="r01"))
    assert aborted(engine) == {f"r01{index:02d}" for index in range(100)}
    engine.run_until_idle()
    assert len(aborted(engine)) == 100
    assert_drained(engine)


@pytest.mark.parametrize("meant", [{"abort_all": True}, {"rid": ""}])
def test_everything_can_be_aborted_without_looking_up_positions(make_engine, monkeypatch, meant):
    engine = with_waiting(make_engine, 300)
    waiting = engine.scheduler.waiting_queue

    def no_positions(*arguments):
        raise AssertionError("a position was looked up")

    monkeypatch.setattr(type(waiting), "pop", no_positions)
    monkeypatch.setattr(type(waiting), "__getitem__", no_positions)
    engine.scheduler.abort_request(AbortReq(**meant))
    assert CountingRid.num_looks < 300 * 4 * math.log2(300)
    assert len(waiting) == 0 and waiting.num_tokens == 0
    engine.run_until_idle()
    assert_drained(engine)
    assert len(aborted(engine)) == 300


def test_a_failed_abort_leaves_the_queue_in_place(make_engine, monkeypatch):
    engine = with_waiting(make_engine, 20)
    scheduler = engine.scheduler
    waiting = scheduler.waiting_queue

    def fail(*arguments):
        raise RuntimeError("socket closed")

    # Stock has taken the request out of the queue by then.
    monkeypatch.setattr(scheduler, "_release_aborted_request", fail)
    num_waiting = len(waiting)
    with pytest.raises(RuntimeError, match="socket closed"):
        scheduler.abort_request(AbortReq(rid="r0015"))
    assert scheduler.waiting_queue is waiting
    assert len(waiting) == num_waiting - 1 and waiting.get("r0015") is None
