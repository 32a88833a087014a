"""What clients send, and what a server, simulated or live, asks them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cosched.core.request import RequestClass, Slo
from cosched.lab.metrics.records import RequestRecord

VOCAB_SIZE = 32_000
"""Of the simulated models: token ids of prompts that are made from segments stay below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request that a client sends.

    num_output_tokens  after so many tokens it ends; a simulated scheduler sees only
                       `max_new_tokens`
    output_ids         the tokens of a simulated reply, where they matter: a later prompt holds
                       them; empty: made up. The last token is the end of the reply in any case
    """

    rid: str
    arrival_s: float
    request_class: RequestClass
    input_ids: array[int]
    num_output_tokens: int
    max_new_tokens: int
    output_ids: Sequence[int] = ()
    slo: Slo = field(default_factory=Slo)


class Source(Protocol):
    """Where requests come from, in virtual time or live: a trace, sessions, a client with so many
    in flight, a gateway."""

    def due(self, now_s: float) -> Iterable[Arrival]:
        """Requests that arrive at `now_s` or came before it, each once."""
        ...

    def next_s(self) -> float | None:
        """When the next request comes, or something else happens here [s]; None: not unless a
        request finishes first."""
        ...

    def on_finish(self, record: RequestRecord, output_ids: Sequence[int] | None = None) -> None:
        """A request of any source ended. output_ids: what it was answered, where that is not what
        `Arrival.output_ids` says."""
        ...
