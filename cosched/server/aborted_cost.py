"""What aborted requests have cost: the scheduler says it after their replies have ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from cosched.wire import USAGE_KEY

_ABORT_S = 60.0
"""Most that an aborted request may take to end."""

_RELEASED = "cosched_released"

_telling: set[asyncio.Task[None]] = set()
"""The loop keeps only weak references to tasks."""


def note_released(manager: Any, request_states: dict[str, Any]) -> None:
    """Notes the cost of a cancelled batch's lines, known when the scheduler has aborted them."""
    known = manager.rid_to_state
    sent = [s for rid, s in request_states.items() if s.dispatched and known.get(rid) is s]
    setattr(manager, _RELEASED, sent)


def tell_cost(manager: Any, told: Callable[[float], None] | None) -> None:
    """Call `told` with the cost [s] of what was released last, when all of it has ended. Called at
    the end of each request, so that none takes what another one has released."""
    states = vars(manager).pop(_RELEASED, ())
    if told is None:
        return

    async def tell() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                for state in states:
                    while not state.finished:
                        state.event.clear()
                        await state.event.wait()
        costs = [out["meta_info"].get(USAGE_KEY) for state in states for out in state.out_list[-1:]]
        told(sum(known[-1] for known in costs if known))

    task = asyncio.create_task(tell())
    _telling.add(task)
    task.add_done_callback(_telling.discard)
