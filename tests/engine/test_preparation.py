"""Offline requests are prepared a few at a time, and slower while the event loop lags."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from cosched.server import preparation
from cosched.server.preparation import AT_ONCE, LoopLag, PreparationGate, is_prepared


def test_a_few_are_prepared_at_a_time_and_the_next_as_one_is_tokenized():
    async def run():
        gate, preparing, most = PreparationGate(LoopLag()), set(), [0]
        num_prepared = 0

        async def request(number):
            nonlocal num_prepared
            await gate.enter("")
            preparing.add(number)
            most[0] = max(most[0], len(preparing))
            await asyncio.sleep(0.001)
            preparing.discard(number)
            is_prepared()
            is_prepared()  # of each sequence of a request
            num_prepared += 1
            await asyncio.Event().wait()  # it runs: others do not wait for that

        tasks = [asyncio.create_task(request(number)) for number in range(50)]
        while num_prepared < 50:
            await asyncio.sleep(0.001)
        assert most[0] == 4 and not preparing
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_requests_that_fail_or_leave_give_their_places_back():
    async def run():
        gate = PreparationGate(LoopLag())
        for _ in range(9):
            (await gate.enter("")).end()
        held = [await gate.enter("") for _ in range(4)]
        gone = asyncio.create_task(gate.enter(""))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        for ticket in held:
            ticket.end()
            ticket.end()
        for _ in range(9):
            (await gate.enter("")).end()

    asyncio.run(run())


def test_a_line_of_one_key_does_not_wait_for_the_thousand_of_another():
    async def run():
        gate, order = PreparationGate(LoopLag()), []

        async def request(key):
            ticket = await gate.enter(key)
            order.append(key)
            await asyncio.sleep(0)
            ticket.end()

        await asyncio.gather(*map(request, ["a"] * 1000 + ["b"] * 2))
        return [place for place, key in enumerate(order) if key == "b"]

    # After those that have a place when they come, then in turns.
    assert max(asyncio.run(run())) <= 2 * AT_ONCE


def test_while_the_loop_lags_each_waits_for_as_long_as_it_lags(monkeypatch):
    waits_s = []

    async def sleep(seconds):
        waits_s.append(seconds)

    monkeypatch.setattr(preparation, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))

    async def run(lag_s):
        waits_s.clear()
        lag = LoopLag()
        lag.add(lag_s)
        gate = PreparationGate(lag)
        for _ in range(5):
            (await gate.enter("")).end()
        return sum(waits_s)

    assert asyncio.run(run(0.1)) == pytest.approx(0.5)
    assert asyncio.run(run(0.001)) == 0


def test_the_lag_of_a_loop_that_stops_is_seen():
    async def run():
        lag = LoopLag()
        async with lag.measuring():
            await asyncio.sleep(0.05)
            time.sleep(0.3)
            await asyncio.sleep(0.1)
        return lag.most_s

    assert 0.2 < asyncio.run(run())


def test_the_longest_lag_is_that_of_the_last_minute():
    now_s = [0.0]
    lag = LoopLag(lambda: now_s[0])
    for at_s, lag_s in ((0, 0.5), (10, 0.2), (20, 0.1), (50, 0.3)):
        now_s[0] = at_s
        lag.add(lag_s)
    assert lag.most_s == 0.5
    now_s[0] = 70.0
    lag.add(0.0)
    assert lag.most_s == 0.3 and lag.now_s == 0.0
