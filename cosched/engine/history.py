"""The last hour of a server, for the pictures of its page: what its schedulers have counted by each
of some moments. The page makes rates and means of the differences."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from cosched.predict.account import key_of

PERIOD_S = 10.0
"""Between two samples."""

_NUM_KEPT = 361
_KV_USES = ("running_online", "running_offline", "returning", "referenced", "dead", "free")


class History:
    """One per HTTP process."""

    def __init__(self) -> None:
        self._samples: deque[dict[str, Any]] = deque(maxlen=_NUM_KEPT)

    def add(self, at_s: float, replicas: Sequence[Mapping[str, Any]]) -> None:
        """replicas: the state of each scheduler (`cosched.engine.state.ReplicaState`)."""
        if replicas:
            self._samples.append(sample_of(at_s, replicas))

    def to_dict(self) -> dict[str, Any]:
        return {"period_s": PERIOD_S, "samples": [*self._samples]}


def sample_of(at_s: float, replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over the schedulers. ttft, tpot: sum [s] and number of online requests; attainment,
    tiers: requests within all targets, and others; keys: device seconds."""
    keys: Counter[str] = Counter()
    for one in replicas:
        for by_tenant in one["device_s"].values():
            for tenant, seconds in by_tenant.items():
                keys[key_of(tenant)] += seconds
    held = [one["kv"] for one in replicas if one["kv"]]
    tiers = {name for one in replicas for name in one["tiers"]}
    return {
        "at_s": round(at_s, 1),
        "ttft": _added([one["times_s"]["online_ttft"] for one in replicas]),
        "tpot": _added([one["times_s"]["online_tpot"] for one in replicas]),
        "online_tokens": sum(one["online_output_tokens"] for one in replicas),
        "offline_tokens": sum(one["offline_output_tokens"] for one in replicas),
        "attainment": _added([one["attainment"]["all"] for one in replicas]),
        "tiers": {
            name: _added([one["tiers"][name]["attainment"]["all"] for one in replicas])
            for name in sorted(tiers)
        },
        "kv": [sum(kv[use] for kv in held) for use in _KV_USES] if held else [],
        "keys": {key: round(seconds, 3) for key, seconds in keys.items()},
    }


def _added(pairs: Sequence[Sequence[float]]) -> list[float]:
    return [sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)]
