"""SGLang's `Req` and what cosched keeps of it."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from cosched.core.request import PLAIN, LateReason, RequestClass, Slo, Traits
from cosched.core.shares import share_path
from cosched.core.tiers import Tier, tier_rank, with_targets
from cosched.engine import port
from cosched.predict.cost_account import Payer
from cosched.predict.length_estimator import Belief
from cosched.wire import (
    BEHIND_KEY,
    NAME_KEY,
    OWNER_KEY,
    USAGE_KEY,
    Bounds,
    class_of_priority,
    server_params,
    slo_of_params,
)

_UNBOUNDED = Bounds()


class TrackedRequest:
    """Implements `cosched.core.request.Request` by reading the live `Req`: nothing to keep in step.

    What never changes (class, arrival, prompt, limit) is fixed when the request first comes; the
    object hangs on the `Req` as `req.cosched`, so it goes when that goes.
    """

    __slots__ = (
        "arrival_s",
        "arrival_seq",
        "device_s",
        "first_token_s",
        "has_penalties",
        "is_ended",
        "last_token_s",
        "late",
        "length",
        "loan",
        "max_new_tokens",
        "num_behind",
        "num_penalized",
        "num_prompt_tokens",
        "num_queued_tokens",
        "payer",
        "promised",
        "req",
        "request_class",
        "reserves_all",
        "rid",
        "row",
        "share_path",
        "slo",
        "tenant",
        "tier",
        "traits",
    )

    def __init__(
        self,
        req: Any,
        *,
        arrival_s: float,
        arrival_seq: int,
        bounds: Bounds = _UNBOUNDED,
        tiers: Sequence[Tier] = (),
    ) -> None:
        """bounds: the operator's, for its targets. tiers: of online requests, the highest first."""
        self.req = req
        self.rid: str = req.rid
        self.request_class: RequestClass = class_of_priority(req.priority)
        custom_params = getattr(req.sampling_params, "custom_params", None)
        # Here, and not where HTTP is read: requests come other ways too.
        self.slo: Slo = bounds.clamp(slo_of_params(custom_params))
        self.tier = 0
        if tiers and self.request_class is RequestClass.ONLINE:
            self.tier = tier_rank(tiers, req.priority)
            self.slo = with_targets(self.slo, tiers[self.tier])
        told = server_params(custom_params)
        self.tenant = str(told.get(NAME_KEY, ""))
        """``KEY/TENANT`` or ``KEY``, by the names of the configuration; empty: none is known."""
        self.share_path = share_path(self.tenant, str(told.get(OWNER_KEY, "")))
        self.num_behind = int(told.get(BEHIND_KEY, 0))
        """Of a line of a batch: lines that come after it."""
        self.payer = Payer(self.tenant, self.request_class)
        self.device_s = 0.0
        """What it has cost (`cosched.predict.cost_account`)."""
        if told.get(USAGE_KEY):
            port.tell_client_at_end(req, USAGE_KEY, lambda: round(self.device_s, 6))
        self.num_prompt_tokens: int = len(req.origin_input_ids)
        self.max_new_tokens = int(req.sampling_params.max_new_tokens)
        self.arrival_s = arrival_s
        self.arrival_seq = arrival_seq
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.late: LateReason | None = None
        self.is_ended = False
        """Its end is known."""
        self.traits: Traits = _traits_of(req)
        self.reserves_all = port.reserves_whole_output(req)
        """The engine reserves its whole output, not a share of it."""
        self.num_penalized = 0
        """Generated tokens that its penalties have counted (`cosched.engine.port.penalties`)."""
        self.promised: int | None = None
        """Output tokens, generated ones included, for which a plan has set KV aside; None: none
        has."""
        self.loan: tuple[TrackedRequest, int] | None = None
        """Into whose promised KV it grows, and the number of preemptions of both at that time;
        None: no plan says so, or another has set KV aside for it since."""
        self.has_penalties = port.has_penalties(req)
        self.num_queued_tokens = 0
        """Its length when it was last queued, part of the queue's total."""
        self.row: int | None = None
        """In the table of running requests (`cosched.engine.running_table`); None: none."""
        self.length: Belief | None = None
        """What `cosched.engine.reply_lengths` believes of its output, since it was first asked."""
        req.cosched = self

    @classmethod
    def of(cls, req: Any) -> TrackedRequest | None:
        """That of a `Req`; None: cosched has not seen it."""
        tracked: TrackedRequest | None = getattr(req, "cosched", None)
        return tracked

    @property
    def num_output_tokens(self) -> int:
        return len(self.req.output_ids)

    @property
    def num_prefix_tokens(self) -> int:
        return port.num_prefix(self.req)

    @property
    def num_own_tokens(self) -> int:
        return port.num_own(self.req)

    @property
    def num_allocated_tokens(self) -> int:
        return port.num_allocated(self.req)

    @property
    def num_preemptions(self) -> int:
        return port.num_retractions(self.req)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Plans cannot preempt it meanwhile."""
        traits, self.traits = self.traits, replace(self.traits, can_preempt=False)
        try:
            yield
        finally:
            self.traits = traits

    def promise(self, num_tokens: int) -> None:
        """A plan sets KV aside for `num_tokens` output tokens, generated ones included."""
        self.promised = num_tokens
        self.loan = None

    def borrow(self, lender: TrackedRequest) -> None:
        """What it generates from now on takes KV that is promised to another one."""
        self.promised = self.num_output_tokens
        self.loan = lender, self.num_preemptions + lender.num_preemptions

    @property
    def lender(self) -> TrackedRequest | None:
        """The request into whose promised KV it grows beyond its own promise; None: there is none,
        or either has been preempted since."""
        if self.loan is None:
            return None
        lender, num_stops = self.loan
        return lender if self.num_preemptions + lender.num_preemptions == num_stops else None

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and generated tokens: what a prefix of it may be shared of. Not to be written."""
        return port.token_ids(self.req)

    @property
    def prefix_key(self) -> Hashable:
        """Requests share nothing unless these are equal."""
        return port.prefix_key(self.req)

    @property
    def num_computed_tokens(self) -> int:
        return port.num_committed(self.req)

    def __repr__(self) -> str:
        return f"TrackedRequest({self.rid!r}, {self.request_class.value}, seq={self.arrival_seq})"


def _traits_of(req: Any) -> Traits:
    traits = port.traits_of(req)
    return PLAIN if traits == PLAIN else traits


def num_cached(tree_cache: Any, request: TrackedRequest) -> int:
    """Tokens at the head of a waiting request whose KV is in the radix tree; changes nothing in
    it."""
    return port.peek(tree_cache, request.req).num_tokens
