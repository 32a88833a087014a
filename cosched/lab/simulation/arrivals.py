"""Requests as clients send them, and the interface of clients, simulated or live."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cosched.core.request import RequestClass, Slo
from cosched.lab.metrics.records import RequestRecord
from cosched_traces.workload import PlacedMedia

VOCAB_SIZE = 32_000
"""Of the simulated models: token ids of prompts that are made from segments stay below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request that a client sends.

    num_output_tokens  length of the reply; the scheduler sees only `max_new_tokens`
    priority           of an online request
    num_behind         requests of its job that come after it, where the client says so
    media              images of the prompt
    output_ids         tokens of a simulated reply that a later prompt contains; empty: any. The
                       last token is always the end of the reply
    """

    rid: str
    arrival_s: float
    request_class: RequestClass
    input_ids: array[int]
    num_output_tokens: int
    max_new_tokens: int
    output_ids: Sequence[int] = ()
    tenant: str = ""
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    num_behind: int = 0
    media: Sequence[PlacedMedia] = ()


class Source(Protocol):
    """A client, in virtual time or live: open loop, sessions, closed loop, a gateway."""

    def due(self, now_s: float) -> Iterable[Arrival]:
        """Requests that have arrived by `now_s`, each once."""
        ...

    def next_s(self) -> float | None:
        """Time of the next request or of another event here [s]; None: not before a request
        finishes."""
        ...

    def on_finish(self, record: RequestRecord, output_ids: Sequence[int] | None = None) -> None:
        """A request of any source ended. output_ids: the reply, if it differs from that of the
        arrival."""
        ...
