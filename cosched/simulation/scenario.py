"""Scenarios: who sends what to which scheduling. The same names in virtual time and live."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from cosched.errors import ConfigError, choices
from cosched.policy.registry import POLICIES, PolicyEntry, policy_entry, policy_names

__all__ = ["SCENARIOS", "OfflineClient", "Scenario", "scenario"]


class OfflineClient(Enum):
    """How the offline requests reach the server.

    ALL   all at once: the server has the whole set from the start
    CAP   a gateway that keeps a fixed number in flight
    AIMD  a gateway that moves that number by the online requests' misses
    """

    ALL = "all"
    CAP = "cap"
    AIMD = "aimd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One column of the comparison.

    policy           cosched policy that schedules; ``sglang`` is stock
    schedule_policy  ``--schedule-policy`` where stock schedules; None: the machine's
    depth_first      the offline set is sent sorted by its prompts: what a scheduler would do that
                     knew all prompts from the start
    """

    name: str
    summary: str
    policy: str
    has_online: bool = True
    has_offline: bool = True
    client: OfflineClient = OfflineClient.ALL
    schedule_policy: str | None = None
    depth_first: bool = False


def _offline_only(schedule_policy: str) -> Scenario:
    return Scenario(
        name=f"offline-{schedule_policy}",
        summary=f"offline requests alone, stock --schedule-policy {schedule_policy}",
        policy="sglang",
        has_online=False,
        schedule_policy=schedule_policy,
    )


_BASELINES = (
    Scenario(name="s0", summary="online requests alone, stock", policy="sglang", has_offline=False),
    _offline_only("fcfs"),
    _offline_only("lpm"),
    _offline_only("dfs-weight"),
    Scenario(
        name="offline-sorted",
        summary="offline requests alone, sent in depth-first order of their prompts; stock fcfs",
        policy="sglang",
        has_online=False,
        schedule_policy="fcfs",
        depth_first=True,
    ),
    Scenario(name="s1", summary="both, uncontrolled: stock, classes ignored", policy="sglang"),
    Scenario(
        name="cap",
        summary="stock behind a gateway with a fixed number of offline requests in flight",
        policy="sglang",
        client=OfflineClient.CAP,
    ),
    Scenario(
        name="aimd",
        summary="stock behind a gateway that halves or raises that number by online misses",
        policy="sglang",
        client=OfflineClient.AIMD,
    ),
    Scenario(name="priority", summary="stock priority scheduling, its defaults", policy="priority"),
)


def _of_policy(policy: PolicyEntry) -> Scenario:
    return Scenario(name=policy.name, summary=policy.summary, policy=policy.name)


def _all() -> Mapping[str, Scenario]:
    index = {entry.name: entry for entry in _BASELINES}
    for policy in POLICIES.values():
        if policy.name not in index and policy.name != "sglang":
            index[policy.name] = _of_policy(policy)
        if policy.pool is not None:
            alone = f"offline-{policy.name}"
            index[alone] = Scenario(
                name=alone,
                summary=f"offline requests alone, {policy.name}",
                policy=policy.name,
                has_online=False,
            )
    return index


SCENARIOS: Mapping[str, Scenario] = _all()


def scenario(name: str, *, also: Iterable[str] = ()) -> Scenario:
    """Of that name, or of a policy of another package. ConfigError naming the choices when there is
    no such scenario; `also` are more of them."""
    if name in SCENARIOS:
        return SCENARIOS[name]
    if ":" in name or (name in policy_names() and name not in POLICIES):
        return _of_policy(policy_entry(name))
    known = {*SCENARIOS, *policy_names(), *also} - {"sglang"}
    raise ConfigError(
        f"unknown scenario {name!r}; choose from {choices(known)}, or name a policy of yours as "
        "module:Class"
    )
