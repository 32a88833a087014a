"""The operator's limits on offline work of one scheduler; they change while it runs.

The limits are sent as numbers in SGLang's own message for changing a scheduler's state, which
reaches all ranks of a replica in the same iteration; so all ranks plan with the same limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from cosched.core.request import RequestClass
from cosched.core.view import OfflineLimits
from cosched.engine import port
from cosched.engine.port.request import answer_with_error
from cosched.engine.tracked import TrackedRequest
from cosched.engine.waiting import WaitingQueue
from cosched.wire import class_of_priority

_PAUSED = "cosched_offline_paused"
_MAX_RUNNING = "cosched_offline_max_running"
_STOP_RUNNING = "cosched_offline_stop_running"
LET_GO = "cosched_offline_let_go"
"""Key of the message that ends all offline work, before the server ends."""

HOLD = "cosched_offline_hold"
"""Key of the message that lets no offline request begin (1), or lets them begin again (0): an
operation of the server waits for the requests that have begun."""

_LET_GO_ADAPTER = "cosched_offline_let_go_adapter:"
"""Beginning of the key of the message that ends waiting offline requests with a LoRA adapter; its
id follows."""

_ANY_NUMBER = -1  # the message holds numbers only

LET_GO_MESSAGE = "the server is shutting down; send this offline request again when it is back"
_ADAPTER_MESSAGE = "the LoRA adapter of this request is being unloaded; send this request again"


def adapter_to_message(lora_id: str) -> dict[str, int]:
    """End the waiting offline requests with this adapter."""
    return {_LET_GO_ADAPTER + lora_id: 1}


def limits_to_message(limits: OfflineLimits) -> dict[str, int]:
    """The limits as SGLang's `SetInternalStateReq` can hold them."""
    return {
        _PAUSED: int(limits.paused),
        _MAX_RUNNING: _ANY_NUMBER if limits.max_running is None else limits.max_running,
        _STOP_RUNNING: int(limits.stop_running),
    }


def limits_from_message(message: Mapping[str, float]) -> OfflineLimits:
    """The inverse."""
    max_running = int(message[_MAX_RUNNING])
    return OfflineLimits(
        paused=bool(message[_PAUSED]),
        max_running=None if max_running == _ANY_NUMBER else max_running,
        stop_running=bool(message[_STOP_RUNNING]),
    )


def is_for_gate(message: Mapping[str, float]) -> bool:
    """True if a `SetInternalStateReq` holds limits, not a setting of SGLang."""
    keys = set(message)
    if len(keys) == 1:
        return keys <= {LET_GO, HOLD} or next(iter(keys)).startswith(_LET_GO_ADAPTER)
    return keys == {_PAUSED, _MAX_RUNNING, _STOP_RUNNING}


class OfflineGate:
    """Checks offline requests before they are queued, and sets the limits of plans.

    Under SGLang's own scheduling there are no limits, but offline work can be ended.
    """

    def __init__(self, scheduler: Any, *, max_waiting: int | None) -> None:
        """max_waiting  most offline requests that wait; None: any number"""
        self._scheduler = scheduler
        self._max_waiting = max_waiting
        self.is_draining = False
        """All offline work was ended, and new offline requests are refused."""
        self._limits = OfflineLimits()
        """The operator's."""
        self._is_held = False
        self.num_turned_away = 0

    @property
    def _waiting(self) -> WaitingQueue | None:
        role = getattr(self._scheduler, "cosched_decode_role", None)
        waiting = self._scheduler.waiting_queue if role is None else role.waiting
        return waiting if isinstance(waiting, WaitingQueue) else None

    def set(self, message: Mapping[str, float]) -> bool:
        """Apply a message. False: SGLang schedules here, so there is nothing to limit; of `HOLD`:
        offline requests have begun and not ended."""
        if LET_GO in message:
            self.let_go()
            return True
        waiting = self._waiting
        if waiting is None:
            return False
        if HOLD in message:
            self._is_held = bool(message[HOLD])
        elif len(message) == 1:
            self._let_go_of_adapter(next(iter(message)).removeprefix(_LET_GO_ADAPTER))
            return True
        else:
            self._limits = limits_from_message(message)
        if not self.is_draining:
            limits = self._limits
            waiting.offline_limits = replace(limits, paused=limits.paused or self._is_held)
        return HOLD not in message or not any(map(_is_offline, port.in_flight(self._scheduler)))

    def turns_away(self, req: Any) -> bool:
        """True if an offline request is refused instead of queued: the server is ending, or the
        pool is full. A preempted request always returns to the pool."""
        waiting, tracked = self._waiting, TrackedRequest.of(req)
        if self.is_draining:
            self._answer(req, HTTPStatus.SERVICE_UNAVAILABLE, LET_GO_MESSAGE)
            if waiting is not None and tracked is not None:
                waiting.turned_away(tracked)
            return True
        if waiting is None or self._max_waiting is None or tracked is not None:
            return False
        if len(waiting.offline) < self._max_waiting:
            return False
        self._answer(
            req,
            HTTPStatus.TOO_MANY_REQUESTS,
            f"{self._max_waiting} offline requests wait already (--cosched-max-offline-waiting); "
            "send this one again later",
        )
        self.num_turned_away += 1
        return True

    def let_go(self) -> None:
        """End all offline work with an error that clients retry, HTTP 503.

        Waiting requests are answered now; running ones are preempted by the next plan and answered
        when they return to the queue.
        """
        self.is_draining = True
        scheduler = self._scheduler
        for req in [req for req in scheduler.waiting_queue if _is_offline(req)]:
            port.take_out_unanswered(scheduler, req)
            self._answer(req, HTTPStatus.SERVICE_UNAVAILABLE, LET_GO_MESSAGE)
        waiting = self._waiting
        if waiting is not None:
            waiting.offline_limits = OfflineLimits(paused=True, stop_running=True)
            return
        for req in port.in_flight(scheduler):
            if _is_offline(req):
                port.end_with_error(scheduler, req, HTTPStatus.SERVICE_UNAVAILABLE, LET_GO_MESSAGE)

    def _let_go_of_adapter(self, lora_id: str) -> None:
        """The adapter cannot be unloaded before its requests have ended, and these may wait for
        longer than the operation should."""
        scheduler = self._scheduler
        for req in list(scheduler.waiting_queue):
            if _is_offline(req) and req.cosched.traits.adapter == lora_id:
                port.take_out_unanswered(scheduler, req)
                self._answer(req, HTTPStatus.SERVICE_UNAVAILABLE, _ADAPTER_MESSAGE)

    def _answer(self, req: Any, status: HTTPStatus, message: str) -> None:
        answer_with_error(self._scheduler, req, status, message)


def _is_offline(req: Any) -> bool:
    return class_of_priority(req.priority) is RequestClass.OFFLINE
