"""A plan: what one iteration shall run. Decisions are data; the engine executes, never decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["EMPTY_PLAN", "Plan", "PreemptMode", "Preemption", "SkipReason"]


class PreemptMode(Enum):
    """How a running request is stopped.

    RECOMPUTE  its KV is freed; resuming prefills everything again
    KEEP_KV    its KV stays in the radix tree as evictable nodes; resuming matches it there
    CHECKPOINT its KV is kept in host memory too (HiCache)
    """

    RECOMPUTE = "recompute"
    KEEP_KV = "keep_kv"
    CHECKPOINT = "checkpoint"


class SkipReason(Enum):
    """Why a request that was looked at does not run in this iteration."""

    TOKEN_BUDGET = "token_budget"
    MEMORY_BUDGET = "memory_budget"
    REQUEST_SLOTS = "request_slots"
    UNFINISHED_PREFILL = "unfinished_prefill"
    LATENCY_BUDGET = "latency_budget"
    RATE_LIMIT = "rate_limit"
    ADAPTERS = "adapters"
    DECODES_DUE = "decodes_due"
    OPERATOR_LIMIT = "operator_limit"
    ENGINE_REFUSED = "engine_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    rid: str
    mode: PreemptMode = PreemptMode.KEEP_KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One iteration.

    prefill    rid -> new prompt tokens to compute, in the order they are admitted. Requests that
               wait and the unfinished prefill may stand here; where others do, the unfinished one
               must, or be stopped
    hold       running requests that sit out this iteration with their KV kept. The others decode
               one token each, unless the batch cannot be mixed and `prefill` is not empty: then
               nobody decodes
    preempt    running requests or unfinished prefills to stop before anything is admitted
    skipped    rid -> why a request that was looked at does not run; for the decision log
    limits     phase -> most time it was given [s], where the policy limits it; for the decision log
    """

    prefill: Mapping[str, int] = field(default_factory=dict)
    hold: frozenset[str] = frozenset()
    preempt: tuple[Preemption, ...] = ()
    skipped: Mapping[str, SkipReason] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(self.prefill.values())


EMPTY_PLAN = Plan()
