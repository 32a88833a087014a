"""KV is copied to host memory before its place is needed, and back before an iteration needs it."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from cosched.core.plan import SkipReason
from cosched.core.view import View
from cosched.engine import port
from cosched.engine.feature import Feature
from cosched.engine.features.kv_manager import KvManager
from cosched.engine.host_core import HostedTreeCore
from cosched.engine.tracked import TrackedRequest
from cosched.engine.waiting import WaitingQueue

_CHUNKS_AHEAD = 2  # iterations whose tokens are copied to host memory before their place is needed
_MAX_AHEAD = 0.25  # of the device's memory that is copied ahead
_MAX_RESTORING = 4  # waiting online requests whose KV in host memory is looked up
_MIN_LOAD_S = 0.01  # a shorter load is done by the iteration that needs it
_MAX_WAIT = 20  # plans for which a request waits for the copies of what it replaces
_MIN_LEFT = 0.05  # of the device's memory that loading ahead leaves to running requests


class _Loading(NamedTuple):
    """KV of a waiting request is being loaded from host memory, up to this node."""

    node_id: int


class _MakingRoom(NamedTuple):
    """KV that the load replaces is being copied to host memory, for this number of plans."""

    num_plans: int


class KvOnHost(Feature):
    """Where one rank plans for itself alone: else ranks would differ."""

    place = "host_kv"

    def __init__(
        self, scheduler: Any, waiting: WaitingQueue, kv: KvManager, core: HostedTreeCore
    ) -> None:
        self._scheduler = scheduler
        self._waiting = waiting
        self._kv = kv
        self._core = core
        self._num_ahead = min(
            _CHUNKS_AHEAD * (scheduler.chunked_prefill_size or scheduler.max_prefill_tokens),
            int(_MAX_AHEAD * port.kv_total(scheduler)),
        )
        self._used_before = 0
        """Tokens evicted since the start, less the free ones, at the latest `_write_ahead`."""
        self._not_on_host: set[TrackedRequest] = set()
        """Waiting requests that have nothing in host memory that is worth loading ahead."""
        self._restoring: dict[TrackedRequest, _Loading | _MakingRoom] = {}
        """Waiting requests whose KV is on its way from host memory."""

    @classmethod
    def of(cls, controller: Any) -> KvOnHost | None:
        kv = controller.features.get(KvManager)
        if kv is None or not port.parallel().is_alone or not isinstance(kv.core, HostedTreeCore):
            return None
        return cls(controller.scheduler, controller.waiting, kv, kv.core)

    def on_look(self, view: View) -> None:
        self._restore_ahead()
        self._write_ahead()

    def why_blocked(self, request: TrackedRequest) -> SkipReason | None:
        """It is admitted when its KV has come from host memory."""
        return SkipReason.RESTORING if request in self._restoring else None

    def _restore_ahead(self) -> None:
        """Begin to load what the oldest online requests have in host memory, if an iteration would
        wait for it."""
        before, self._restoring = self._restoring, {}
        for tracked, state in before.items():
            if isinstance(state, _Loading) and self._core.is_restoring(state.node_id):
                self._restoring[tracked] = state
        if not self._kv.num_copied:
            return
        oldest = list(itertools.islice(self._waiting.online, _MAX_RESTORING))
        self._not_on_host.intersection_update(oldest)
        for tracked in oldest:
            if tracked not in self._restoring and tracked not in self._not_on_host:
                step = self._restore(tracked, before.get(tracked))
                if step is not None:
                    self._restoring[tracked] = step

    def _restore(
        self, tracked: TrackedRequest, before: _Loading | _MakingRoom | None
    ) -> _Loading | _MakingRoom | None:
        """One step of a load; None: there is nothing to wait for."""
        scheduler, core = self._scheduler, self._core
        found = port.peek(scheduler.tree_cache, tracked.req)
        num_host = self._kv.num_on_host(tracked, found.node, found.num_tokens)
        if num_host * self._kv.leaves.value.transfer_s < _MIN_LOAD_S:
            self._not_on_host.add(tracked)
            return None
        need = num_host + len(port.token_ids(tracked.req)) - found.num_tokens
        free = port.kv_free(scheduler)
        headroom = free + core.num_evictable + core.num_writing
        if need > headroom - _MIN_LEFT * port.kv_total(scheduler):
            return None
        num_plans = before.num_plans + 1 if isinstance(before, _MakingRoom) else 0
        if num_plans < _MAX_WAIT and not core.make_room(num_host - free):
            return _MakingRoom(num_plans)
        node_id = core.restore(tracked.req)
        return None if node_id is None else _Loading(node_id)

    def _write_ahead(self) -> None:
        """Copy what is evicted next, each time that an eighth of what was copied is used up."""
        core, free = self._core, port.kv_free(self._scheduler)
        missing = self._num_ahead - free
        used = core.evicted["all"] - free
        if missing > 0 and abs(used - self._used_before) >= self._num_ahead // 8:
            self._used_before = used
            core.write_ahead(missing - core.num_writing)
