"""EcoServe's policies and baselines by name (docs/policies.md)."""

from __future__ import annotations

from functools import partial

from cosched.core.plan import PreemptMode
from cosched.papers.ecoserve.coupled import Allocation, CoupledOptions, CoupledPolicy, Order
from cosched.papers.ecoserve.generation_plan import EcoOptions
from cosched.papers.ecoserve.policy import EcoServePolicy
from cosched.predict.length_estimator import LengthConfig
from cosched.schedule.entry import MIXED_CHUNK, MOST_FIT, PolicyEntry

_ECOSERVE = {
    "ecoserve-d": (
        "EcoServe's decoupling alone: prompts fill the compute, outputs of known length the memory",
        "EcoServe §4 (EcoServe-D, UnsyncDecoupled)",
        EcoOptions(synced=False, ordered=False, pipeline=False),
    ),
    "ecoserve-sd": (
        "ecoserve-d in groups of equal length",
        "EcoServe §4 (EcoServe-SD, SyncDecoupled)",
        EcoOptions(ordered=False, pipeline=False),
    ),
    "ecoserve-sdo": (
        "ecoserve-sd that orders prompts and outputs by deadline, KV and length",
        "EcoServe §4 (EcoServe-SDO)",
        EcoOptions(pipeline=False),
    ),
    "ecoserve": (
        "EcoServe complete: outputs of known length, in groups, nested in each other's memory",
        "EcoServe §3, Algorithm 1",
        EcoOptions(),
    ),
    "ecoserve-oracle": ("ecoserve that knows all lengths", "EcoServe §4 (Oracle)", EcoOptions()),
}
_COUPLED = {
    "eco-orca": (
        "first come, first served, 8 at once, KV set aside for all that they may generate",
        "EcoServe §2.1 (baseline ORCA)",
        CoupledOptions(allocation=Allocation.MAX, most_requests=8),
    ),
    "eco-srtf": (
        "expected to end first, preempting others; KV as eco-orca",
        "EcoServe §2.1 (baseline SRTF)",
        CoupledOptions(allocation=Allocation.MAX, order=Order.SHORTEST),
    ),
    "eco-fastserve": (
        "multi-level feedback queue with five levels, 8 at once; KV as eco-orca",
        "EcoServe §2.1 (baseline FastServe)",
        CoupledOptions(allocation=Allocation.MAX, order=Order.LEVELS, most_requests=8),
    ),
    "eco-vllm": (
        "first come, first served, KV block by block, prompts first, preemption by swapping",
        "EcoServe §2.1 (baseline vLLM)",
        CoupledOptions(
            allocation=Allocation.BLOCK, prefill_first=True, stop=PreemptMode.CHECKPOINT
        ),
    ),
    "eco-fastgen": (
        "first come, first served, KV block by block, chunks up to the target forward size",
        "EcoServe §2.1 (baseline FastGen)",
        CoupledOptions(allocation=Allocation.BLOCK, fills_forward=True, stop=PreemptMode.RECOMPUTE),
    ),
    "eco-multires": (
        "demand closest to the free compute and KV; KV for the expected length",
        "EcoServe §2.1 (MultiRes)",
        CoupledOptions(allocation=Allocation.EXACT, order=Order.DISTANCE, fills_forward=True),
    ),
    "eco-synccoupled": (
        "groups of equal expected length, new ones when one has ended; KV as eco-multires",
        "EcoServe §2.2 (SyncCoupled)",
        CoupledOptions(allocation=Allocation.EXACT, order=Order.GROUPS, fills_forward=True),
    ),
    "eco-syncfastgen": (
        "groups as eco-synccoupled, KV as eco-fastgen",
        "EcoServe §2.2 (SyncFastGen)",
        CoupledOptions(
            allocation=Allocation.BLOCK,
            order=Order.GROUPS,
            fills_forward=True,
            stop=PreemptMode.RECOMPUTE,
        ),
    ),
}
ENTRIES = (
    *(
        PolicyEntry(
            name=name,
            summary=summary,
            source=source,
            make=partial(EcoServePolicy, options=options),
            length=LengthConfig(mode="oracle") if name == "ecoserve-oracle" else MOST_FIT,
            timed=True,
            section="ecoserve",
            server_flags=MIXED_CHUNK,
        )
        for name, (summary, source, options) in _ECOSERVE.items()
    ),
    *(
        PolicyEntry(
            name=name,
            summary=summary,
            source=source,
            make=partial(CoupledPolicy, options=options),
            length=MOST_FIT,
            timed=options.fills_forward,  # the predictor gives the target forward size
            server_flags={} if options.prefill_first else MIXED_CHUNK,
        )
        for name, (summary, source, options) in _COUPLED.items()
    ),
)
