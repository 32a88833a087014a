"""What a policy sees: a read-only window on the engine's state between two iterations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from cosched.core.caps import EngineCaps
from cosched.core.request import Request, RequestClass

__all__ = [
    "Backlog",
    "BatchRules",
    "BucketedOrder",
    "Decodes",
    "KvState",
    "Match",
    "OfflineLimits",
    "SharingOrder",
    "View",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """What the next batch may be, with the requests that run now; narrower than `EngineCaps`.

    mixed        prefill and the decodes of all that runs may share it
    partial      running requests may sit it out
    decodes_due  the iteration before this one left out running requests without being told to: it
                 prefilled and could not mix. They come first now
    """

    mixed: bool = True
    partial: bool = False
    decodes_due: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvState:
    """KV memory at the moment of planning [tokens].

    total      capacity
    free       not allocated
    evictable  in the radix tree and used by no running request
    reserved   kept for the output still to come of the running requests, online and offline
    next_step  what the next decode of all running requests takes: a token each, or a page of those
               that begin one
    """

    total: int
    free: int
    evictable: int
    reserved: int
    next_step: int = 0

    @property
    def headroom(self) -> int:
        """Tokens that new work may take without touching what running requests will need."""
        return self.free + self.evictable - self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The head of a waiting request that is in the radix tree now.

    cached     matched tokens
    evictable  those of them that no running request holds: admitting the request takes them out
               of `KvState.evictable`
    host       those of them that are in host memory only: admitting it takes as many free tokens
    """

    cached: int
    evictable: int
    host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The time for which offline requests have been waiting without a break.

    since_s       when it began [s]
    num_admitted  requests admitted for the first time since then
    """

    since_s: float
    num_admitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineLimits:
    """What the operator lets offline work do, changed while the server runs.

    paused        none is admitted
    max_running   most that run at once, unfinished prefills included; None: any number
    stop_running  those that run beyond that are stopped with their KV kept; else they may end
    """

    paused: bool = False
    max_running: int | None = None
    stop_running: bool = False

    @property
    def most_running(self) -> int | None:
        """None: any number."""
        return 0 if self.paused else self.max_running


class Decodes(NamedTuple):
    """Running requests and, for each, the tokens that it attends to in its next decode, the new one
    included: all of them at once cost a fraction of a look at each."""

    requests: Sequence[Request]
    contexts: Sequence[int]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Decodes:
        """Of any running requests, looking at each. O(requests)."""
        return cls(requests, [r.num_computed_tokens + 1 for r in requests])


@runtime_checkable
class SharingOrder(Protocol):
    """An order of waiting requests that knows which of them begin alike."""

    def skip_sharing(self, request: Any, num_tokens: int) -> None:
        """Leave out all that share the first `num_tokens` tokens with a request, waiting or not:
        it computes them now, and the others shall find them cached later."""
        ...


@runtime_checkable
class BucketedOrder(SharingOrder, Protocol):
    """The same in buckets of similar length: few candidates instead of one order (Echo §6)."""

    def candidates(self, per_bucket: int) -> Sequence[Sequence[Any]]:
        """Of each bucket the first `per_bucket` requests in prefix order that are neither taken nor
        left out; one alone where its deadline or its age gives it the turn.

        O(buckets * per_bucket), and O(1) for each taken or left out since the last call.
        """
        ...

    def take(self, request: Any) -> None:
        """It is admitted: no candidate any more."""
        ...


class View(Protocol):
    """Valid during one call of `plan`; nothing reached through it may be changed.

    Reading is O(1) per request looked at, so a plan costs what it looks at and not what waits.
    """

    @property
    def now_s(self) -> float: ...

    @property
    def start_s(self) -> float:
        """When the planned iteration is expected to begin: now, or when the one that is still on
        its way ends [s]."""
        ...

    @property
    def caps(self) -> EngineCaps: ...

    @property
    def rules(self) -> BatchRules: ...

    @property
    def kv(self) -> KvState: ...

    @property
    def free_slots(self) -> int:
        """Requests that may be admitted before the running batch is full."""
        ...

    @property
    def running(self) -> Sequence[Request]:
        """Requests past their prefill: each decodes one token per iteration."""
        ...

    def running_of(self, request_class: RequestClass) -> Decodes:
        """Those of `running` that are of one class, in its order."""
        ...

    @property
    def unfinished(self) -> Sequence[Request]:
        """Requests in the middle of their prefill, at most `EngineCaps.max_unfinished_prefills`."""
        ...

    def is_waiting(self, rid: str) -> bool: ...

    def is_barred(self, request: Request) -> bool:
        """The engine refused this waiting request a moment ago for a reason that no plan knows (an
        adapter that cannot be loaded now, say); it is asked again later."""
        ...

    @property
    def online(self) -> Iterable[Request]:
        """Waiting online requests, oldest first."""
        ...

    @property
    def offline(self) -> Iterable[Request]:
        """Waiting offline requests, in the pool's order. Its iterator may be a `SharingOrder`
        or a `BucketedOrder`."""
        ...

    @property
    def num_offline(self) -> int:
        """How many offline requests wait."""
        ...

    @property
    def backlog(self) -> Backlog: ...

    @property
    def offline_limits(self) -> OfflineLimits: ...

    def match(self, request: Request) -> Match:
        """What of a waiting request is cached now. O(depth). Changes nothing: neither budgets nor
        what the cache will evict next."""
        ...

    def reserve_of(self, request: Request) -> int:
        """Tokens of `KvState.reserved` that stand for this running request."""
        ...

    def preemption_gain(self, request: Request) -> int:
        """KV tokens that become free or evictable if this request is stopped. O(depth).

        Its reserve is not included. Tokens that another running request holds too do not count.
        """
        ...
