"""EcoServe's policies and baselines by name (docs/policies/ecoserve.md)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cosched.core.plan import PreemptMode
from cosched.papers.ecoserve.coupled import Allocation, CoupledOptions, CoupledPolicy, Order
from cosched.papers.ecoserve.policy import EcoServePolicy
from cosched.papers.ecoserve.work import EcoOptions
from cosched.predict.lengths import LengthConfig
from cosched.schedule.entry import MIXED_CHUNK, MOST_FIT, PolicyEntry


def _ecoserve(
    name: str,
    summary: str,
    source: str,
    *,
    length: LengthConfig = MOST_FIT,
    **options: bool,
) -> PolicyEntry:
    return PolicyEntry(
        name=name,
        summary=summary,
        source=source,
        make=partial(EcoServePolicy, options=EcoOptions(**options)),
        length=length,
        timed=True,
        server_flags=MIXED_CHUNK,
    )


def _coupled(
    name: str,
    summary: str,
    source: str,
    *,
    server_flags: Mapping[str, object] = MIXED_CHUNK,
    **options: Any,
) -> PolicyEntry:
    coupled = CoupledOptions(**options)
    return PolicyEntry(
        name=name,
        summary=summary,
        source=source,
        make=partial(CoupledPolicy, options=coupled),
        length=MOST_FIT,
        # The predictor gives the target forward size.
        timed=coupled.fills_forward,
        server_flags=server_flags,
    )


ENTRIES = (
    _ecoserve(
        "ecoserve-d",
        "EcoServe's decoupling alone: prompts fill the compute, outputs of known length the memory",
        "EcoServe §4 (EcoServe-D, UnsyncDecoupled)",
        synced=False,
        ordered=False,
        pipeline=False,
    ),
    _ecoserve(
        "ecoserve-sd",
        "ecoserve-d in groups of equal length",
        "EcoServe §4 (EcoServe-SD, SyncDecoupled)",
        ordered=False,
        pipeline=False,
    ),
    _ecoserve(
        "ecoserve-sdo",
        "ecoserve-sd that orders prompts and outputs by deadline, KV and length",
        "EcoServe §4 (EcoServe-SDO)",
        pipeline=False,
    ),
    _ecoserve(
        "ecoserve",
        "EcoServe complete: outputs of known length, in groups, nested in each other's memory",
        "EcoServe §3, Algorithm 1",
    ),
    _ecoserve(
        "ecoserve-oracle",
        "ecoserve that knows all lengths",
        "EcoServe §4 (Oracle)",
        length=LengthConfig(mode="oracle"),
    ),
    _coupled(
        "eco-orca",
        "first come, first served, 8 at once, KV set aside for all that they may generate",
        "EcoServe §2.1 (baseline ORCA)",
        allocation=Allocation.MAX,
        most_requests=8,
    ),
    _coupled(
        "eco-srtf",
        "expected to end first, preempting others; KV as eco-orca",
        "EcoServe §2.1 (baseline SRTF)",
        allocation=Allocation.MAX,
        order=Order.SHORTEST,
    ),
    _coupled(
        "eco-fastserve",
        "multi-level feedback queue with five levels, 8 at once; KV as eco-orca",
        "EcoServe §2.1 (baseline FastServe)",
        allocation=Allocation.MAX,
        order=Order.LEVELS,
        most_requests=8,
    ),
    _coupled(
        "eco-vllm",
        "first come, first served, KV block by block, prompts first, preemption by swapping",
        "EcoServe §2.1 (baseline vLLM)",
        allocation=Allocation.BLOCK,
        prefill_first=True,
        stop=PreemptMode.CHECKPOINT,
        server_flags={},
    ),
    _coupled(
        "eco-fastgen",
        "first come, first served, KV block by block, chunks up to the target forward size",
        "EcoServe §2.1 (baseline FastGen)",
        allocation=Allocation.BLOCK,
        fills_forward=True,
        stop=PreemptMode.RECOMPUTE,
    ),
    _coupled(
        "eco-multires",
        "demand closest to what is left of compute and KV; KV for the expected length",
        "EcoServe §2.1 (MultiRes)",
        allocation=Allocation.EXACT,
        order=Order.DISTANCE,
        fills_forward=True,
    ),
    _coupled(
        "eco-synccoupled",
        "groups of equal expected length, new ones when one has ended; KV as eco-multires",
        "EcoServe §2.2 (SyncCoupled)",
        allocation=Allocation.EXACT,
        order=Order.GROUPS,
        fills_forward=True,
    ),
    _coupled(
        "eco-syncfastgen",
        "groups as eco-synccoupled, KV as eco-fastgen",
        "EcoServe §2.2 (SyncFastGen)",
        allocation=Allocation.BLOCK,
        order=Order.GROUPS,
        fills_forward=True,
        stop=PreemptMode.RECOMPUTE,
    ),
)
