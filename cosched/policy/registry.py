"""Policies by name: the one place that knows which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cosched.errors import ConfigError, choices
from cosched.offline.prefix_pool import PoolConfig
from cosched.policy.base import Policy, PolicySettings
from cosched.policy.echo import EchoPolicy
from cosched.policy.hygen import HygenPolicy
from cosched.policy.sarathi import SarathiPolicy

__all__ = ["POLICIES", "PolicyEntry", "policy_entry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """One named policy.

    summary       one line for ``--help``
    source        where it comes from
    make          builds it for an engine; None: the engine's own scheduler decides
    pool          how it orders what waits offline, unless the configuration says; None: by arrival
    timed         its plans depend on time: the latency predictor is kept up to date, and all ranks
                  go by one clock
    server_flags  SGLang server arguments it needs, by field name
    """

    name: str
    summary: str
    source: str
    make: Callable[[PolicySettings], Policy] | None = None
    pool: PoolConfig | None = None
    timed: bool = False
    server_flags: Mapping[str, object] = field(default_factory=dict)

    def arguments(self) -> dict[str, list[str]]:
        """`server_flags` as a command line: flag -> the flag and its value."""
        arguments = {}
        for name, value in self.server_flags.items():
            flag = "--" + name.replace("_", "-")
            arguments[flag] = [flag] if value is True else [flag, str(value)]
        return arguments


_MIXED_CHUNK = {"enable_mixed_chunk": True}

_ENTRIES = (
    PolicyEntry(
        name="sglang",
        summary="stock SGLang; classes are ignored",
        source="SGLang",
    ),
    PolicyEntry(
        name="priority",
        summary="stock SGLang priority scheduling; offline below online",
        source="SGLang --enable-priority-scheduling",
        # Stock gives a request without a priority the lowest one: online requests would come last.
        server_flags={"enable_priority_scheduling": True, "default_priority_value": 0},
    ),
    PolicyEntry(
        name="sarathi",
        summary="Sarathi++: online first, then offline, in a fixed token budget",
        source="HyGen §5.1 (baseline)",
        make=lambda settings: SarathiPolicy(),
        server_flags=_MIXED_CHUNK,
    ),
    PolicyEntry(
        name="hygen-throttled",
        summary="sarathi that admits offline requests at a fixed rate (offline_rate)",
        source="HyGen §5.1 (baseline HyGen*)",
        make=lambda settings: SarathiPolicy(offline_rate=settings.offline_rate),
        timed=True,
        server_flags=_MIXED_CHUNK,
    ),
    PolicyEntry(
        name="hygen",
        summary="online first, then offline in prefix order, in a budget of predicted time",
        source="HyGen §4, Algorithms 1 and 3",
        make=HygenPolicy,
        pool=PoolConfig(),
        timed=True,
        server_flags=_MIXED_CHUNK,
    ),
    PolicyEntry(
        name="hygen-fcfs",
        summary="hygen with the pool in the order of arrival",
        source="HyGen §5 (ablation: without prefix sharing maximization)",
        make=HygenPolicy,
        timed=True,
        server_flags=_MIXED_CHUNK,
    ),
    PolicyEntry(
        name="echo-bs",
        summary="Echo's base: online first, then offline in the order of arrival; no SLO awareness",
        source="Echo §7.1 (BS)",
        make=lambda settings: SarathiPolicy(),
        server_flags=_MIXED_CHUNK,
    ),
    PolicyEntry(
        name="echo-bs+e",
        summary="echo-bs in a budget of predicted time, from the tightest online deadline",
        source="Echo §7.1 (BS+E)",
        make=HygenPolicy,
        timed=True,
        server_flags=_MIXED_CHUNK,
    ),
    PolicyEntry(
        name="echo-bs+e+s",
        summary="echo-bs+e that admits offline requests by benefit per predicted second",
        source="Echo §7.1 (BS+E+S)",
        make=EchoPolicy,
        pool=PoolConfig(num_buckets=4),
        timed=True,
        server_flags=_MIXED_CHUNK,
    ),
)


def _index(entries: tuple[PolicyEntry, ...]) -> dict[str, PolicyEntry]:
    index: dict[str, PolicyEntry] = {}
    for entry in entries:
        assert entry.name not in index, f"duplicate policy name: {entry.name}"
        index[entry.name] = entry
    return index


POLICIES: Mapping[str, PolicyEntry] = _index(_ENTRIES)


def policy_entry(name: str) -> PolicyEntry:
    """The entry of a policy. ConfigError naming the choices when there is none."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(f"unknown policy {name!r}; choose from {choices(POLICIES)}") from None
