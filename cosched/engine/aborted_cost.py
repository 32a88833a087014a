"""What aborted requests have cost: the scheduler says it after their replies have ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from cosched.core.wire import USAGE_KEY

_ABORT_S = 60.0
"""Most that an aborted request may take to end."""

_telling: set[asyncio.Task[None]] = set()
"""The loop keeps only weak references to tasks."""


def tell_cost(states: Sequence[Any], told: Callable[[float], None]) -> None:
    """Call `told` with the cost [s] when all have ended. states: of SGLang's tokenizer manager,
    which the scheduler still knows."""

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
