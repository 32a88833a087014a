"""Requests that the engine refuses although a plan admits them back off, longer each time."""

from __future__ import annotations

from typing import Any, NamedTuple

from cosched.core.plan import SkipReason
from cosched.core.request import Request
from cosched.engine.feature import Feature
from cosched.engine.state import Counters

MAX_BACKOFF_PLANS = 64
"""Plans for which a request backs off that the engine refuses again and again."""


class _Backoff(NamedTuple):
    """num_refusals: in a row; until: number of the first plan that may admit the request again."""

    num_refusals: int
    until: int


class Refusals(Feature):
    """Follows one scheduler."""

    place = "refusals"

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._backing_off: dict[str, _Backoff] = {}

    @classmethod
    def of(cls, controller: Any) -> Refusals:
        return cls(controller.counters)

    def on_refused(self, request: Request) -> None:
        self._counters.num_engine_refusals += 1
        before = self._backing_off.get(request.rid)
        num = 1 if before is None else before.num_refusals + 1
        until = self._counters.num_plans + min(2**num, MAX_BACKOFF_PLANS)
        self._backing_off[request.rid] = _Backoff(num, until)

    def why_blocked(self, request: Request) -> SkipReason | None:
        backoff = self._backing_off.get(request.rid)
        is_blocked = backoff is not None and backoff.until > self._counters.num_plans
        return SkipReason.ENGINE_REFUSED if is_blocked else None

    def on_admitted(self, request: Request) -> None:
        self._backing_off.pop(request.rid, None)

    def on_aborted(self, request: Request) -> None:
        self._backing_off.pop(request.rid, None)
