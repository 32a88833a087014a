"""A plan ends: a policy that does not come back is interrupted.

SGLang's watchdog (``--watchdog-timeout``) looks only while a batch runs. A policy that hangs in the
plan for the first request of an idle server would keep all requests waiting for good.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

__all__ = ["PLAN_LIMIT_S", "SLOW_PLAN_S", "PlanTimeout", "time_limit"]

PLAN_LIMIT_S = 10.0
"""Longest that a policy may take for a plan. Plans take well under 10 ms."""

SLOW_PLAN_S = 1.0
"""From here on a plan counts as a failure of the policy, although it is used."""

_AGAIN_S = 0.5
"""Until the next interruption, should the policy go on after one."""


class PlanTimeout(BaseException):
    """Not an `Exception`: a policy that catches those is interrupted too."""


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise `PlanTimeout` in the block after `limit_s`.

    Python code, sleeps and locks are interrupted; a call into C that does not return is not. No
    limit outside the main thread, where Python takes no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise PlanTimeout(f"no plan within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
