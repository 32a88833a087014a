"""Policies by name: the one place that knows which there are.

Beside the project's own there are those of other packages (entry points of the group
``cosched.policies``) and any object that can be imported, named as ``module:attribute``
(docs/policies/own_policy.md).
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import metadata
from typing import Any

from cosched.core.plan import PreemptMode
from cosched.errors import ConfigError, CoschedError, choices
from cosched.papers.bros.policy import BrosOptions, BrosPolicy
from cosched.papers.bros.round_robin import RoundRobinPolicy
from cosched.papers.echo.policy import EchoPolicy
from cosched.papers.ecoserve.coupled import Allocation, CoupledOptions, CoupledPolicy, Order
from cosched.papers.ecoserve.policy import EcoOptions, EcoServePolicy
from cosched.papers.hygen.policy import HygenPolicy
from cosched.papers.hygen.sarathi import SarathiPolicy, ThrottledPolicy
from cosched.pool.prefix_pool import PoolConfig
from cosched.predict.length_config import LengthConfig
from cosched.schedule.base import Policy, PolicySettings
from cosched.schedule.cosched import CoschedOptions, CoschedPolicy

GROUP = "cosched.policies"
"""Entry points of other packages: name = ``module:attribute``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """One named policy.

    summary       one line for ``--help``
    source        where it comes from
    make          builds it for an engine; None: the engine's own scheduler decides
    pool          how it orders what waits offline, unless the configuration says; None: by arrival
    eviction      which KV goes first, unless the configuration says (`KvConfig.eviction`)
    tolerates     it keeps what the operator promises of online requests beside those alone
                  (`Config.tolerance`)
    timed         its plans depend on time: the latency predictor is kept up to date, and all ranks
                  go by one clock
    early         an iteration is planned as soon as the one before it runs (`Config.plan_early`)
    length        what is believed of the length of responses, unless the configuration says
    predictor     the form of its predictor, fitted to the points of the profile where one is given
                  (`cosched.predict.registry`); None: the profile's own
    server_flags  SGLang server arguments it needs, by field name
    source_file   where it comes from another package: the file that its code is in
    """

    name: str
    summary: str
    source: str
    make: Callable[[PolicySettings], Policy[Any]] | None = None
    pool: PoolConfig | None = None
    eviction: str = "value"
    length: LengthConfig = field(default_factory=LengthConfig)
    timed: bool = False
    early: bool = False
    tolerates: bool = False
    predictor: str | None = None
    server_flags: Mapping[str, object] = field(default_factory=dict)
    source_file: str | None = None

    def arguments(self) -> dict[str, list[str]]:
        """`server_flags` as a command line: flag -> the flag and its value."""
        arguments = {}
        for name, value in self.server_flags.items():
            flag = "--" + name.replace("_", "-")
            arguments[flag] = [flag] if value is True else [flag, str(value)]
        return arguments


def _sarathi(settings: PolicySettings) -> Policy[Any]:
    return SarathiPolicy()


def _throttled(settings: PolicySettings) -> Policy[Any]:
    if settings.offline_rate is None:
        return SarathiPolicy()
    return ThrottledPolicy(settings.offline_rate)


_MIXED_CHUNK = {"enable_mixed_chunk": True}


def _bros(
    name: str,
    summary: str,
    source: str,
    *,
    predictor: str | None = None,
    eviction: str = "value",
    **options: Any,
) -> PolicyEntry:
    return PolicyEntry(
        name=name,
        summary=summary,
        source=source,
        make=partial(BrosPolicy, options=BrosOptions(**options)),
        # First come, first served, but it knows for whom the KV of what was stopped is kept.
        pool=PoolConfig(utility_ratio=0.0),
        eviction=eviction,
        timed=True,
        predictor=predictor,
        server_flags=_MIXED_CHUNK,
    )


_MOST_FIT = LengthConfig(coverage=0.75)
"""Memory by lengths need not cover each of them: what one takes too much another gives back early.
EcoServe's predictions cover as many (§2.3)."""


def _ecoserve(
    name: str,
    summary: str,
    source: str,
    *,
    length: LengthConfig = _MOST_FIT,
    **options: bool,
) -> PolicyEntry:
    return PolicyEntry(
        name=name,
        summary=summary,
        source=source,
        make=partial(EcoServePolicy, options=EcoOptions(**options)),
        length=length,
        timed=True,
        server_flags=_MIXED_CHUNK,
    )


def _coupled(
    name: str,
    summary: str,
    source: str,
    *,
    server_flags: Mapping[str, object] = _MIXED_CHUNK,
    **options: Any,
) -> PolicyEntry:
    coupled = CoupledOptions(**options)
    return PolicyEntry(
        name=name,
        summary=summary,
        source=source,
        make=partial(CoupledPolicy, options=coupled),
        length=_MOST_FIT,
        # The target forward size is worked out by the predictor.
        timed=coupled.fills_forward,
        server_flags=server_flags,
    )


def _cosched(name: str, summary: str, *, early: bool = False, **options: bool) -> PolicyEntry:
    return PolicyEntry(
        name=name,
        summary=summary,
        source="cosched (docs/policies/cosched.md)",
        make=partial(CoschedPolicy, options=CoschedOptions(**options)),
        pool=PoolConfig(num_buckets=4),
        length=_MOST_FIT,
        timed=True,
        early=early,
        tolerates=True,
        server_flags=_MIXED_CHUNK,
    )


_ENTRIES = (
    PolicyEntry(
        name="sglang",
        summary="stock SGLang; classes are ignored",
        source="SGLang",
    ),
    _cosched("cosched", "online by who can be in time, offline by the longest reply"),
    _cosched(
        "cosched-fcfs",
        "cosched with online requests in the order of arrival",
        feasible=False,
    ),
    _cosched(
        "cosched-nogapcap", "cosched without a limit on a single gap of tokens", gap_cap=False
    ),
    _cosched(
        "cosched-poolorder",
        "cosched with offline requests in the pool's order",
        longest_first=False,
    ),
    _cosched("cosched-notimeline", "cosched with memory by SGLang's ratio", timeline=False),
    _cosched("cosched-early", "cosched with each iteration planned an iteration ahead", early=True),
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
        make=_sarathi,
        server_flags=_MIXED_CHUNK,
    ),
    PolicyEntry(
        name="hygen-throttled",
        summary="sarathi that admits offline requests at a fixed rate (offline_rate)",
        source="HyGen §5.1 (baseline HyGen*)",
        make=_throttled,
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
        name="hygen-largest",
        summary="hygen that preempts the offline request with the most memory, not the youngest",
        source="HyGen §4.1, Algorithm 2",
        make=partial(HygenPolicy, stops_largest=True),
        pool=PoolConfig(),
        timed=True,
        server_flags=_MIXED_CHUNK,
    ),
    PolicyEntry(
        name="hygen-timeline",
        summary="hygen that gives out memory by expected lengths, not by SGLang's ratio",
        source="cosched (docs/policies/ecoserve.md)",
        make=partial(HygenPolicy, by_length=True),
        pool=PoolConfig(),
        length=_MOST_FIT,
        timed=True,
        server_flags=_MIXED_CHUNK,
    ),
    PolicyEntry(
        name="echo-bs",
        summary="Echo's base: online first, then offline in the order of arrival; no SLO awareness",
        source="Echo §7.1 (BS)",
        make=_sarathi,
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
    PolicyEntry(
        name="echo-bs+e+s+m",
        summary="Echo complete: echo-bs+e+s, and KV goes in the order that the paper gives",
        source="Echo §4.2, §7.1 (BS+E+S+M)",
        make=EchoPolicy,
        pool=PoolConfig(num_buckets=4),
        eviction="echo",
        timed=True,
        server_flags=_MIXED_CHUNK,
    ),
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
    PolicyEntry(
        name="bros-rr",
        summary="round robin: iterations of online and of offline requests in turn",
        source="BROS §2.2, §7 (baseline RR)",
        make=lambda _: RoundRobinPolicy(),
        server_flags=_MIXED_CHUNK,
    ),
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
        "ecoserve that is told all lengths",
        "EcoServe §4 (Oracle)",
        length=LengthConfig(mode="oracle"),
    ),
    _ecoserve(
        "ecoserve-timeline",
        "ecoserve-sdo whose outputs need only fit at each iteration to come",
        "cosched (docs/policies/ecoserve.md)",
        synced=False,
        pipeline=False,
        timeline=True,
    ),
    _bros(
        "bros-rt",
        "bros with offline work only while nothing is online",
        "BROS §7.3 (Fig. 12)",
        beside=False,
    ),
    _bros(
        "bros-nobi",
        "bros that frees all KV of what it stops",
        "BROS §7.4.1 (No Bi-cache)",
        stop=PreemptMode.RECOMPUTE,
    ),
    _bros(
        "bros-keep",
        "bros that keeps the KV of what it stops; whole leaves go, in SGLang's order",
        "cosched (a part of Fig. 13)",
        eviction="lru",
        stop=PreemptMode.KEEP_KV,
    ),
    _bros(
        "bros-tail",
        "bros that evicts tails only, without shared pages",
        "cosched (a part of Fig. 13)",
    ),
    _bros(
        "bros-noreplace",
        "bros without exchange",
        "cosched (without Alg. 1, lines 25 to 32)",
        replaces=False,
    ),
    _bros(
        "bros-fixed",
        "bros with at most 128 requests in an iteration",
        "cosched (without §4.2, adaptive batch sizing)",
        grows=False,
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
        "who is expected to end first, stopping others; KV as eco-orca",
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
        "first come, first served, KV block by block, prompts first, who is stopped is swapped out",
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
        "whose demand is closest to what is left of compute and KV; KV for the expected length",
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


def _index(entries: tuple[PolicyEntry, ...]) -> dict[str, PolicyEntry]:
    index: dict[str, PolicyEntry] = {}
    for entry in entries:
        assert entry.name not in index, f"duplicate policy name: {entry.name}"
        index[entry.name] = entry
    return index


POLICIES: Mapping[str, PolicyEntry] = _index(_ENTRIES)


def policy_entry(name: str) -> PolicyEntry:
    """The entry of a policy, its own or another package's. ConfigError when there is none, or when
    it cannot be used."""
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
    """Every name, those of other packages included; sorted."""
    return sorted({*POLICIES, *_installed()})


def known_policy(name: str) -> str:
    """The same name. ConfigError unless it is a policy's."""
    policy_entry(name)
    return name


def without_tolerance(name: str) -> str:
    """What is said of a policy that keeps no tolerance."""
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
    """What stands at ``module:attribute``, as an entry of that name."""
    try:
        found = pkgutil.resolve_name(target)
    except Exception as error:  # somebody else's module may raise anything
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
            f"policy {name!r}: class {found.__name__} has no method plan(view, carry)"
        )
    about = (inspect.getdoc(found) or "").partition("\n")[0]
    return PolicyEntry(
        name=name,
        summary=about or "no description",
        source=target,
        make=_checked(name, found),
        # Nothing says whether it looks at the time: the safe answer costs little.
        timed=True,
        server_flags=_MIXED_CHUNK,
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
                f"policy {name!r}: {type(policy).__name__} has no method plan(view, carry)"
            )
        if not hasattr(policy, "initial"):
            raise ConfigError(
                f"policy {name!r}: {type(policy).__name__} has no attribute initial, what the "
                "first plan is made with (or None)"
            )
        return policy

    return build
