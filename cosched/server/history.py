"""The last hour of a server, for the pictures of its page: what its schedulers have counted by each
of some moments. The page makes rates and means of the differences; p99 is of the five minutes
before a sample."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from cosched.engine.latency_histogram import Histogram, p99_s
from cosched.memory.occupancy import KV_USES
from cosched.predict.cost_account import key_of

PERIOD_S = 10.0
"""Between two samples."""

_NUM_KEPT = 361
_NUM_IN_P99 = 30
"""Samples whose requests are in a p99."""
_KV_USES = tuple(KV_USES)


class History:
    """One per HTTP process."""

    def __init__(self) -> None:
        self._samples: deque[dict[str, Any]] = deque(maxlen=_NUM_KEPT)
        self._counted: deque[dict[tuple[str, str], Histogram]] = deque(maxlen=_NUM_IN_P99 + 1)
        """(tier, time) -> histogram since the start; the tier of all requests is ''."""

    def add(self, at_s: float, replicas: Sequence[Mapping[str, Any]]) -> None:
        """replicas: the state of each scheduler (`cosched.engine.state.ReplicaState`)."""
        if not replicas:
            return
        sample = sample_of(at_s, replicas)
        tiers = sample["tiers"]
        self._counted.append(
            {
                (tier, name): _counted(replicas, tier, name)
                for tier in ("", *tiers)
                for name in ("ttft", "tpot")
            }
        )
        before, now = self._counted[0], self._counted[-1]
        for (tier, name), histogram in now.items():
            of = tiers[tier] if tier else sample
            of[f"{name}_p99_s"] = p99_s(histogram - before[tier, name])
        self._samples.append(sample)

    def to_dict(self) -> dict[str, Any]:
        return {"period_s": PERIOD_S, "samples": [*self._samples]}


def sample_of(at_s: float, replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over the schedulers. ttft, tpot: sum [s] and number of online requests; attainment:
    requests within all targets, and others; tiers: the same of each; alone: ttft and tpot as they
    would be without offline work, where that is known; keys: device seconds."""
    keys: Counter[str] = Counter()
    for one in replicas:
        for by_tenant in one["device_s"].values():
            for tenant, seconds in by_tenant.items():
                keys[key_of(tenant)] += seconds
    alone = [one["alone"] for one in replicas if one["alone"]]
    held = [one["kv"] for one in replicas if one["kv"]]
    return {
        "at_s": round(at_s, 1),
        **_served(replicas, "online_"),
        "online_tokens": sum(one["online_output_tokens"] for one in replicas),
        "offline_tokens": sum(one["offline_output_tokens"] for one in replicas),
        "tiers": {
            name: _served([one["tiers"][name] for one in replicas]) for name in replicas[0]["tiers"]
        },
        "alone": {
            name: _added([(one[name]["total_alone_s"], one[name]["num"]) for one in alone])
            for name in ("ttft", "tpot")
        },
        "kv": [sum(kv[use] for kv in held) for use in _KV_USES] if held else [],
        "keys": {key: round(seconds, 3) for key, seconds in keys.items()},
    }


def _served(records: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, list[float]]:
    return {
        "ttft": _added([one["times_s"][f"{prefix}ttft"] for one in records]),
        "tpot": _added([one["times_s"][f"{prefix}tpot"] for one in records]),
        "attainment": _added([one["attainment"]["all"] for one in records]),
    }


def _counted(replicas: Sequence[Mapping[str, Any]], tier: str, name: str) -> Histogram:
    records = [one["tiers"][tier] if tier else one for one in replicas]
    return sum((Counter(one["histograms"][name]) for one in records), start=Counter())


def _added(pairs: Sequence[Sequence[float]]) -> list[float]:
    return [sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)]
