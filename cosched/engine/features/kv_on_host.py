"""KV is copied to host memory before its place is needed."""

from __future__ import annotations

from typing import Any

from cosched.core.view import View
from cosched.engine import port
from cosched.engine.feature import Feature
from cosched.engine.features.kv_manager import KvManager
from cosched.engine.host_core import HostedTreeCore

_CHUNKS_AHEAD = 2  # iterations whose tokens are copied to host memory before their place is needed
_MAX_AHEAD = 0.25  # of the device's memory that is copied ahead


class KvOnHost(Feature):
    """Where one rank plans for itself alone: else ranks would differ.

    KV in host memory is loaded by the iteration that needs it, as in SGLang: loading it before an
    iteration made no chat earlier (docs/results/kv_memory.md).
    """

    place = "host_kv"

    def __init__(self, scheduler: Any, core: HostedTreeCore) -> None:
        self._scheduler = scheduler
        self._core = core
        self._num_ahead = min(
            _CHUNKS_AHEAD * (scheduler.chunked_prefill_size or scheduler.max_prefill_tokens),
            int(_MAX_AHEAD * port.kv_total(scheduler)),
        )
        self._used_before = 0
        """Tokens evicted since the start, less the free ones, when copies were begun last."""

    @classmethod
    def of(cls, controller: Any) -> KvOnHost | None:
        kv = controller.features.get(KvManager)
        if kv is None or not port.parallel().is_alone or not isinstance(kv.core, HostedTreeCore):
            return None
        return cls(controller.scheduler, kv.core)

    def on_look(self, view: View) -> None:
        """Copy what is evicted next, each time that an eighth of what was copied is used up."""
        core, free = self._core, port.kv_free(self._scheduler)
        missing = self._num_ahead - free
        used = core.evicted["all"] - free
        if missing > 0 and abs(used - self._used_before) >= self._num_ahead // 8:
            self._used_before = used
            core.write_ahead(missing - core.num_writing)
