"""A plan: what one iteration runs. Decisions are data; the engine executes them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

import msgspec

from cosched.core.request import LateReason

__all__ = ["EMPTY_PLAN", "Loan", "Plan", "PreemptMode", "Preemption", "SkipReason"]


class PreemptMode(Enum):
    """How a request is preempted.

    RECOMPUTE  its KV is freed; resuming prefills everything again
    KEEP_KV    its KV stays in the radix tree as evictable nodes, where resuming finds it
    CHECKPOINT as KEEP_KV, and it is copied to host memory while others run (HiCache;
               `EngineCaps.host_tokens`)
    """

    RECOMPUTE = "recompute"
    KEEP_KV = "keep_kv"
    CHECKPOINT = "checkpoint"


class SkipReason(Enum):
    """Why a request that the policy looked at does not run in this iteration.

    The engine's limits: token_budget (prompt tokens of an iteration), memory_budget, request_slots,
    unfinished_prefill (another prefill is unfinished, and this one does not fit whole), adapters,
    decodes_due (the last iteration left the decodes out), engine_refused (it is backing off),
    shared_prefix (another request computes its prefix, which is in the cache soon).
    The policy's: latency_budget (time), batch_size (requests at once), rate_limit (requests per
    second), higher_tier (a higher tier needs the iteration), online_reserve and recompute_debt (KV
    memory; docs/architecture.md).
    The operator's: operator_limit.
    """

    TOKEN_BUDGET = "token_budget"
    MEMORY_BUDGET = "memory_budget"
    REQUEST_SLOTS = "request_slots"
    UNFINISHED_PREFILL = "unfinished_prefill"
    LATENCY_BUDGET = "latency_budget"
    BATCH_SIZE = "batch_size"
    RATE_LIMIT = "rate_limit"
    HIGHER_TIER = "higher_tier"
    ADAPTERS = "adapters"
    DECODES_DUE = "decodes_due"
    OPERATOR_LIMIT = "operator_limit"
    ENGINE_REFUSED = "engine_refused"
    SHARED_PREFIX = "shared_prefix"
    ONLINE_RESERVE = "online_reserve"
    RECOMPUTE_DEBT = "recompute_debt"


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    rid: str
    mode: PreemptMode = PreemptMode.KEEP_KV


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """KV that is promised to one request, which needs it only later, for another (EcoServe §3.4).

    lender  rid of the first one
    offset  its output tokens, generated ones included, before the part that the borrower uses: the
            borrower should end before the lender reaches it
    """

    lender: str
    offset: int


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that the engine does in one iteration. A plan that the engine cannot run is
    refused as a whole (`cosched.schedule.validate`).

    Other ranks and the decision log get all of it in one form, `to_json`: a field that is added
    here is in both. `msgspec.structs.replace` changes a copy.

    prefill     rid -> new prompt tokens to compute, in the order of admission: waiting requests and
                the unfinished prefill. If it names any, it must name the unfinished one or preempt
                it
    decodes     running requests that are neither paused nor preempted decode one token each. False:
                none does, as where prefill and decode cannot share an iteration
    paused      running requests whose decode pauses in this iteration, with their KV kept
    preempt     running requests and unfinished prefills to preempt before others are admitted
    promise     rid -> output tokens, generated ones included, for which KV is set aside until a
                plan changes it. Other requests: the engine's own rule (`EngineCaps.promises`)
    loans       rid of a borrower -> its lender, both running: the KV of its next tokens is already
                set aside for its lender, until the borrower is promised KV again, or either is
                preempted or ends
    late        online requests -> why their TTFT target is out of reach, where no plan before this
                one said so; reported to the client if it asked, and counted
    skipped     rid -> why a request that the policy looked at does not run; for the decision log
    limits      phase -> time limit [s], where the policy has one; for the decision log
    """

    prefill: Mapping[str, int] = {}
    decodes: bool = True
    paused: frozenset[str] = frozenset()
    preempt: tuple[Preemption, ...] = ()
    promise: Mapping[str, int] = {}
    loans: Mapping[str, Loan] = {}
    late: Mapping[str, LateReason] = {}
    skipped: Mapping[str, SkipReason] = {}
    limits: Mapping[str, float] = {}

    def to_json(self) -> msgspec.Raw:
        """Without empty fields. The same plan gives the same bytes: mappings keep their order, and
        `paused` is sorted."""
        plan = self
        if self.paused:
            in_order = cast("frozenset[str]", sorted(self.paused))
            plan = msgspec.structs.replace(self, paused=in_order)
        return msgspec.Raw(_encode(plan))

    @classmethod
    def from_json(cls, data: msgspec.Raw) -> Plan:
        return _decode(data)


def _plain(number: Any) -> Any:
    """A policy may count with numpy."""
    return number.item()


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
_decode = msgspec.json.Decoder(Plan).decode

EMPTY_PLAN = Plan()
