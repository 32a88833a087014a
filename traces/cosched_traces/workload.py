"""One request of a workload, and how its prompt's tokens come about."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from cosched.core.request import RequestClass, Slo


class Segment(NamedTuple):
    """A stretch of a prompt. Equal `key` means equal tokens: two prompts whose segments begin alike
    share that prefix. A shorter segment of the same key is a prefix of a longer one.

    encoded  it is an image, which the model's encoder computes; the key says which one
    """

    key: int
    num_tokens: int
    encoded: bool = False


class PlacedMedia(NamedTuple):
    """An image of a prompt. begin: place of its first token."""

    key: int
    begin: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request as a trace or a generator gives it.

    arrival_s          seconds since the workload starts; offline sets mostly arrive at 0
    segments           the prompt by its shared parts, for traces that carry no text
    token_ids          the prompt itself, where there is one; then `segments` is empty
    num_output_tokens  tokens it generates (the trace's truth; no scheduler may look at it)
    max_new_tokens     what the client asks for; None: it knows how long the reply will be, and asks
                       for that. Requests of the catalogue all have a limit (`load_workload`)
    after              rid of the request whose answer it waits for; it is then sent `think_s` after
                       that answer's end, and `arrival_s` is only the earliest it could be
    session            the conversation it is a turn of
    priority           of an online request: names its tier
    tenant             the name of its API key, as a server's configuration has it; "": none
    """

    rid: str
    request_class: RequestClass
    arrival_s: float
    num_output_tokens: int
    segments: tuple[Segment, ...] = ()
    token_ids: Sequence[int] = ()
    max_new_tokens: int | None = None
    after: str | None = None
    think_s: float = 0.0
    session: str | None = None
    tenant: str = ""
    slo: Slo = field(default_factory=Slo)
    priority: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) or sum(segment.num_tokens for segment in self.segments)

    @property
    def media(self) -> tuple[PlacedMedia, ...]:
        """The images of its prompt, in order."""
        ends = accumulate(segment.num_tokens for segment in self.segments)
        return tuple(
            PlacedMedia(segment.key, end - segment.num_tokens, segment.num_tokens)
            for segment, end in zip(self.segments, ends, strict=True)
            if segment.encoded
        )

    def prompt(self, *, vocab_size: int, first_id: int = 10) -> array[int]:
        """The prompt's token ids, in ``[first_id, vocab_size)`` when made from segments; the same
        for the same segments in every process."""
        if self.token_ids:
            return array("q", self.token_ids)
        ids = array("q")
        for segment in self.segments:
            rng = np.random.Generator(np.random.PCG64(segment.key))
            drawn = rng.integers(first_id, vocab_size, size=segment.num_tokens, dtype=np.int64)
            ids.frombytes(drawn.tobytes())
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order of arrival, and where they came from.

    notes   what was done to the source, in order: rows dropped, sampled, cut; for a report to show
    """

    name: str
    requests: tuple[TraceRequest, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        times = [request.arrival_s for request in self.requests]
        assert times == sorted(times), f"{self.name}: requests are not in the order of arrival"
        if self.has_sessions:
            seen: set[str] = set()
            for request in self.requests:
                assert request.after is None or request.after in seen, f"{request.after=}"
                seen.add(request.rid)

    @property
    def has_sessions(self) -> bool:
        """Some requests wait for the answers to others."""
        return any(request.after is not None for request in self.requests)

    def changed(self, requests: tuple[TraceRequest, ...], note: str) -> Workload:
        """Other requests under the same name, and a note of what was done."""
        return replace(self, requests=requests, notes=(*self.notes, note))
