"""What a policy may know of a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

__all__ = [
    "PLAIN",
    "LateReason",
    "Media",
    "Request",
    "RequestClass",
    "Slo",
    "Traits",
    "num_encoded",
    "num_tokens_left",
    "num_tokens_of",
]


class RequestClass(Enum):
    """Online: latency-critical (TTFT, TPOT). Offline: throughput, maybe a deadline of hours."""

    ONLINE = "online"
    OFFLINE = "offline"

    # Members are singletons: identity hashing skips Enum's Python-level ``__hash__`` on hot paths.
    __hash__ = object.__hash__


class LateReason(Enum):
    """Why the TTFT target of an online request was judged out of reach before its first token.

    OVERDUE   it passed while the request waited
    TOO_LONG  the rest of its prefill alone takes longer than the time that is left
    CROWDED   there is no time for all waiting requests, and others are served first
    """

    OVERDUE = "overdue"
    TOO_LONG = "too_long"
    CROWDED = "crowded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets of one request; ``None`` means the server's own.

    ttft_s      arrival to first token [s]
    tpot_s      time per output token after the first [s]
    deadline_s  latest completion, counted from arrival [s]; mostly for offline requests
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None


class Media(NamedTuple):
    """An image, a video or a sound of a prompt, which the model's encoder computes as a whole in
    the iteration that computes the first of its tokens. Later chunks use the cached result.

    begin       place of its first token in the prompt
    num_tokens  of the prompt that the encoder computes
    """

    begin: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the engine can do with a request; fixed when it arrives.

    can_preempt  it may be preempted: that frees its slot and its KV, and it can resume
    can_mix   its prefill may share an iteration with decodes, and its decodes with a prefill
    can_cut   its prompt may be computed in several iterations
    num_rows  request slots that it takes once it decodes (beams have one each)
    adapter   LoRA adapter it needs; None: the model's own weights
    media     of its prompt, in the order of the prompt
    """

    can_preempt: bool = True
    can_mix: bool = True
    can_cut: bool = True
    num_rows: int = 1
    adapter: str | None = None
    media: tuple[Media, ...] = ()


PLAIN = Traits()


class Request(Protocol):
    """Read-only window on one request; the engine keeps it up to date.

    Lengths are tokens and nest: ``0 <= num_computed_tokens <= num_tokens`` with
    ``num_tokens = num_prompt_tokens + num_output_tokens``.
    """

    @property
    def rid(self) -> str: ...

    @property
    def request_class(self) -> RequestClass: ...

    @property
    def slo(self) -> Slo:
        """Its own targets, and the targets of its tier."""
        ...

    @property
    def tier(self) -> int:
        """Rank of its tier among the online ones (`cosched.core.tiers`); 0: the highest, or there
        are none."""
        ...

    @property
    def tenant(self) -> str:
        """Who sent it: ``KEY/TENANT`` or ``KEY``, by the names of the configuration; empty: not
        known."""
        ...

    @property
    def traits(self) -> Traits: ...

    @property
    def arrival_s(self) -> float:
        """When it arrived, on the engine's clock. A preemption does not change it."""
        ...

    @property
    def arrival_seq(self) -> int:
        """Position in the order of arrival: a total order, equal on every rank."""
        ...

    @property
    def first_token_s(self) -> float | None:
        """When its first token came out, on the engine's clock; None while none has. A preemption
        does not change it."""
        ...

    @property
    def last_token_s(self) -> float | None:
        """When its last token came out, on the engine's clock; None while none has. Of one that is
        in the iteration on its way: the token before."""
        ...

    @property
    def late(self) -> LateReason | None:
        """Why its TTFT target is out of reach, by the first plan that said so (`Plan.late`)."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Times that it was preempted, by a plan or by the engine itself."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far; kept through a preemption."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Most tokens that it may generate."""
        ...

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens that were cached when its latest prefill was launched. Tokens beyond are in the
        radix tree once the result of that prefill is processed."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV it holds now. 0 while it waits (its KV may still be in the cache).

        Counts the iteration that is running: a running request for which it is one below the
        tokens it has is not part of that iteration.
        """
        ...

    @property
    def num_own_tokens(self) -> int:
        """Tokens whose KV it holds outside the radix tree."""
        ...


def num_tokens_of(request: Request) -> int:
    """Prompt and generated tokens: what a prefill computes where nothing is cached."""
    return request.num_prompt_tokens + request.num_output_tokens


def num_tokens_left(request: Request) -> int:
    """Prompt and generated tokens whose KV it does not hold yet."""
    return num_tokens_of(request) - request.num_computed_tokens


def num_encoded(request: Request, num_cached: int, num_new: int) -> int:
    """Tokens that the encoder computes if `num_new` tokens are computed behind `num_cached`. An
    upper bound: another request may have left the same image in the engine's cache."""
    media = request.traits.media
    if not media:
        return 0
    return sum(one.num_tokens for one in media if num_cached <= one.begin < num_cached + num_new)
