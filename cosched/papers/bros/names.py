"""BROS's policies by name (docs/policies.md)."""

from __future__ import annotations

from functools import partial

from cosched.core.plan import PreemptMode
from cosched.papers.bros.policy import BrosOptions, BrosPolicy
from cosched.papers.bros.round_robin import RoundRobinPolicy
from cosched.pool.prefix_pool import PoolConfig
from cosched.schedule.entry import MIXED_CHUNK, PolicyEntry

_BROS = {
    "bros": (
        "online by time left, offline in the rest or in exchange",
        "BROS §4, Algorithm 1",
        BrosOptions(),
    ),
    "bros-late-last": (
        "bros with online requests that are late behind those in time",
        "cosched (the order that BROS does not mean)",
        BrosOptions(late_last=True),
    ),
    "bros-literal-cost": (
        "bros with its own cost model, which needs a profile",
        "BROS §4.1 (cost model C)",
        BrosOptions(),
    ),
    "bros-rt": (
        "bros with offline work only while nothing is online",
        "BROS §7.3 (Fig. 12)",
        BrosOptions(beside=False),
    ),
    "bros-nobi": (
        "bros that frees all KV of what it preempts",
        "BROS §7.4.1 (No Bi-cache)",
        BrosOptions(stop=PreemptMode.RECOMPUTE),
    ),
}
ENTRIES = (
    *(
        PolicyEntry(
            name=name,
            summary=summary,
            source=source,
            make=partial(BrosPolicy, options=options),
            # First come, first served, but it knows for which preempted requests KV is kept.
            pool=PoolConfig(utility_ratio=0.0),
            timed=True,
            section="bros",
            predictor="bros" if name == "bros-literal-cost" else None,
            server_flags=MIXED_CHUNK,
        )
        for name, (summary, source, options) in _BROS.items()
    ),
    PolicyEntry(
        name="bros-rr",
        summary="round robin: iterations of online and of offline requests in rotation",
        source="BROS §2.2, §7 (baseline RR)",
        make=lambda _: RoundRobinPolicy(),
        server_flags=MIXED_CHUNK,
    ),
)
