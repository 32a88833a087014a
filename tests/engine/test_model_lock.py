"""SGLang's lock of the model, with offline requests that wait in the pool."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.server import model_operations, shutdown
from cosched.server.model_operations import is_about_to_read, unloading, use_model_lock

ONLINE, OFFLINE = 0, -1


class Manager:
    """The HTTP side of an engine whose scheduler says how many offline requests have begun."""

    def __init__(self):
        self.num_begun = 0
        self.messages = []
        use_model_lock(self)
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()

    async def set_internal_state(self, message):
        self.messages.append(dict(message.server_args))
        await asyncio.sleep(0)
        return [True, self.num_begun == 0]

    @property
    def is_held(self):
        return bool(self.messages) and self.messages[-1] == {"cosched_offline_hold": 1}

    async def begin(self, priority):
        """A request that holds the lock until the result is set."""
        end, has_begun = asyncio.Event(), asyncio.Event()

        async def serve():
            is_about_to_read(priority)
            async with self.model_update_lock.reader_lock:
                has_begun.set()
                await end.wait()

        task = asyncio.create_task(serve())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await has_begun.wait()
        return SimpleNamespace(task=task, end=end, has_begun=has_begun)

    def operate(self, seen):
        async def operation():
            async with self.model_update_lock.writer_lock:
                seen.append("operation")
                await asyncio.sleep(0)

        return asyncio.create_task(operation())


async def soon(check):
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.005)


def run(test):
    asyncio.run(test())


def test_an_operation_does_not_wait_for_the_pool_and_chats_do_not_wait_for_it():
    async def test():
        manager, seen = Manager(), []
        parked = await manager.begin(OFFLINE)
        await asyncio.wait_for(manager.operate(seen), 60)
        assert seen == ["operation"] and not parked.task.done()
        assert not manager.is_held, "offline requests begin again"
        chat = await manager.begin(ONLINE)
        await asyncio.wait_for(chat.has_begun.wait(), 60)
        assert await manager.model_update_lock.is_locked()
        for request in (parked, chat):
            request.end.set()
            await request.task
        assert not await manager.model_update_lock.is_locked()

    run(test)


@pytest.mark.parametrize("ends_first", [ONLINE, OFFLINE])
def test_an_operation_waits_for_all_requests_that_have_begun(ends_first):
    async def test():
        manager, seen = Manager(), []
        chat, begun = await manager.begin(ONLINE), await manager.begin(OFFLINE)
        manager.num_begun = 1
        operation = manager.operate(seen)
        await soon(lambda: manager.is_held)
        later = [await manager.begin(ONLINE), await manager.begin(OFFLINE)]
        for priority in (ends_first, ONLINE + OFFLINE - ends_first):
            assert not seen and not any(one.has_begun.is_set() for one in later)
            if priority == ONLINE:
                chat.end.set()
                await chat.task
            else:
                manager.num_begun = 0
                begun.end.set()
                await begun.task
            await asyncio.sleep(0.12)
        await asyncio.wait_for(operation, 60)
        for one in later:
            await asyncio.wait_for(one.has_begun.wait(), 60)
            one.end.set()
            await one.task

    run(test)


def test_an_operation_that_is_given_up_holds_nobody():
    async def test():
        manager = Manager()
        begun = await manager.begin(OFFLINE)
        manager.num_begun = 1
        operation = manager.operate([])
        await soon(lambda: manager.is_held)
        chat = await manager.begin(ONLINE)
        assert not chat.has_begun.is_set()
        operation.cancel()
        await asyncio.wait_for(chat.has_begun.wait(), 60)
        assert not manager.is_held
        for request in (begun, chat):
            request.end.set()
            await request.task

    run(test)


def test_unloading_an_adapter_lets_go_of_its_waiting_requests_until_it_is_done(monkeypatch):
    monkeypatch.setattr(model_operations, "_LET_GO_S", 0.01)

    async def test():
        manager, operation = Manager(), SimpleNamespace(lora_id=None)
        async with unloading(manager, operation):
            await asyncio.sleep(0.03)
            assert not manager.messages, "new requests can still name it"
            operation.lora_id = "id7"
            await soon(lambda: len(manager.messages) > 1)  # requests may have been on their way
        await asyncio.sleep(0.03)
        num = len(manager.messages)
        await asyncio.sleep(0.03)
        assert manager.messages == [{"cosched_offline_let_go_adapter:id7": 1}] * num

    run(test)


def test_sigterm_answers_every_request_of_a_paused_engine_and_ends_in_order(monkeypatch):
    monkeypatch.setattr(shutdown, "_end_at_last", lambda seconds: None)
    monkeypatch.setattr(shutdown, "_handle_signals", lambda manager, on_fault: None)
    monkeypatch.setattr(shutdown, "_ABORT_S", 0.1)

    async def test():
        manager = Manager()
        manager.is_pause, manager.gracefully_exit = True, True
        manager._server_stop_hook = lambda: None
        manager.rid_to_state = {"frozen": None, "door": None}
        manager._dispatch_to_scheduler = lambda message: None  # it answers nothing
        answers = {}

        def answer(message):
            answers[message.rid] = message.finished_reason["status_code"]
            del manager.rid_to_state[message.rid]

        manager._handle_abort_req = answer

        async def wait_at_the_door():
            try:
                async with manager.is_pause_cond:
                    await manager.is_pause_cond.wait_for(lambda: not manager.is_pause)
                async with manager.model_update_lock.reader_lock:
                    answers["door"] = "was served"
            except Exception as error:
                answers["door"] = error.status_code
            finally:
                del manager.rid_to_state["door"]

        door = asyncio.create_task(wait_at_the_door())
        await asyncio.sleep(0)
        left = []

        async def end(manager):
            left.append(dict(manager.rid_to_state))

        await asyncio.wait_for(shutdown.drain(end, manager, drain_s=100.0), 90)
        await door
        assert answers == {"frozen": 503, "door": 503} and left == [{}]

    run(test)
