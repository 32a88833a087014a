"""Failures of cosched itself do not end the server.

If a policy raises, or its plan is invalid, the safe rule (`cosched.schedule.safe`) plans that
iteration. After several failures in a row, or one plan that had to be interrupted, the safe rule
plans until the server is restarted. A slow plan is used, and counts as a failure. Observers
(timing, metrics, the decision log) are skipped where they fail.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from cosched.core.plan import EMPTY_PLAN, Plan
from cosched.core.view import View
from cosched.schedule.base import Policy
from cosched.schedule.safe import SafePolicy
from cosched.schedule.validate import validate

MOST_FAILURES = 5
"""Failed plans in a row after which the policy is not asked again."""

_LOGGED_SHARE = 100
"""Of the failures after the first of a place, one in this many is logged."""

PLAN_LIMIT_S = 10.0
"""Longest that a policy may take for a plan. Plans take well under 10 ms."""

SLOW_PLAN_S = 1.0
"""A plan that took longer counts as a failure of the policy, although it is used."""

_AGAIN_S = 0.5
"""Until the next interruption, if the policy continues after the first."""

_NOT_AGAIN = "it is not asked again until the server is restarted"

_log = logging.getLogger("cosched")


class Guard:
    """Counts failures and plans where the policy cannot.

    is_strict  every error is raised: for tests and simulations
    """

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self.failures: Counter[str] = Counter()
        """Failures since the start, by place; `plan` is the policy."""
        self._num_in_a_row = 0
        self._safe = SafePolicy()

    @property
    def has_given_up(self) -> bool:
        """The policy is not asked any more."""
        return self._num_in_a_row >= MOST_FAILURES

    def plan(
        self, policy: Policy[Any], name: str, view: View, state: Any
    ) -> tuple[Plan, Any] | None:
        """The policy's plan, validated, and its next state. None: it failed, or was given up."""
        if self.has_given_up:
            return None
        if self.is_strict:
            plan, state = policy.plan(view, state)
            validate(plan, view)
            return plan, state
        started_s = time.perf_counter()
        try:
            with time_limit(PLAN_LIMIT_S):
                plan, state = policy.plan(view, state)
            validate(plan, view)
        except PlanTimeout as error:
            self._num_in_a_row = MOST_FAILURES
            self._report(name, error, view)
            return None
        except Exception as error:
            self._num_in_a_row += 1
            self._report(name, error, view)
            return None
        self._judge(name, time.perf_counter() - started_s)
        return plan, state

    def safe_plan(self, view: View) -> Plan:
        """The safe rule; where that fails too, running requests decode and nothing is admitted."""
        try:
            plan, _ = self._safe.plan(view, None)
            validate(plan, view)
        except Exception as error:
            self.note("safe_plan", error)
            return EMPTY_PLAN
        return plan

    @contextlib.contextmanager
    def watching(self, place: str) -> Iterator[None]:
        """Around code that may fail without consequence."""
        try:
            yield
        except Exception as error:
            self.note_or_raise(place, error)

    def note_or_raise(self, place: str, error: Exception) -> None:
        """Of code that may fail without consequence; in tests the error is raised."""
        if self.is_strict:
            raise error
        self.note(place, error)

    def note(self, place: str, error: Exception) -> None:
        """Count a failure and log it, the first time with its traceback."""
        num = self._count(place)
        if num % _LOGGED_SHARE == 1:
            _log.error(
                "cosched: %s failed (%d times since the start) and was left out: %r",
                place,
                num,
                error,
                exc_info=error if num == 1 else None,
            )

    def _judge(self, name: str, took_s: float) -> None:
        """Count a slow plan as a failure, although it is used."""
        if took_s <= SLOW_PLAN_S:
            self._num_in_a_row = 0
            return
        self._num_in_a_row += 1
        num = self._count("slow_plan")
        if num % _LOGGED_SHARE != 1 and not self.has_given_up:
            return
        _log.error(
            "cosched: policy %r took %.1f s for a plan (%d slow plans since the start, %d failures "
            "in a row); all requests wait during a plan%s",
            name,
            took_s,
            num,
            self._num_in_a_row,
            f". From now on the safe rule plans: {_NOT_AGAIN}" if self.has_given_up else "",
        )

    def _count(self, place: str) -> int:
        self.failures[place] += 1
        return self.failures[place]

    def _report(self, name: str, error: BaseException, view: View) -> None:
        num = self._count("plan")
        if num % _LOGGED_SHARE != 1 and not self.has_given_up:
            return
        _log.error(
            "cosched: policy %r failed (%d times since the start, %d in a row): %r; this iteration "
            "is planned by the safe rule%s. Decision record: %s",
            name,
            num,
            self._num_in_a_row,
            error,
            f", and {_NOT_AGAIN}" if self.has_given_up else "",
            _record(view),
            exc_info=error if num == 1 else None,
        )


def _record(view: View) -> str:
    """The view of a failed plan, on one line."""

    def rows(requests: Any) -> list[list[object]]:
        return [
            [r.rid, r.request_class.value, r.num_prompt_tokens, r.num_output_tokens]
            for r in requests
        ]

    try:
        kv = view.kv
        record: dict[str, object] = {
            "now_s": view.now_s,
            "start_s": view.start_s,
            "kv": {name: getattr(kv, name) for name in kv.__slots__},
            "free_slots": view.free_slots,
            "num_offline": view.num_offline,
            "running": rows(view.running),
            "unfinished": rows(view.unfinished),
        }
    except Exception as error:
        record = {"unreadable": repr(error)}
    return json.dumps(record, separators=(",", ":"))


def note_or_raise(scheduler: Any, place: str, error: Exception) -> None:
    """For a hook that works without the failed part; under stock policies the error is raised."""
    controller = getattr(scheduler, "cosched", None)
    if controller is None:
        raise error
    controller.guard.note_or_raise(place, error)


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
