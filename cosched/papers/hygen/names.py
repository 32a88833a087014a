"""HyGen's policies by name (docs/policies.md)."""

from __future__ import annotations

from functools import partial
from typing import Any

from cosched.papers.hygen.policy import HygenPolicy
from cosched.papers.hygen.sarathi import SarathiPolicy, ThrottledPolicy
from cosched.papers.hygen.token_counters import VtcPolicy
from cosched.pool.prefix_pool import PoolConfig
from cosched.schedule.base import Policy, PolicySettings
from cosched.schedule.entry import MIXED_CHUNK, PolicyEntry

_entry = partial(PolicyEntry, server_flags=MIXED_CHUNK)


def _sarathi(settings: PolicySettings) -> Policy[Any]:
    return SarathiPolicy()


def _throttled(settings: PolicySettings) -> Policy[Any]:
    if settings.offline_rate is None:
        return SarathiPolicy()
    return ThrottledPolicy(settings.offline_rate)


ENTRIES = (
    _entry(
        name="sarathi",
        summary="Sarathi++: online first, then offline, in a fixed token budget",
        source="HyGen §5.1 (baseline)",
        make=_sarathi,
    ),
    _entry(
        name="hygen-throttled",
        summary="sarathi that admits offline requests at a fixed rate (offline_rate)",
        source="HyGen §5.1 (baseline HyGen*)",
        make=_throttled,
        timed=True,
    ),
    _entry(
        name="hygen",
        summary="online first, then offline in prefix order, in a budget of predicted time",
        source="HyGen §4, Algorithms 1 and 3",
        make=HygenPolicy,
        groups=True,
        pool=PoolConfig(),
        timed=True,
    ),
    _entry(
        name="hygen-fcfs",
        summary="hygen with the pool in the order of arrival",
        source="HyGen §5 (ablation: without prefix sharing maximization)",
        make=HygenPolicy,
        groups=True,
        timed=True,
    ),
    _entry(
        name="hygen-literal",
        summary="hygen with its own predictor of iteration times, which needs a profile",
        source="HyGen §4.2 (Eq. 1)",
        make=HygenPolicy,
        groups=True,
        pool=PoolConfig(),
        timed=True,
        predictor="hygen",
    ),
    _entry(
        name="hygen-vtc",
        summary="hygen that is fair among the tenants of online requests",
        source="HyGen §4.1 (Virtual Token Counter)",
        make=VtcPolicy,
        groups=True,
        pool=PoolConfig(),
        timed=True,
    ),
)
