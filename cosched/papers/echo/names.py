"""Echo's policies by name: the ladder of §7.1 (docs/policies.md)."""

from __future__ import annotations

from functools import partial

from cosched.memory.config import KvConfig
from cosched.papers.echo.policy import EchoPolicy, EstimatingPolicy, RegularEchoPolicy
from cosched.papers.hygen.sarathi import SarathiPolicy
from cosched.pool.prefix_pool import PoolConfig
from cosched.schedule.entry import MIXED_CHUNK, PolicyEntry
from cosched.schedule.phases import Steps

_entry = partial(PolicyEntry, server_flags=MIXED_CHUNK)

ENTRIES = (
    _entry(
        name="echo-bs",
        summary="Echo's base: online first, then offline in the order of arrival; no SLO awareness",
        source="Echo §7.1 (BS)",
        make=lambda _: SarathiPolicy(Steps()),
    ),
    _entry(
        name="echo-bs+e",
        summary="echo-bs in a budget of predicted time, from the tightest online deadline",
        source="Echo §7.1 (BS+E)",
        make=EstimatingPolicy,
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
        summary="Echo complete: echo-bs+e+s, and KV is evicted and kept as the paper says",
        source="Echo §4.2, §5.3, §7.1 (BS+E+S+M)",
        make=EchoPolicy,
        pool=PoolConfig(num_buckets=4),
        kv=KvConfig(eviction="echo", reservation="echo"),
        timed=True,
    ),
    _entry(
        name="echo-regular",
        summary="Echo complete, with candidates of about the lengths of the current batch",
        source="Echo §6 (the appropriate bucket based on the current batch)",
        make=RegularEchoPolicy,
        pool=PoolConfig(num_buckets=4),
        kv=KvConfig(eviction="echo", reservation="echo"),
        timed=True,
    ),
    _entry(
        name="echo-literal",
        summary="echo-regular with Echo's own predictor of iteration times, which needs a profile, "
        "and its estimate of arrivals",
        source="Echo §5.2 (Eq. 6 to 8), §7.4",
        make=RegularEchoPolicy,
        pool=PoolConfig(num_buckets=4),
        kv=KvConfig(eviction="echo", reservation="echo-arrivals"),
        timed=True,
        predictor="echo",
    ),
)
