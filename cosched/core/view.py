"""What a policy sees: a read-only window on the engine's state between two iterations."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from cosched.core.batch import IntArray
from cosched.core.caps import EngineCaps
from cosched.core.estimates import LengthEstimate, Predictor
from cosched.core.group import OtherRanks
from cosched.core.kv_state import KvState, Match
from cosched.core.memories import Memory
from cosched.core.plan import SkipReason
from cosched.core.request import Request, RequestClass

__all__ = [
    "BatchRules",
    "Decodes",
    "Ended",
    "OfflineLimits",
    "OfflineOrder",
    "Outlook",
    "Progress",
    "ToleranceHeadroom",
    "TpotHeadroom",
    "View",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """What the next batch may be, with the requests that run now; narrower than `EngineCaps`.

    mixed        prefill and the decodes of all running requests may share it
    partial      the decode of some requests may pause (`View.cannot_pause` says which may not)
    must_decode  the iteration before this one was a prefill that could not mix, or the engine keeps
                 something of a decode only where it is alone: now the running requests decode
    """

    mixed: bool = True
    partial: bool = False
    must_decode: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineLimits:
    """The operator's limits on offline work; they may change while the server runs.

    paused        none is admitted
    max_running   most that run at once, unfinished prefills included; None: any number
    stop_running  running requests beyond that are preempted, their KV kept; else they may finish
    """

    paused: bool = False
    max_running: int | None = None
    stop_running: bool = False

    @property
    def most_running(self) -> int | None:
        """None: any number."""
        return 0 if self.paused else self.max_running


@dataclass(frozen=True, slots=True, kw_only=True)
class TpotHeadroom:
    """The unused part of a tolerance for TPOT.

    share       of the baseline, as it is promised
    saved_s     over the online requests that have ended: what was promised less what they had,
                their sum; older ones fade [s]
    usual_s     of `saved_s`, to begin with; 0: none has ended [s]
    num_tokens  of their replies, in the mean
    most_s      TPOT that one in a hundred may exceed; inf: not known yet [s]
    """

    share: float
    saved_s: float = 0.0
    usual_s: float = 0.0
    num_tokens: float = 200.0
    most_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ToleranceHeadroom:
    """How much offline work may lengthen iterations in tolerance mode, where online
    latency may exceed its isolated baseline by a share (`cosched.predict`).

    wait_s  of iterations in which online requests wait or compute their prompts [s]; None: TTFT has
            no tolerance
    tpot    of iterations in which they decode; None: TPOT has no tolerance
    """

    wait_s: float | None = None
    tpot: TpotHeadroom | None = None


class Decodes(NamedTuple):
    """Running requests, the tokens that each attends to in its next decode, the new one included,
    and the `arrival_seq` of each. Reading all at once is much cheaper than reading each request."""

    requests: Sequence[Request] = ()
    contexts: IntArray = np.zeros(0, dtype=np.int64)
    arrivals: IntArray = np.zeros(0, dtype=np.int64)

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Decodes:
        """Read from each request. O(requests)."""
        contexts = np.array([r.num_computed_tokens + 1 for r in requests], dtype=np.int64)
        return cls(requests, contexts, np.array([r.arrival_seq for r in requests], dtype=np.int64))

    def at(self, places: IntArray) -> Decodes:
        """Those at these places, in that order."""
        requests = [self.requests[place] for place in places.tolist()]
        return Decodes(requests, self.contexts[places], self.arrivals[places])

    def where(self, is_wanted: Sequence[bool]) -> Decodes:
        """Some of them."""
        return self.at(np.array(is_wanted, dtype=bool).nonzero()[0])


class Outlook(NamedTuple):
    """Of running requests, in their order. Lists, or arrays of int64.

    held  KV tokens that each releases when it ends
    ends  (ends, requests): KV tokens that it will have taken by each of its possible ends
          (`LengthEstimate.ends`), ascending; 0 or less for an end that is passed or missing
    """

    held: Any
    ends: Any


class Progress(NamedTuple):
    """Of running requests, in their order: tokens that each has generated, and output tokens for
    which plans have set KV aside (`View.promised`)."""

    num_output: Sequence[int]
    promised: Sequence[int | None]


class OfflineOrder(Protocol):
    """One pass over the waiting offline requests, in the pool's order or by candidates. It takes
    nothing out of the pool.

    A pool without buckets is one bucket; without prefixes, `skip_sharing` leaves nothing out.
    """

    @property
    def knows_prefixes(self) -> bool:
        """It knows which requests share prefixes, and `skip_sharing` leaves them out."""
        ...

    def __iter__(self) -> Iterator[Request]: ...

    def __next__(self) -> Request:
        """The next request that is neither taken nor left out. O(1)."""
        ...

    def skip_sharing(self, request: Request, num_tokens: int) -> None:
        """Leave out all requests that share the first `num_tokens` tokens with this one, which
        computes them now: the others will find them cached."""
        ...

    def candidates(self, per_bucket: int) -> Sequence[Sequence[Request]]:
        """Of each length bucket (Echo §6) the first `per_bucket` requests that are neither taken
        nor left out; only one request if its deadline or its age is due.

        O(buckets * per_bucket), and O(1) for each taken or left out since the last call.
        """
        ...

    def num_shared(self, request: Request) -> int:
        """Tokens at the head of a waiting request that it shares with another one of its bucket; 0
        if unknown. O(depth)."""
        ...

    def take(self, request: Request) -> None:
        """It is admitted, and no candidate any more."""
        ...

    def pass_over(self, request: Request) -> None:
        """It cannot be admitted, and is no candidate any more: those behind it are."""
        ...

    @property
    def urgent_until_s(self) -> float:
        """Requests that must be complete by then come before all others, on the engine's clock [s].
        Of the tenant that is asked."""
        ...

    def ask_next(self) -> bool:
        """No candidate fits: the next candidates are another tenant's. False: there is none
        that may go before this one."""
        ...


class Ended(NamedTuple):
    """A request that has ended. num_tokens: of its output."""

    rid: str
    request_class: RequestClass
    num_tokens: int


class View(Protocol):
    """Valid during one call of `plan`. Nothing reached through it may be changed, and looking
    changes nothing: neither the cache nor any order depends on what was looked at.

    Reading is O(1) per request, so a plan costs what it reads, however many requests wait.
    """

    @property
    def now_s(self) -> float: ...

    @property
    def start_s(self) -> float:
        """When the planned iteration is expected to begin: now, or at the predicted end of the one
        that is running [s]."""
        ...

    @property
    def mean_iteration_s(self) -> float:
        """Moving average of the measured time of an iteration; 0.0 before the first [s]."""
        ...

    @property
    def predictor(self) -> Predictor:
        """Predicts the time of an iteration."""
        ...

    @property
    def tokens_per_decode(self) -> float:
        """Mean number of tokens that an online request generates in an iteration without prefills:
        1.0 without speculative decoding. In a mixed iteration it is always one."""
        ...

    def length(self, request: Request) -> LengthEstimate:
        """The output that a request is expected to generate from now on. O(1)."""
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
    def memories(self) -> Sequence[Memory]:
        """Of each kind that the engine has beside `kv`. A plan copies what it changes
        (`Memory.fork`)."""
        ...

    @property
    def free_slots(self) -> int:
        """Requests that may be admitted before the running batch is full."""
        ...

    @property
    def running(self) -> Sequence[Request]:
        """Requests past their prefill: each decodes in every iteration."""
        ...

    def running_of(self, request_class: RequestClass) -> Decodes:
        """The requests of `running` of one class, in its order."""
        ...

    def outlook(self) -> Outlook:
        """`preemption_gain` and the possible ends of each running request, in their order; much
        cheaper than asking about each."""
        ...

    def longest_left(self, request_class: RequestClass) -> int:
        """The largest upper estimate (`LengthEstimate.upper`) of the running requests of a class;
        0: none runs. Much cheaper than asking about each."""
        ...

    def progress(self) -> Progress:
        """Of the running requests, in their order. O(1)."""
        ...

    @property
    def unfinished(self) -> Sequence[Request]:
        """Requests in the middle of their prefill, at most `EngineCaps.max_unfinished_prefills`."""
        ...

    def waiting(self, rid: str) -> Request | None:
        """The request of this id, if it waits. O(1)."""
        ...

    def running_named(self, rids: Collection[str]) -> Mapping[str, Request]:
        """The running requests among these ids. O(ids)."""
        ...

    def cannot_pause(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Of these running requests, those whose decode cannot pause for an iteration
        (`Plan.paused`)."""
        ...

    def why_blocked(self, request: Request) -> SkipReason | None:
        """Why this waiting request cannot be admitted now, whatever the headroom; None: it can.

        engine_refused: the engine refused it for a reason that no plan knows (for example an
        adapter that cannot be loaded), and it is backing off."""
        ...

    @property
    def online(self) -> Iterable[Request]:
        """Waiting online requests, oldest first."""
        ...

    def offline_order(self) -> OfflineOrder:
        """A pass over the waiting offline requests; each call begins at the front."""
        ...

    @property
    def num_offline(self) -> int:
        """Number of waiting offline requests."""
        ...

    @property
    def num_behind(self) -> int:
        """Offline requests that are still to come, as far as their senders say."""
        ...

    @property
    def offline_limits(self) -> OfflineLimits: ...

    def match(self, request: Request) -> Match:
        """The cached head of a waiting request. O(depth). Does not change what is evicted next."""
        ...

    @property
    def recompute_debt_s(self) -> float:
        """Device time spent on recomputing preempted requests beyond its budget [s]; 0.0: within
        the budget."""
        ...

    @property
    def tolerance_headroom(self) -> ToleranceHeadroom | None:
        """None: the targets alone count."""
        ...

    @property
    def others(self) -> OtherRanks:
        """Ranks that step together with this one; `NO_OTHERS` without DP attention."""
        ...

    def reserve_of(self, request: Request) -> int:
        """Tokens of `KvState.reserved` for this running request. Negative if it has taken more of
        what is set aside for another (`Plan.loans`) than is set aside for itself."""
        ...

    def promised(self, request: Request) -> int | None:
        """Output tokens, generated ones included, for which a plan has set KV aside; None: the
        engine's rule holds."""
        ...

    def num_common(self, request: Request, other: Request, least: int) -> int:
        """Tokens with which both begin and whose KV they can share; 0 if fewer than `least`.
        O(tokens); O(1) for most that have fewer."""
        ...

    def num_shared(self, request: Request) -> int:
        """Of the KV that the next decode of a running request attends to, tokens that are read for
        another of its class anyway. Asked only where `EngineCaps.shared_prefix` holds. O(1)."""
        ...

    def preemption_gain(self, request: Request) -> int:
        """KV tokens that become free or evictable if this request is preempted, without its
        reserve and without tokens that another running request holds too. O(depth)."""
        ...
