"""KV of a shared prefix that the engine reads once for all requests of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cosched.core.request import Request
from cosched.engine.feature import Feature
from cosched.engine.port.prefixes import RunningPrefixes
from cosched.engine.tracked import TrackedRequest


class SharedReads(Feature):
    """Where plans know of it (`EngineCaps.shared_prefix`)."""

    place = "prefixes"

    def __init__(self, prefixes: RunningPrefixes) -> None:
        self.prefixes = prefixes

    @classmethod
    def of(cls, controller: Any) -> SharedReads | None:
        is_wanted = controller.caps.shared_prefix
        return cls(RunningPrefixes.of(controller.scheduler)) if is_wanted else None

    def on_finished(self, request: TrackedRequest) -> None:
        self.prefixes.forget(request.req)

    def saved(self, requests: Sequence[Any], contexts: Sequence[int]) -> Mapping[Request, int]:
        """Tokens of the context of each running request that another one reads for it."""
        reads = self.prefixes.reads([request.req for request in requests], contexts)
        saved = (all_ - read for all_, read in zip(contexts, reads, strict=True))
        return dict(zip(requests, saved, strict=True))
