"""KV of a shared prefix that the engine reads once for all requests of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cosched.core.request import Request
from cosched.engine.feature import Feature
from cosched.engine.port.prefixes import RunningPrefixes
from cosched.engine.port.read_once import shared_runs
from cosched.engine.tracked import TrackedRequest


class SharingState(msgspec.Struct, kw_only=True, frozen=True):
    """What ran with shared prefixes since the start: iterations, and decodes in them."""

    num_iterations: int = 0
    num_decodes: int = 0


class SharedReads(Feature):
    """Where plans know of it (`EngineCaps.shared_prefix`)."""

    place = "prefixes"

    def __init__(self, prefixes: RunningPrefixes) -> None:
        self.prefixes = prefixes

    @classmethod
    def of(cls, controller: Any) -> SharedReads | None:
        is_wanted = controller.caps.shared_prefix
        return cls(RunningPrefixes.of(controller.scheduler)) if is_wanted else None

    def state(self) -> SharingState:
        """All zero where the attention is modelled."""
        runs = shared_runs()
        if runs is None:
            return SharingState()
        return SharingState(num_iterations=runs.num_iterations, num_decodes=runs.num_decodes)

    def on_finished(self, request: TrackedRequest) -> None:
        self.prefixes.forget(request.req)

    def saved(self, requests: Sequence[Any], contexts: Sequence[int]) -> Mapping[Request, int]:
        """Tokens of the context of each running request that another one reads for it."""
        reads = self.prefixes.reads([request.req for request in requests], contexts)
        saved = (all_ - read for all_, read in zip(contexts, reads, strict=True))
        return dict(zip(requests, saved, strict=True))
