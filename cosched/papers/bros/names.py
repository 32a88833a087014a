"""BROS's policies by name (docs/policies/bros.md)."""

from __future__ import annotations

from functools import partial
from typing import Any

from cosched.core.plan import PreemptMode
from cosched.papers.bros.policy import BrosOptions, BrosPolicy
from cosched.papers.bros.round_robin import RoundRobinPolicy
from cosched.pool.prefix_pool import PoolConfig
from cosched.schedule.entry import MIXED_CHUNK, PolicyEntry


def _bros(
    name: str, summary: str, source: str, *, predictor: str | None = None, **options: Any
) -> PolicyEntry:
    return PolicyEntry(
        name=name,
        summary=summary,
        source=source,
        make=partial(BrosPolicy, options=BrosOptions(**options)),
        # First come, first served, but it knows for which preempted requests KV is kept.
        pool=PoolConfig(utility_ratio=0.0),
        timed=True,
        predictor=predictor,
        server_flags=MIXED_CHUNK,
    )


ENTRIES = (
    _bros(
        "bros",
        "online by time left, offline in what is left or in their place",
        "BROS §4, Algorithm 1",
    ),
    _bros(
        "bros-late-last",
        "bros with online requests that are late behind those in time",
        "cosched (the order that BROS does not mean)",
        late_last=True,
    ),
    _bros(
        "bros-literal-cost",
        "bros with its own cost model, where a profile is given",
        "BROS §4.1 (cost model C)",
        predictor="bros",
    ),
    _bros(
        "bros-rt",
        "bros with offline work only while nothing is online",
        "BROS §7.3 (Fig. 12)",
        beside=False,
    ),
    _bros(
        "bros-nobi",
        "bros that frees all KV of what it preempts",
        "BROS §7.4.1 (No Bi-cache)",
        stop=PreemptMode.RECOMPUTE,
    ),
    PolicyEntry(
        name="bros-rr",
        summary="round robin: iterations of online and of offline requests in rotation",
        source="BROS §2.2, §7 (baseline RR)",
        make=lambda _: RoundRobinPolicy(),
        server_flags=MIXED_CHUNK,
    ),
)
