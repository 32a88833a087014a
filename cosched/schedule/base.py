"""What a policy is, and what it says of the time of an iteration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from cosched.core.batch import IntArray
from cosched.core.caps import EngineCaps
from cosched.core.group import RankNeeds
from cosched.core.plan import Plan
from cosched.core.request import Slo
from cosched.core.tiers import Tier
from cosched.core.view import View
from cosched.errors import ConfigError

__all__ = [
    "UNLIMITED",
    "Budgets",
    "GroupPolicy",
    "Pace",
    "Policy",
    "PolicySettings",
    "State",
]

State = TypeVar("State")


class Budgets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the time of an iteration follows from the targets.

    aim            share of the TPOT target that offline work may use; the rest is for errors of the
                   predictor
    ttft_aim       share of the TTFT target that plans use for prefills; the rest is for errors of
                   the predictor
    burst          most iteration time with offline work in it beside online requests [TPOT targets]
    idle_share     most iteration time without online requests; for most policies of any iteration
                   with offline work [TTFT targets]
    crowded_share  share of the KV memory that online requests may hold before iterations with
                   offline work get shorter
    late_bound     wait after which `cosched` starts a late online request before all others [TTFT
                   targets]
    chat_pace      share of the batch's speed that `cosched` gives for the pace of chat; 0: none
    """

    aim: float = 0.995
    ttft_aim: float = 0.95
    burst: float = 1.5
    idle_share: float = 0.3
    crowded_share: float = 0.2
    late_bound: float = 120.0
    chat_pace: float = 0.02

    def __post_init__(self) -> None:
        for name, most in (("aim", 1.0), ("ttft_aim", 1.0), ("burst", 100.0), ("idle_share", 1.0)):
            value = getattr(self, name)
            if not 0 < value <= most:
                raise ConfigError(f"{name} {value} is not above 0 and up to {most:g}")
        for name in ("crowded_share", "chat_pace"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"{name} {value} is not from 0 to below 1")
        if not 0 < self.late_bound < float("inf"):
            raise ConfigError(f"late_bound {self.late_bound} is not a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """What a policy is built with.

    caps              limits of the engine
    slo               targets of online requests that name none of their own; none of them is None
                      but the deadline
    latency_budget_s  most predicted time of an iteration with online requests [s]; None: from their
                      deadlines. Without online requests `Budgets.idle_share` holds
    budgets           how the deadlines bound an iteration
    offline_rate      most offline requests admitted per second [1/s]; None: any number
    tiers             of online requests, the highest first; empty: all are equal
    own               the section of the configuration that is this policy's (`PolicyEntry.section`)
    """

    caps: EngineCaps
    slo: Slo
    latency_budget_s: float | None = None
    budgets: Budgets = field(default_factory=Budgets)
    offline_rate: float | None = None
    tiers: tuple[Tier, ...] = ()
    own: msgspec.Struct | None = None


class Policy(Protocol[State]):
    """Pure: no clock, no randomness, no torch, no sglang, and it changes nothing, not even itself.

    The same object plans in production and under the virtual clock.
    """

    initial: State
    """State for the first plan: an immutable value, None for a policy without state."""

    def plan(self, view: View, state: State) -> tuple[Plan, State]:
        """The next iteration, and the state for the plan after it. Called once per iteration.

        Its inputs are `view`, `state` (the state that it returned with the last plan that was not
        discarded) and the settings that it was built with: equal inputs give equal plans.
        """
        ...


class GroupPolicy(Policy[State], Protocol[State]):
    """A policy for ranks that step together (DP attention). Each rank has plans of its own, within
    the time that all of them leave (`View.others`)."""

    def needs(self, view: View) -> RankNeeds:
        """What online requests of this rank need of the next iteration. The ranks exchange it
        before each plan; of `view.others` only `alone_s` and `fills` are known here, from the plan
        before."""
        ...


class Pace(Protocol):
    """How much of the time of an iteration each phase may take, given what the builder's ledger
    has already. It changes nothing in that.

    admits  offline requests may be admitted although decodes of others pause
    """

    admits: bool

    def begin_offline(self) -> None:
        """All online work is in the ledger: from now on it is asked about offline work."""
        ...

    def online_tokens(self, num_cached: int, limit: int, *, encoded: int = 0) -> int:
        """Most prompt tokens, up to `limit`, of an online prefill that fit. encoded: tokens of its
        media that the encoder computes beside them."""
        ...

    def offline_tokens(
        self, num_cached: int, limit: int, *, encoded: int = 0, is_last: bool = False
    ) -> int:
        """The same for an offline prefill; it may leave time for later iterations. is_last: no
        request joins the batch after it."""
        ...

    def has_offline_time(self) -> bool:
        """False: not one token of any offline prefill fits."""
        ...

    def decodes_fit(self, contexts: IntArray) -> bool:
        """All these offline decodes fit; context: tokens attended to."""
        ...

    def offline_decodes(self, contexts: IntArray) -> int:
        """How many of the first offline decodes fit."""
        ...


class Unlimited:
    """No limit on time."""

    admits = False

    def begin_offline(self) -> None: ...

    def online_tokens(self, num_cached: int, limit: int, *, encoded: int = 0) -> int:
        return limit

    def offline_tokens(
        self, num_cached: int, limit: int, *, encoded: int = 0, is_last: bool = False
    ) -> int:
        return limit

    def has_offline_time(self) -> bool:
        return True

    def decodes_fit(self, contexts: IntArray) -> bool:
        return True

    def offline_decodes(self, contexts: IntArray) -> int:
        return len(contexts)


UNLIMITED: Pace = Unlimited()
