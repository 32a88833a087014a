"""Settings: which policy schedules which requests. The same names in virtual time and live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from cosched.errors import ConfigError, choices
from cosched.memory.config import ENGINE_ORDERS
from cosched.policies import EVICTION_NAMES, POLICIES, PolicyEntry, policy_entry, policy_names
from cosched.predict.fitted import PREDICTORS


class OfflineClient(Enum):
    """The client of the offline requests.

    FEEDER  the server's own feeder: the set as batches in its store, of which a page of lines is at
            the scheduler, in prefix order
    LINES   ``cosched batch --via lines``: line by line in prefix order, many in flight
    ALL     sends all at the start
    CAP     a gateway with a fixed number in flight, in the order of the set
    AIMD    a gateway that adapts that number to the missed targets of online requests
    """

    FEEDER = "feeder"
    LINES = "lines"
    ALL = "all"
    CAP = "cap"
    AIMD = "aimd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A policy with its options.

    policy           ``sglang`` is stock
    client           None: that of the run
    eviction         order of eviction (`KvConfig`); under stock scheduling SGLang's
                     ``--radix-eviction-policy``; None: that of the configuration
    predictor        of the policy (`Config.predictor`); None: that of the configuration
    schedule_policy  ``--schedule-policy`` under stock scheduling; None: the machine's
    flags            of SGLang, in place of the machine's
    """

    name: str
    summary: str
    policy: str
    has_online: bool = True
    has_offline: bool = True
    client: OfflineClient | None = None
    eviction: str | None = None
    predictor: str | None = None
    schedule_policy: str | None = None
    flags: tuple[str, ...] = ()


def _offline_only(schedule_policy: str) -> Setting:
    return Setting(
        name=f"offline-{schedule_policy}",
        summary=f"offline requests alone, stock --schedule-policy {schedule_policy}",
        policy="sglang",
        has_online=False,
        schedule_policy=schedule_policy,
    )


_BASELINES = (
    Setting(name="s0", summary="online requests alone, stock", policy="sglang", has_offline=False),
    _offline_only("fcfs"),
    _offline_only("lpm"),
    _offline_only("dfs-weight"),
    Setting(name="s1", summary="both, uncontrolled: stock, classes ignored", policy="sglang"),
    Setting(
        name="cap",
        summary="stock behind a gateway with a fixed number of offline requests in flight",
        policy="sglang",
        client=OfflineClient.CAP,
    ),
    Setting(
        name="aimd",
        summary="stock behind a gateway that halves or raises that number by online misses",
        policy="sglang",
        client=OfflineClient.AIMD,
    ),
    Setting(name="priority", summary="stock priority scheduling, its defaults", policy="priority"),
    *(
        Setting(
            name=f"{name}-delayer",
            summary=f"{name} with SGLang's prefill delayer for ranks of DP attention",
            policy=policy,
            flags=("--enable-prefill-delayer",),
        )
        for name, policy in (("s1", "sglang"), ("priority", "priority"))
    ),
    Setting(
        name="vllm-like",
        summary="stock, classes ignored, as BROS ran vLLM: pages of 16, whole prompts, no tree",
        policy="sglang",
        schedule_policy="fcfs",
        flags=("--page-size", "16", "--chunked-prefill-size", "-1", "--disable-radix-cache"),
    ),
)


def _of_policy(policy: PolicyEntry) -> Setting:
    return Setting(name=policy.name, summary=policy.summary, policy=policy.name)


def _all() -> Mapping[str, Setting]:
    index = {entry.name: entry for entry in _BASELINES}
    for policy in POLICIES.values():
        if policy.name not in index and policy.name != "sglang":
            index[policy.name] = _of_policy(policy)
        if policy.pool is not None and policy.pool.utility_ratio > 0:
            alone = f"offline-{policy.name}"
            index[alone] = Setting(
                name=alone,
                summary=f"offline requests alone, {policy.name}",
                policy=policy.name,
                has_online=False,
            )
    return index


SETTINGS: Mapping[str, Setting] = _all()


_TITLES = {"s0": "chat alone", "s1": "stock SGLang"}


def title_of(name: str) -> str:
    """How tables for people and plots call a setting."""
    return f"{name} ({_TITLES[name]})" if name in _TITLES else name


def setting_of(name: str) -> Setting:
    """Of that name, or of a policy of another package. ``NAME/ORDER`` is the same with another
    order of eviction (`with_eviction`), ``NAME@PREDICTOR`` with a paper's predictor
    (`with_predictor`). ConfigError naming the choices when there is no such setting."""
    name, is_ordered, order = name.partition("/")
    if is_ordered:
        return with_eviction(setting_of(name), order)
    name, is_named, predictor = name.partition("@")
    if is_named:
        return with_predictor(setting_of(name), predictor)
    if name in SETTINGS:
        return SETTINGS[name]
    if ":" in name or (name in policy_names() and name not in POLICIES):
        return _of_policy(policy_entry(name))
    known = {*SETTINGS, *policy_names()} - {"sglang"}
    raise ConfigError(
        f"unknown setting {name!r}; choose from {choices(known)}, or name a policy of yours as "
        "module:Class"
    )


def with_eviction(entry: Setting, order: str) -> Setting:
    """The setting with another order of eviction, named ``NAME/ORDER``. ConfigError where its
    scheduler has no such order: stock has SGLang's alone."""
    known = ENGINE_ORDERS if policy_entry(entry.policy).make is None else EVICTION_NAMES
    if order not in known:
        raise ConfigError(f"{entry.name} cannot evict by {order!r}; choose from {choices(known)}")
    return replace(
        entry,
        name=f"{entry.name}/{order}",
        summary=f"{entry.summary}; evicts by {order}" if entry.summary else "",
        eviction=order,
    )


def with_predictor(entry: Setting, predictor: str) -> Setting:
    """The setting with a paper's predictor, named ``NAME@PREDICTOR``. ConfigError where there is
    none of that name, or the policy predicts nothing."""
    if predictor not in PREDICTORS:
        raise ConfigError(f"unknown predictor {predictor!r}; choose from {choices(PREDICTORS)}")
    if not policy_entry(entry.policy).timed:
        raise ConfigError(f"{entry.name} predicts nothing")
    return replace(
        entry,
        name=f"{entry.name}@{predictor}",
        summary=f"{entry.summary}; predicts as {predictor}" if entry.summary else "",
        predictor=predictor,
    )
