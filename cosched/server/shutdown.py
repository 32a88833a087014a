"""Shutdown of a server: online requests finish within a stated time, offline requests end.

On the first SIGTERM or SIGINT new requests get 503, offline requests end with an error that clients
retry, and online requests have `drain_s` seconds to finish. Then the rest is aborted, and the
processes end. A second signal ends everything at once. A scheduler whose memory is inconsistent
after a failure starts the same shutdown; the exit code is then `EXIT_CODE`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, SetInternalStateReq
from sglang.srt.utils import kill_process_tree

from cosched.engine import port
from cosched.engine.faults import DRAIN_SIGNAL
from cosched.engine.offline_gate import LET_GO
from cosched.server.model_operations import refuse_waiting

logger = logging.getLogger(__name__)

END_S = 20.0
"""Most seconds between the end of draining and the end of the process. SGLang gives its schedulers
15 to release their memory."""

EXIT_CODE = 70
"""Exit code of a server that ended because of a failure (EX_SOFTWARE of sysexits.h)."""

_POLL_S = 0.05
_ABORT_S = 2.0
_ABORT_MESSAGE = "the server is shutting down (--cosched-drain-s has passed)"
_PAUSED_MESSAGE = "the server is shutting down while its engine is paused"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def drain(end: Callable[[Any], Awaitable[None]], manager: Any, *, drain_s: float) -> None:
    """Replaces SGLang's `sigterm_watchdog`, which is `end`: waits for a signal, then for running
    requests, and lets SGLang end the processes."""
    if manager._server_stop_hook is None and not port.is_http_worker(manager):
        await end(manager)  # no server: signals are the embedding program's
        return
    faulty: list[bool] = []
    _handle_signals(manager, on_fault=lambda: faulty.append(True))
    while not manager.gracefully_exit:
        await asyncio.sleep(_POLL_S)
    began_s = time.monotonic()
    deadline_s = began_s + drain_s
    _end_at_last(drain_s + _ABORT_S + END_S)
    logger.warning(
        "cosched: shutting down: %d requests under way; online ones may take %g s, offline "
        "requests are aborted (503); send the signal again to stop immediately",
        len(manager.rid_to_state),
        drain_s,
    )
    await _let_go(manager, within_s=drain_s)
    if manager.is_pause:
        logger.warning("cosched: the engine is paused: no request under way would finish")
        await refuse_waiting(manager, within_s=_ABORT_S, message=_PAUSED_MESSAGE)
        deadline_s = time.monotonic()
    await _until_answered(manager, deadline_s)
    if manager.rid_to_state:
        logger.warning(
            "cosched: aborting %d requests after %g s",
            len(manager.rid_to_state),
            max(0.0, time.monotonic() - began_s),
        )
        reason = {
            "type": "abort",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "message": _ABORT_MESSAGE,
        }
        manager._dispatch_to_scheduler(
            AbortReq(abort_all=True, abort_message=_ABORT_MESSAGE, finished_reason=reason)
        )
        await _until_answered(manager, time.monotonic() + _ABORT_S)
        # SGLang would wait without end for those that the scheduler has not answered.
        await refuse_waiting(manager, within_s=_ABORT_S, message=_ABORT_MESSAGE)
        for rid in list(manager.rid_to_state):
            manager._handle_abort_req(AbortReq(rid=rid, finished_reason=dict(reason)))
    if port.is_http_worker(manager):
        await _until_others_answered(manager, deadline_s)
    if faulty:
        logger.critical("cosched: drained after a fault; ending with exit code %d", EXIT_CODE)
        atexit.register(_exit_after_fault)
    await end(manager)


def _handle_signals(manager: Any, *, on_fault: Callable[[], None]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if manager.gracefully_exit:
            logger.warning("cosched: stopping at once")
            _end_at_once(128 + number)
        manager.gracefully_exit = True

    def drain_after_fault() -> None:
        on_fault()
        manager.gracefully_exit = True

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(DRAIN_SIGNAL, drain_after_fault)


async def _let_go(manager: Any, *, within_s: float) -> None:
    """End offline work; does not wait longer than `within_s` for the scheduler."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(within_s, _POLL_S)):
            await manager.set_internal_state(SetInternalStateReq(server_args={LET_GO: 1}))


async def _until_answered(manager: Any, deadline_s: float) -> None:
    while manager.rid_to_state and time.monotonic() < deadline_s:
        await asyncio.sleep(_POLL_S)


async def _until_others_answered(manager: Any, deadline_s: float) -> None:
    """Requests of the other HTTP processes: the first one that ends also ends the scheduler."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(deadline_s - time.monotonic(), _POLL_S)):
            while True:
                states = [state.get("cosched", {}) for state in await manager.get_internal_state()]
                if not any(
                    state.get("num_running_online", 0) + state.get("num_waiting_online", 0)
                    for state in states
                ):
                    return
                await asyncio.sleep(_POLL_S)


def _end_at_once(code: int) -> None:
    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(code)


def _exit_after_fault() -> None:
    """Registered as the last step of the process, which would end with 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)


def _end_at_last(seconds: float) -> None:
    """End the process after `seconds`, whatever hangs."""
    timer = threading.Timer(seconds, _end_at_once, args=(1,))
    timer.daemon = True
    timer.start()


def end_on_sigterm() -> None:
    """While the model loads, let SIGTERM run the ``finally`` blocks, which end the child
    processes; by default SIGTERM leaves them behind."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


@contextlib.contextmanager
def signals_left_to_parent() -> Iterator[None]:
    """Processes started in this block ignore SIGTERM and SIGINT.

    Ctrl-C and many supervisors signal all processes of a server, but schedulers and detokenizer
    must run until online requests have finished. SGLang ends them, or they end with their parent.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
