"""Policies by name.

cosched's own are those of the table here and of the papers' folders. Other packages add theirs as
entry points of the group ``cosched.policies``; any object that can be imported is one by its name
``module:attribute`` (docs/policies.md).
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from typing import Any

from cosched.errors import ConfigError, CoschedError, choices
from cosched.memory.config import ENGINE_ORDERS
from cosched.memory.demand import DemandReservation, NoReservation, Reservation
from cosched.memory.eviction import EvictionOrder, ValueOrder
from cosched.memory.value import KvValue
from cosched.papers.bros import names as bros
from cosched.papers.echo import names as echo
from cosched.papers.echo.arrival_rate import ArrivalReservation
from cosched.papers.echo.kv_order import EchoOrder, EchoReservation
from cosched.papers.ecoserve import names as ecoserve
from cosched.papers.hygen import names as hygen
from cosched.pool.prefix_pool import PoolConfig
from cosched.schedule.base import Policy, PolicySettings
from cosched.schedule.cosched import CoschedOptions, CoschedPolicy
from cosched.schedule.entry import MIXED_CHUNK, MOST_FIT, PolicyEntry

__all__ = [
    "EVICTION_NAMES",
    "EVICTION_ORDERS",
    "GROUP",
    "POLICIES",
    "RESERVATIONS",
    "PolicyEntry",
    "known_policy",
    "policy_entry",
    "policy_names",
]

GROUP = "cosched.policies"
"""Entry points of other packages: name = ``module:attribute``."""


def _cosched(name: str, summary: str, *, early: bool = False, **options: bool) -> PolicyEntry:
    return PolicyEntry(
        name=name,
        summary=summary,
        source="cosched (docs/policies.md)",
        make=partial(CoschedPolicy, options=CoschedOptions(**options)),
        pool=PoolConfig(num_buckets=4),
        length=MOST_FIT,
        timed=True,
        early=early,
        tolerates=True,
        groups=True,
        server_flags=MIXED_CHUNK,
    )


_OWN = (
    PolicyEntry(name="sglang", summary="stock SGLang; classes are ignored", source="SGLang"),
    PolicyEntry(
        name="priority",
        summary="stock SGLang priority scheduling; offline below online",
        source="SGLang --enable-priority-scheduling",
        # Stock gives a request without a priority the lowest one: online requests would come last.
        server_flags={"enable_priority_scheduling": True, "default_priority_value": 0},
    ),
    _cosched("cosched", "online requests that can be in time first, offline by the longest reply"),
    _cosched("cosched-fcfs", "cosched with online requests in arrival order", feasible=False),
    _cosched(
        "cosched-nogapcap", "cosched without a limit on a single gap of tokens", gap_cap=False
    ),
    _cosched(
        "cosched-poolorder",
        "cosched with offline requests in the pool's order",
        longest_first=False,
    ),
    _cosched("cosched-notimeline", "cosched with memory by SGLang's ratio", timeline=False),
    _cosched("cosched-mixing", "cosched with drafts given up for every prefill", turns=False),
    _cosched("cosched-apart", "cosched on ranks that agree on no time", agrees=False),
    _cosched("cosched-unpaced", "cosched with iterations up to the targets", paced=False),
    _cosched("cosched-early", "cosched with each iteration planned an iteration ahead", early=True),
)


def _index(entries: Iterable[PolicyEntry]) -> dict[str, PolicyEntry]:
    index: dict[str, PolicyEntry] = {}
    for entry in entries:
        assert entry.name not in index, f"duplicate policy name: {entry.name}"
        index[entry.name] = entry
    return index


POLICIES: Mapping[str, PolicyEntry] = _index(
    (*_OWN, *hygen.ENTRIES, *echo.ENTRIES, *bros.ENTRIES, *ecoserve.ENTRIES)
)


EVICTION_ORDERS: Mapping[str, Callable[[KvValue], EvictionOrder]] = {
    "value": ValueOrder,
    "echo": EchoOrder,
}
EVICTION_NAMES = (*EVICTION_ORDERS, *ENGINE_ORDERS)
RESERVATIONS: Mapping[str, Callable[..., Reservation]] = {
    "cosched": DemandReservation,
    "off": NoReservation,
    "echo": EchoReservation,
    "echo-arrivals": ArrivalReservation,
}
"""Of `cosched.memory.config.KvConfig`."""


def policy_entry(name: str) -> PolicyEntry:
    """The entry of a policy of cosched or of another package. ConfigError when there is none, or
    when it cannot be used."""
    if ":" in name:
        return _imported(name, name)
    found = _installed().get(name, ())
    if name in POLICIES:
        if found:
            raise ConfigError(
                f"policy {name!r} is cosched's own, and {_packages(found)} installs another of "
                "that name; rename or uninstall that one"
            )
        return POLICIES[name]
    if not found:
        raise ConfigError(
            f"unknown policy {name!r}; choose from {choices(policy_names())}, or name one of yours "
            "as module:Class"
        )
    if len(found) > 1:
        raise ConfigError(f"policy {name!r} is installed more than once: by {_packages(found)}")
    return _imported(name, found[0].value)


def policy_names() -> list[str]:
    """Every name, also of other packages; sorted."""
    return sorted({*POLICIES, *_installed()})


def known_policy(name: str) -> str:
    """`name`, checked. ConfigError unless it is a policy's."""
    policy_entry(name)
    return name


def without_tolerance(name: str) -> str:
    """The message for a policy that keeps no tolerance."""
    able = choices(other for other, entry in POLICIES.items() if entry.tolerates)
    return f"tolerance: policy {name!r} keeps none; choose from {able}"


@cache
def _installed() -> Mapping[str, tuple[metadata.EntryPoint, ...]]:
    index: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    for entry in metadata.entry_points(group=GROUP):
        index[entry.name] = (*index.get(entry.name, ()), entry)
    return index


def _packages(found: tuple[metadata.EntryPoint, ...]) -> str:
    return ", ".join(entry.dist.name if entry.dist is not None else "?" for entry in found)


@cache
def _imported(name: str, target: str) -> PolicyEntry:
    """The object at ``module:attribute`` as an entry of that name."""
    try:
        found = pkgutil.resolve_name(target)
    except Exception as error:  # a module of another package may raise anything
        raise ConfigError(f"policy {name!r}: cannot import {target!r}: {error!r}") from error
    module = sys.modules[target.partition(":")[0]]
    source_file = getattr(module, "__file__", None)
    if isinstance(found, PolicyEntry):
        make = found.make
        return replace(
            found, name=name, make=make and _checked(name, make), source_file=source_file
        )
    if not callable(found):
        raise ConfigError(
            f"policy {name!r}: {target!r} is {type(found).__name__} {found!r}; it must be a "
            "PolicyEntry, or give a policy when it is called with PolicySettings"
        )
    if isinstance(found, type) and not callable(getattr(found, "plan", None)):
        raise ConfigError(
            f"policy {name!r}: class {found.__name__} has no method plan(view, state)"
        )
    about = (inspect.getdoc(found) or "").partition("\n")[0]
    return PolicyEntry(
        name=name,
        summary=about or "no description",
        source=target,
        make=_checked(name, found),
        # Whether it reads the time is not known: the safe answer costs little.
        timed=True,
        server_flags=MIXED_CHUNK,
        source_file=source_file,
    )


def _checked(
    name: str, make: Callable[[PolicySettings], Policy[Any]]
) -> Callable[[PolicySettings], Policy[Any]]:
    def build(settings: PolicySettings) -> Policy[Any]:
        try:
            policy = make(settings)
        except CoschedError:
            raise
        except Exception as error:
            raise ConfigError(f"policy {name!r} cannot be built: {error!r}") from error
        if not callable(getattr(policy, "plan", None)):
            raise ConfigError(
                f"policy {name!r}: {type(policy).__name__} has no method plan(view, state)"
            )
        if not hasattr(policy, "initial"):
            raise ConfigError(
                f"policy {name!r}: {type(policy).__name__} has no attribute initial, what the "
                "first plan is made with (or None)"
            )
        return policy

    return build
