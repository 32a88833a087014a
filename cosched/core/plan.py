"""A plan: what one iteration shall run. Decisions are data; the engine executes, never decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from cosched.core.request import LateReason

__all__ = ["EMPTY_PLAN", "Hosting", "Plan", "PreemptMode", "Preemption", "SkipReason"]


class PreemptMode(Enum):
    """How a running request is stopped.

    RECOMPUTE  its KV is freed; resuming prefills everything again
    KEEP_KV    its KV stays in the radix tree as evictable nodes; resuming matches it there
    CHECKPOINT as KEEP_KV, and it is copied to host memory while others run (HiCache;
               `EngineCaps.host_tokens`)
    """

    RECOMPUTE = "recompute"
    KEEP_KV = "keep_kv"
    CHECKPOINT = "checkpoint"


class SkipReason(Enum):
    """Why a request that was looked at does not run in this iteration.

    The engine's limits: token_budget (prompt tokens of an iteration), memory_budget, request_slots,
    unfinished_prefill (another one's is under way, and this one does not fit whole), adapters,
    decodes_due (the last iteration left the decodes out), engine_refused (a moment ago), restoring
    (its KV is on its way from host memory).
    The policy's: latency_budget (time), batch_size (requests at once), rate_limit (requests per
    second), online_reserve, eviction_loss and recompute_debt (KV memory; docs/kv_memory.md).
    The operator's: operator_limit.
    """

    TOKEN_BUDGET = "token_budget"
    MEMORY_BUDGET = "memory_budget"
    REQUEST_SLOTS = "request_slots"
    UNFINISHED_PREFILL = "unfinished_prefill"
    LATENCY_BUDGET = "latency_budget"
    BATCH_SIZE = "batch_size"
    RATE_LIMIT = "rate_limit"
    ADAPTERS = "adapters"
    DECODES_DUE = "decodes_due"
    OPERATOR_LIMIT = "operator_limit"
    ENGINE_REFUSED = "engine_refused"
    RESTORING = "restoring"
    ONLINE_RESERVE = "online_reserve"
    EVICTION_LOSS = "eviction_loss"
    RECOMPUTE_DEBT = "recompute_debt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    rid: str
    mode: PreemptMode = PreemptMode.KEEP_KV


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """A request that grows into KV promised to another one (EcoServe §3.4).

    host    rid of the other one
    offset  output tokens of the host, generated ones included, before the part that it lends: the
            guest is to end before the host has so many
    """

    host: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One iteration. All that the engine is to do stands here; what it cannot do is refused whole
    (`cosched.schedule.validate`), never dropped or half done.

    prefill     rid -> new prompt tokens to compute, in the order they are admitted. Requests that
                wait and the unfinished prefill may stand here; where others do, the unfinished one
                must, or be stopped
    decodes     the running requests that are neither held nor stopped decode one token each. False:
                none does, which is how an iteration is where prefill and decode cannot share it
    hold        running requests that sit out this iteration with their KV kept
    preempt     running requests or unfinished prefills to stop before anything is admitted
    promise     rid -> output tokens, generated ones included, for which KV is set aside; kept until
                changed. Requests that are not named: the engine's own rule
                (`EngineCaps.promises`)
    hosts       rid of a guest -> where it is hosted, both running: what it generates from now on
                counts as set aside for its host already (`EngineCaps.hosts`). Kept until the
                guest is promised anew, or either is stopped or over
    late        online requests of which no plan before this one said so -> why their TTFT target is
                out of reach; they are told if they asked, and counted
    skipped     rid -> why a request that was looked at does not run; for the decision log
    limits      phase -> most time it was given [s], where the policy limits it; for the decision
                log
    """

    prefill: Mapping[str, int] = field(default_factory=dict)
    decodes: bool = True
    hold: frozenset[str] = frozenset()
    preempt: tuple[Preemption, ...] = ()
    promise: Mapping[str, int] = field(default_factory=dict)
    hosts: Mapping[str, Hosting] = field(default_factory=dict)
    late: Mapping[str, LateReason] = field(default_factory=dict)
    skipped: Mapping[str, SkipReason] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(self.prefill.values())


EMPTY_PLAN = Plan()
