"""How class and SLOs travel with a request (design: contracts on the wire).

==============================  ============================================================
where                           meaning
==============================  ============================================================
``service_tier: "flex"``        offline (OpenAI endpoints); any other tier is online
``priority`` (integer)          ``< 0`` offline, ``>= 0`` or absent online (every endpoint)
``x-smg-priority: bulk``        offline; other values of that header are online
``x-slo-ttft-ms``               TTFT target of this request
``x-slo-tpot-ms``               TPOT target of this request
``custom_params["cosched"]``    ``{"ttft_slo_ms", "tpot_slo_ms", "deadline_s"}``
==============================  ============================================================

Inside SGLang the class travels as the request's ``priority`` and the targets as
``sampling_params.custom_params["cosched"]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cosched.core.request import RequestClass, Slo
from cosched.errors import RequestError, choices

__all__ = [
    "OFFLINE_PRIORITY",
    "PARAMS_KEY",
    "SLO_FIELDS",
    "class_of_priority",
    "parse_priority",
    "parse_slo",
    "slo_of_params",
]

OFFLINE_PRIORITY = -100
"""Given to a request that asks to be offline without naming a priority. Far enough below 0 for
stock priority scheduling to preempt it (its threshold is a difference of more than 10)."""

PARAMS_KEY = "cosched"

SLO_FIELDS: Mapping[str, tuple[str, float]] = {
    "ttft_slo_ms": ("ttft_s", 1e-3),
    "tpot_slo_ms": ("tpot_s", 1e-3),
    "deadline_s": ("deadline_s", 1.0),
}
"""Key in ``custom_params["cosched"]`` -> (field of `Slo`, seconds per unit)."""


def class_of_priority(priority: int | None) -> RequestClass:
    return RequestClass.OFFLINE if priority is not None and priority < 0 else RequestClass.ONLINE


def parse_priority(value: Any, *, field: str = "priority") -> int | None:
    """A priority as a client sent it. RequestError unless it is an integer or absent."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(field, f"must be an integer, not {value!r}")
    return value


def parse_slo(params: Any, *, field: str = "custom_params.cosched") -> Slo:
    """The targets in ``custom_params["cosched"]``. RequestError names the wrong key."""
    if params is None:
        return Slo()
    if not isinstance(params, Mapping):
        raise RequestError(field, f"must be an object, not {params!r}")
    targets: dict[str, float] = {}
    for key, value in params.items():
        if key not in SLO_FIELDS:
            raise RequestError(f"{field}.{key}", f"unknown key; choose from {choices(SLO_FIELDS)}")
        name, seconds = SLO_FIELDS[key]
        targets[name] = parse_positive(value, field=f"{field}.{key}") * seconds
    return Slo(**targets)


def parse_positive(value: Any, *, field: str) -> float:
    """A positive finite number. RequestError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(field, f"must be a number, not {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise RequestError(field, f"must be positive and finite, not {value!r}")
    return float(value)


def slo_of_params(custom_params: Any) -> Slo:
    """The targets of a request inside the scheduler. What the HTTP layer let through is valid; a
    request that came another way (an embedded engine) and is not, has no targets."""
    try:
        return parse_slo((custom_params or {}).get(PARAMS_KEY))
    except RequestError:
        return Slo()
