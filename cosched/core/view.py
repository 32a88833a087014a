"""What a policy sees: a read-only window on the engine's state between two iterations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cosched.core.caps import EngineCaps
from cosched.core.estimates import LengthEstimate, Predictor
from cosched.core.plan import SkipReason
from cosched.core.request import Request, RequestClass

__all__ = [
    "BatchRules",
    "Decodes",
    "Ended",
    "KvState",
    "Match",
    "OfflineLimits",
    "OfflineOrder",
    "Outlook",
    "Progress",
    "Room",
    "View",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """What the next batch may be, with the requests that run now; narrower than `EngineCaps`.

    mixed        prefill and the decodes of all that runs may share it
    partial      running requests may sit it out (`View.can_hold` says which)
    decodes_due  the iteration before this one left out running requests without being told to: it
                 prefilled and could not mix. They come first now
    """

    mixed: bool = True
    partial: bool = False
    decodes_due: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvState:
    """KV memory at the moment of planning [tokens]; requests: running and unfinished prefills.

    total      capacity = free + evictable + shared + online + offline
    free       not allocated
    evictable  in the radix tree and used by no request
    shared     in the radix tree and used by one or more, each token once
    shared_offline  the part of it that no online request has ever used
    online     held by online requests outside the tree
    offline    held by offline requests outside the tree
    reserved   kept for the output still to come of the running requests, online and offline: the
               engine's rule
    promised   the part of it that plans have set aside by `Plan.promise`
    next_step  what the next decode of all running requests takes: a token each, or a page of those
               that begin one
    host_free  not used of `EngineCaps.host_tokens`
    kept       what online requests are expected to need in all: offline requests do not hold more
               than the rest (Echo §5.3); 0: no such bound
    """

    total: int
    free: int
    evictable: int
    reserved: int
    shared: int = 0
    online: int = 0
    offline: int = 0
    promised: int = 0
    next_step: int = 0
    host_free: int = 0
    shared_offline: int = 0
    kept: int = 0

    @property
    def offline_held(self) -> int:
        """Tokens that offline requests hold, in the tree and outside."""
        return self.offline + self.shared_offline

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """By how much offline work may lengthen the iterations of online requests, where the operator
    promises what these would have alone, and a share more (`cosched.predict`).

    wait_s  of those that online requests wait for or compute their prompts in [s]; None: nothing is
            promised of TTFT
    share   of those in which they decode, by what these take without offline work; None: nothing is
            promised of TPOT
    """

    wait_s: float | None = None
    share: float | None = None


class Decodes(NamedTuple):
    """Running requests and, for each, the tokens that it attends to in its next decode, the new one
    included: all of them at once cost a fraction of a look at each."""

    requests: Sequence[Request]
    contexts: Sequence[int]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Decodes:
        """Of any running requests, looking at each. O(requests)."""
        return cls(requests, [r.num_computed_tokens + 1 for r in requests])


class Outlook(NamedTuple):
    """Of running requests, in their order. Lists, or arrays of int64.

    held  KV tokens that each gives back when it ends
    ends  (ends, requests): KV tokens that it is to take until each of its ends
          (`LengthEstimate.ends`), rising; not above 0 where it is passed, or has fewer than others
    """

    held: Any
    ends: Any

    @classmethod
    def of(cls, view: View) -> Outlook:
        """Asking about each."""
        running = view.running
        held = [view.preemption_gain(r) for r in running]
        ends = [
            [n * r.traits.num_rows for n in view.length(r).ends_left(r.num_output_tokens)]
            for r in running
        ]
        most = max(map(len, ends), default=0)
        padded = [[0] * (most - len(of)) + of for of in ends]
        return cls(held, [*map(list, zip(*padded, strict=True))])


class Progress(NamedTuple):
    """Of running requests, in their order: tokens that each has generated, and output tokens for
    which plans have set KV aside (`View.promised`)."""

    num_output: Sequence[int]
    promised: Sequence[int | None]

    @classmethod
    def of(cls, view: View) -> Progress:
        """Asking about each."""
        running = view.running
        return cls([r.num_output_tokens for r in running], [view.promised(r) for r in running])


class OfflineOrder(Protocol):
    """One pass over the waiting offline requests, in the pool's order or by candidates; nothing is
    taken out of the pool by it.

    Every pool gives one. Where a pool knows neither buckets nor which requests begin alike, it is
    one bucket and nothing is left out.
    """

    @property
    def knows_prefixes(self) -> bool:
        """It knows which requests begin alike: `skip_sharing` leaves them out."""
        ...

    def __iter__(self) -> Iterator[Request]: ...

    def __next__(self) -> Request:
        """The next request that is neither taken nor left out. O(1)."""
        ...

    def skip_sharing(self, request: Request, num_tokens: int) -> None:
        """Leave out all that share the first `num_tokens` tokens with a request, waiting or not:
        it computes them now, and the others shall find them cached later."""
        ...

    def candidates(self, per_bucket: int) -> Sequence[Sequence[Request]]:
        """Of each length bucket (Echo §6) the first `per_bucket` requests that are neither taken
        nor left out; one alone where its deadline or its age gives it the turn.

        O(buckets * per_bucket), and O(1) for each taken or left out since the last call.
        """
        ...

    def num_shared(self, request: Request) -> int:
        """Tokens at the head of a waiting request with which another one of its bucket begins too;
        0 where nobody knows. O(depth)."""
        ...

    def take(self, request: Request) -> None:
        """It is admitted: no candidate any more."""
        ...


class Ended(NamedTuple):
    """A request that is over. num_tokens: of its output."""

    rid: str
    request_class: RequestClass
    num_tokens: int


class View(Protocol):
    """Valid during one call of `plan`. Nothing reached through it may be changed, and looking
    changes nothing: neither the cache nor any order depends on what was looked at.

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
    def mean_iteration_s(self) -> float:
        """Moving average of the measured time of an iteration; 0.0 before the first [s]."""
        ...

    @property
    def predictor(self) -> Predictor:
        """What is known now of the time of an iteration."""
        ...

    def length(self, request: Request) -> LengthEstimate:
        """What is known now of the output a request is still to generate. O(1)."""
        ...

    @property
    def ended(self) -> Sequence[Ended]:
        """Requests that have ended since the plan before this one was made."""
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

    def outlook(self) -> Outlook:
        """Of `running`, in its order, `preemption_gain` and the ends of `length` for each of its
        rows: all at once cost a fraction of a question about each."""
        ...

    def progress(self) -> Progress:
        """Of `running`, in its order. O(1): it is known of all anyway."""
        ...

    @property
    def unfinished(self) -> Sequence[Request]:
        """Requests in the middle of their prefill, at most `EngineCaps.max_unfinished_prefills`."""
        ...

    def waiting(self, rid: str) -> Request | None:
        """The request of this id, if it waits. O(1)."""
        ...

    def can_hold(self, request: Request) -> bool:
        """This running request may sit out the iteration (`Plan.hold`)."""
        ...

    def why_barred(self, request: Request) -> SkipReason | None:
        """Why this waiting request cannot be admitted now, whatever room there is; None: it can.

        engine_refused: the engine refused it a moment ago for a reason that no plan knows (an
        adapter that cannot be loaded now, say); it is asked again later. restoring: its KV is on
        its way from host memory."""
        ...

    @property
    def online(self) -> Iterable[Request]:
        """Waiting online requests, oldest first."""
        ...

    def offline_order(self) -> OfflineOrder:
        """The waiting offline requests, from the front: one pass, which each call begins anew."""
        ...

    @property
    def num_offline(self) -> int:
        """How many offline requests wait."""
        ...

    @property
    def offline_limits(self) -> OfflineLimits: ...

    def match(self, request: Request) -> Match:
        """What of a waiting request is cached now. O(depth). Changes nothing: neither budgets nor
        what the cache will evict next."""
        ...

    def eviction_loss_s(self, num_tokens: int) -> float:
        """What is lost when so many evictable tokens go: seconds of the device that are expected to
        compute them anew, those that would make an online request late counting more [s]. 0.0 where
        nobody knows. O(nodes evicted), once per plan."""
        ...

    @property
    def recompute_debt_s(self) -> float:
        """By how much the device has computed more anew of what stops had lost than it is to spend
        on that [s]; 0.0: there is no reason to hold back."""
        ...

    @property
    def room(self) -> Room | None:
        """None: nothing is promised beside the targets."""
        ...

    def reserve_of(self, request: Request) -> int:
        """Tokens of `KvState.reserved` that stand for this running request: by so many they are
        fewer without it. Negative for one that has taken more of what is set aside for another
        (`Plan.hosts`) than is set aside for itself."""
        ...

    def promised(self, request: Request) -> int | None:
        """Output tokens for which KV was set aside by a plan, generated ones included; None: none
        was, the engine's rule holds."""
        ...

    def num_shared(self, request: Request) -> int:
        """Of the KV that the next decode of a running request attends to, tokens that are read for
        another of its class anyway. Asked only where `EngineCaps.shared_prefix` holds. O(1)."""
        ...

    def preemption_gain(self, request: Request) -> int:
        """KV tokens that become free or evictable if this request is stopped. O(depth).

        Its reserve is not included. Tokens that another running request holds too do not count.
        """
        ...
