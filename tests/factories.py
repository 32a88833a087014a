"""Hand-made requests and views for tests of pure code."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cosched.core.caps import EngineCaps
from cosched.core.estimates import LengthEstimate, Predictor
from cosched.core.group import NO_OTHERS, OtherRanks
from cosched.core.kv_state import KvState, Match
from cosched.core.memories import Memory
from cosched.core.plan import SkipReason
from cosched.core.request import PLAIN, LateReason, Request, RequestClass, Slo, Traits
from cosched.core.view import (
    BatchRules,
    Decodes,
    Ended,
    OfflineLimits,
    Outlook,
    Progress,
    ToleranceHeadroom,
    View,
)
from cosched.memory.host_memory import HostMemory
from cosched.memory.kv_memory import promised_tokens
from cosched.memory.state_memory import StateMemory
from cosched.memory.window_memory import WindowMemory, WindowPool
from cosched.pool.pool import ArrivalOrder

_seq = itertools.count()


@dataclass(frozen=True, kw_only=True)
class FakeRequest:
    rid: str
    request_class: RequestClass = RequestClass.ONLINE
    slo: Slo = field(default_factory=Slo)
    tier: int = 0
    tenant: str = ""
    traits: Traits = PLAIN
    arrival_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_preemptions: int = 0
    late: LateReason | None = None
    arrival_seq: int = field(default_factory=lambda: next(_seq))
    num_prompt_tokens: int = 100
    num_output_tokens: int = 0
    max_new_tokens: int = 10
    num_computed_tokens: int = 0
    num_prefix_tokens: int = 0
    num_own_tokens: int = 0
    token_ids: Sequence[int] = ()
    """For views whose offline requests wait in a real pool."""
    prefix_key: Hashable = None


def online(rid: str, num_prompt_tokens: int = 100, **fields) -> FakeRequest:
    return FakeRequest(rid=rid, num_prompt_tokens=num_prompt_tokens, **fields)


def offline(rid: str, num_prompt_tokens: int = 100, **fields) -> FakeRequest:
    return FakeRequest(
        rid=rid,
        num_prompt_tokens=num_prompt_tokens,
        request_class=RequestClass.OFFLINE,
        **fields,
    )


def decoding(request: FakeRequest, num_output_tokens: int = 1) -> FakeRequest:
    """The same request past its prefill."""
    return FakeRequest(
        **{
            **request.__dict__,
            "num_output_tokens": num_output_tokens,
            "num_computed_tokens": request.num_prompt_tokens + num_output_tokens - 1,
        }
    )


def prefilled(request: FakeRequest, num_computed_tokens: int) -> FakeRequest:
    """The same request in the middle of its prefill."""
    return FakeRequest(**{**request.__dict__, "num_computed_tokens": num_computed_tokens})


def make_caps(**limits) -> EngineCaps:
    return EngineCaps(
        **{
            "page_size": 1,
            "max_running_requests": 64,
            "max_chunk_tokens": 512,
            "max_prefill_tokens": 4096,
            **limits,
        }
    )


@dataclass(frozen=True)
class Linear(Predictor):
    """Seconds of an iteration, of each token in it, and of each token of its longest context."""

    fixed_s: float = 0.005
    token_s: float = 0.0001
    longest_s: float = 0.0

    @property
    def name(self):
        return "linear"

    def predict_s(self, totals):
        tokens = totals.num_new + totals.num_decodes
        longest = max(totals.max_prefill_context, totals.max_decode_context)
        return self.fixed_s + self.token_s * tokens + self.longest_s * longest if tokens else 0.0

    def describe(self):
        return {}


@dataclass(frozen=True)
class PerKv(Linear):
    """A decode takes time for each token of KV that is read for it."""

    def predict_s(self, totals):
        return 1e-6 * totals.decode_context + super().predict_s(totals)


def outlook_of(view: View) -> Outlook:
    """`View.outlook`, read from each request."""
    ends = [
        [n * r.traits.num_rows for n in view.length(r).ends_left(r.num_output_tokens)]
        for r in view.running
    ]
    most = max(map(len, ends), default=0)
    padded = [[0] * (most - len(of)) + of for of in ends]
    held = [view.preemption_gain(r) for r in view.running]
    return Outlook(held, [*map(list, zip(*padded, strict=True))])


def progress_of(view: View) -> Progress:
    """`View.progress`, read from each request."""
    running = view.running
    return Progress([r.num_output_tokens for r in running], [view.promised(r) for r in running])


@dataclass(kw_only=True)
class FakeView:
    """A view in which each running request owns all of its KV alone. offline: in the order of
    arrival, or a pool."""

    caps: EngineCaps = field(default_factory=make_caps)
    total_kv: int = 10_000
    evictable_kv: int = 0
    running: tuple[FakeRequest, ...] = ()
    unfinished: tuple[FakeRequest, ...] = ()
    online: Iterable[FakeRequest] = ()
    offline: Iterable[FakeRequest] = ()
    cached: Mapping[str, Match] = field(default_factory=dict)
    must_decode: bool = False
    barred: Collection[str] = ()
    now_s: float = 0.0
    start_s: float = 0.0
    mean_iteration_s: float = 0.0
    predictor: Predictor = field(default_factory=Linear)
    ended: Sequence[Ended] = ()
    unholdable: Collection[str] = ()
    states: int | None = None
    """State slots that are left."""
    checkpoints: Mapping[str, int] = field(default_factory=dict)
    tokens_per_decode: float = 1.0
    recompute_debt_s: float = 0.0
    tolerance_headroom: ToleranceHeadroom | None = None
    others: OtherRanks = NO_OTHERS
    kept: int = 0
    offline_in_sessions: int = 0
    host_free: int | None = None
    promises: Mapping[str, int] = field(default_factory=dict)
    shared: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, LengthEstimate] = field(default_factory=dict)
    windows: WindowPool | None = None
    offline_limits: OfflineLimits = field(default_factory=OfflineLimits)
    num_behind: int = 0

    @property
    def kv(self) -> KvState:
        held = sum(r.num_computed_tokens for r in (*self.running, *self.unfinished))
        return KvState(
            total=self.total_kv,
            free=self.total_kv - held - self.evictable_kv,
            evictable=self.evictable_kv,
            reserved=sum(map(self.reserve_of, self.running)),
            next_step=sum(
                self.caps.page_size * r.traits.num_rows
                for r in self.running
                if not r.num_computed_tokens % self.caps.page_size
            ),
            offline=sum(
                r.num_computed_tokens
                for r in (*self.running, *self.unfinished)
                if r.request_class is RequestClass.OFFLINE
            ),
            shared_offline=self.offline_in_sessions,
            kept=self.kept,
        )

    @property
    def rules(self) -> BatchRules:
        return BatchRules(
            mixed=self.caps.mixed_batches
            and all(r.traits.can_mix for r in (*self.running, *self.unfinished)),
            partial=self.caps.partial_decode,
            must_decode=self.must_decode,
        )

    def offline_order(self):
        if hasattr(self.offline, "order"):
            return self.offline.order()
        return ArrivalOrder(iter(self.offline))

    def waiting(self, rid: str) -> FakeRequest | None:
        return next((r for r in (*self.online, *self.offline) if r.rid == rid), None)

    def running_named(self, rids: Collection[str]) -> Mapping[str, FakeRequest]:
        return {r.rid: r for r in self.running if r.rid in rids}

    def cannot_pause(self, requests: Sequence[Request]) -> Sequence[Request]:
        return [r for r in requests if not self.rules.partial or r.rid in self.unholdable]

    def length(self, request: Request) -> LengthEstimate:
        most = request.max_new_tokens - request.num_output_tokens
        return self.lengths.get(request.rid, LengthEstimate(most, most))

    def promised(self, request: Request) -> int | None:
        return self.promises.get(request.rid)

    def why_blocked(self, request: Request) -> SkipReason | None:
        return SkipReason.ENGINE_REFUSED if request.rid in self.barred else None

    @property
    def num_offline(self) -> int:
        return sum(1 for _ in self.offline)

    @property
    def free_slots(self) -> int:
        return self.caps.max_running_requests - len(self.running) - len(self.unfinished)

    def running_of(self, request_class: RequestClass) -> Decodes:
        return Decodes.of([r for r in self.running if r.request_class is request_class])

    def outlook(self) -> Outlook:
        return outlook_of(self)

    def longest_left(self, request_class: RequestClass) -> int:
        requests = self.running_of(request_class).requests
        return max((self.length(r).upper for r in requests), default=0)

    def progress(self) -> Progress:
        return progress_of(self)

    def match(self, request: Request) -> Match:
        return self.cached.get(request.rid, Match(cached=0, evictable=0))

    def reserve_of(self, request: Request) -> int:
        if any(request.rid == r.rid for r in self.unfinished):
            return 0
        if request.rid in self.promises:
            num_left = max(self.promises[request.rid] - request.num_output_tokens, 0)
            return promised_tokens(num_left * request.traits.num_rows)
        return max(request.max_new_tokens - request.num_output_tokens, 0)

    def num_common(self, request: Request, other: Request, least: int) -> int:
        pairs = zip(request.token_ids, other.token_ids, strict=False)
        num = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return num if num >= least else 0

    def num_shared(self, request: Request) -> int:
        return self.shared.get(request.rid, 0)

    def preemption_gain(self, request: Request) -> int:
        return request.num_computed_tokens

    @property
    def memories(self) -> list[Memory]:
        found: list[Memory] = []
        if self.states is not None:
            found.append(
                StateMemory(
                    self.states,
                    per_request=3,
                    held=1,
                    num_kept=lambda r: self.checkpoints.get(r.rid, r.num_computed_tokens),
                )
            )
        if self.windows is not None:
            found.append(WindowMemory(self, self.windows, FakeWindowReads(self.windows)))
        if self.host_free is not None:
            found.append(HostMemory(self.host_free))
        return found


@dataclass
class FakeWindowReads:
    """Each request holds a window, and takes the memory for its whole output."""

    pool: WindowPool

    def output(self, request: Request) -> int:
        return request.max_new_tokens - request.num_output_tokens

    def reserve_of(self, request: Request) -> int:
        return min(self.output(request), self.pool.window + self.pool.slack)

    def gain(self, request: Request) -> int:
        return min(request.num_computed_tokens, self.pool.window)
