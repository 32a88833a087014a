"""Echo's policies by name: the ladder of §7.1 (docs/policies.md)."""

from __future__ import annotations

from functools import partial

from cosched.papers.echo.policy import EchoPolicy
from cosched.papers.hygen.names import sarathi
from cosched.papers.hygen.policy import HygenPolicy
from cosched.pool.prefix_pool import PoolConfig
from cosched.schedule.entry import MIXED_CHUNK, PolicyEntry

_entry = partial(PolicyEntry, server_flags=MIXED_CHUNK)

ENTRIES = (
    _entry(
        name="echo-bs",
        summary="Echo's base: online first, then offline in the order of arrival; no SLO awareness",
        source="Echo §7.1 (BS)",
        make=sarathi,
    ),
    _entry(
        name="echo-bs+e",
        summary="echo-bs in a budget of predicted time, from the tightest online deadline",
        source="Echo §7.1 (BS+E)",
        make=HygenPolicy,
        timed=True,
    ),
    _entry(
        name="echo-bs+e+s",
        summary="echo-bs+e that admits offline requests by benefit per predicted second",
        source="Echo §7.1 (BS+E+S)",
        make=EchoPolicy,
        pool=PoolConfig(num_buckets=4),
        timed=True,
    ),
    _entry(
        name="echo-bs+e+s+m",
        summary="Echo complete: echo-bs+e+s, and KV goes in the order that the paper gives",
        source="Echo §4.2, §7.1 (BS+E+S+M)",
        make=EchoPolicy,
        pool=PoolConfig(num_buckets=4),
        eviction="echo",
        timed=True,
    ),
)
