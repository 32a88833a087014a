"""How class and SLOs travel with a request (design: contracts on the wire).

==============================  ============================================================
where                           meaning
==============================  ============================================================
``service_tier: "flex"``        offline (every endpoint); the name of a configured tier of online
                                requests: that tier; the others leave it to the rest
``priority`` (integer)          ``< 0`` offline, ``>= 0`` or absent online (every endpoint); with
                                tiers, the tier (`cosched.core.tiers`)
``x-smg-priority: bulk``        offline; the header's other values leave it to the rest
``x-vllm-priority``             vLLM's (lower is earlier): its negative instead of the body's
                                ``priority`` and tier
``x-slo-ttft-ms``               TTFT target of this request
``x-slo-tpot-ms``               TPOT target of this request
``x-cosched-late``              ``1``: the reply says whether the TTFT target was out of reach
``x-cosched-usage``             ``1``: the reply's ``usage`` says what the request cost
``custom_params["cosched"]``    ``{"ttft_slo_ms", "tpot_slo_ms", "deadline_s"}``, and
                                ``output_tokens_hint``: how long the client expects the output to
                                get; it changes no limit
==============================  ============================================================

Inside SGLang the class travels as the request's ``priority`` and the targets as
``sampling_params.custom_params["cosched"]``. One sign of offline is enough: a gateway that marks a
tenant ``bulk`` is not overruled by the body. The body's targets win over the headers'.

Each row is a sign (`SIGNS`), and an operator may have a sign ignored. Targets are held within
`Bounds`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

from cosched.core.request import RequestClass, Slo
from cosched.errors import RequestError, choices

__all__ = [
    "ANTHROPIC_SERVICE_TIERS",
    "BEHIND_KEY",
    "GATEWAY_HEADER",
    "GATEWAY_PRIORITIES",
    "GRANTED_TIERS",
    "HINT_KEY",
    "LATE_HEADER",
    "LATE_KEY",
    "NAME_KEY",
    "OFFLINE_PRIORITY",
    "OWNER_KEY",
    "PARAMS_KEY",
    "SERVER_KEY",
    "SERVICE_TIERS",
    "SIGNS",
    "SLO_FIELDS",
    "SLO_HEADERS",
    "USAGE_HEADER",
    "USAGE_KEY",
    "Bounds",
    "Wish",
    "check_sampling_params",
    "class_of_priority",
    "hint_of_params",
    "map_targets",
    "params_of_slo",
    "parse_hint",
    "parse_http",
    "parse_priority",
    "parse_slo",
    "priority_for",
    "server_params",
    "slo_of_params",
    "with_server_params",
    "with_slo",
    "without_targets",
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

HINT_KEY = "output_tokens_hint"
"""Key in ``custom_params["cosched"]`` of the output that the client expects [tokens]."""

MOST_HINT = 2**31

_LEAST_NUMBER = 1e-300
"""Smaller targets count as 0: in seconds they might be."""

LATE_HEADER = "x-cosched-late"
"""Of a request: the reply shall say whether the TTFT target was out of reach; of that reply: why it
was, or ``no``."""

LATE_KEY = "cosched_late"
"""In the ``meta_info`` of SGLang's replies inside the server: a list with a `LateReason`."""

MAX_TOKENS_KEY = "cosched_max_tokens"
"""In the generation config of a model: reply tokens of a request that names no limit."""

FLEX = "flex"

SERVICE_TIERS: Mapping[str, RequestClass | None] = {
    "auto": None,
    "default": None,
    FLEX: RequestClass.OFFLINE,
    "priority": None,
    "scale": None,
}
"""OpenAI's values of ``service_tier`` and the class they ask for; None: they say nothing."""

ANTHROPIC_SERVICE_TIERS: Mapping[str, RequestClass | None] = {
    "auto": None,
    FLEX: RequestClass.OFFLINE,
    "standard_only": None,
}
"""Anthropic's values, and ``flex``."""

GRANTED_TIERS: Mapping[RequestClass, str] = {
    RequestClass.ONLINE: "default",
    RequestClass.OFFLINE: FLEX,
}
"""What ``service_tier`` is in a reply."""

GATEWAY_PRIORITIES: Mapping[str, RequestClass | None] = {
    "bulk": RequestClass.OFFLINE,
    "default": None,
    "interactive": None,
    "system": None,
}
"""The classes of the SGLang model gateway, in its header ``x-smg-priority``; None: they say
nothing."""

GATEWAY_HEADER = "x-smg-priority"

VLLM_HEADER = "x-vllm-priority"
"""Of gateways in front of vLLM: an integer, lower is earlier, 0 without it; it stands before the
body's priority (vllm-project/vllm#51089). Here a higher one is earlier, so its sign changes."""

USAGE_HEADER = "x-cosched-usage"
"""Of a request: the ``usage`` of its reply shall say what it cost (`predict.cost_account`)."""

SERVER_KEY = "cosched_server"
"""In ``custom_params``: what the HTTP side tells the scheduler. Clients cannot set it."""

NAME_KEY, OWNER_KEY, USAGE_KEY, BEHIND_KEY = "name", "owner", "device_seconds", "behind"
"""In it: ``KEY/TENANT`` or ``KEY``, by the operator's names; the owner, where its key has no name
(`cosched.core.shares`); whether the reply says what it cost, which is also the field of ``usage``
and of the ``meta_info`` of SGLang's replies; of a line of a batch: lines that will come after it to
this server."""

SLO_HEADERS: Mapping[str, str] = {
    "x-slo-ttft-ms": "ttft_slo_ms",
    "x-slo-tpot-ms": "tpot_slo_ms",
}
"""Header -> key in ``custom_params["cosched"]``."""

SIGNS: Mapping[str, str] = {
    "service_tier": "the body's service_tier",
    "priority": "the body's priority",
    "class_header": GATEWAY_HEADER,
    "priority_header": VLLM_HEADER,
    "target_headers": ", ".join(SLO_HEADERS),
    "body_targets": f'custom_params["{PARAMS_KEY}"], the hint included',
}
"""What may say something about class and targets; an operator may have each ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Within what targets are taken at their word. A tighter one is raised to the floor, a looser
    one lowered to the ceiling; None: there is no such bound."""

    floors: Slo = field(default_factory=Slo)
    ceilings: Slo = field(default_factory=Slo)

    @property
    def is_bounding(self) -> bool:
        return self.floors != Slo() or self.ceilings != Slo()

    def clamp(self, slo: Slo) -> Slo:
        """The targets that are granted. One that is not named stays unnamed."""
        names = (name for name, _ in SLO_FIELDS.values())
        return Slo(**{name: self._clamp(name, getattr(slo, name)) for name in names})

    def _clamp(self, name: str, value: float | None) -> float | None:
        if value is None:
            return None
        floor, ceiling = getattr(self.floors, name), getattr(self.ceilings, name)
        if floor is not None and value < floor:
            return float(floor)
        return float(ceiling) if ceiling is not None and value > ceiling else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an HTTP request says about its class and its targets.

    offline   the service tier or the gateway's header says so
    priority  the body's, or None
    tier      the service tier, if it says nothing of the class
    gateway_priority  that of vLLM's header, as a priority here; the body's and the tier are not
              read then
    slo       targets from the headers and, over them, from the body's ``custom_params``; under the
              keys of ``custom_params["cosched"]``
    asks_late  the reply shall say whether its TTFT target was out of reach
    asks_usage  the reply shall say what the request cost
    only      the one class that its API key may have, None: any
    """

    offline: bool = False
    priority: int | None = None
    tier: str | None = None
    gateway_priority: int | None = None
    slo: Mapping[str, Any] = field(default_factory=dict)
    asks_late: bool = False
    asks_usage: bool = False
    only: RequestClass | None = None

    @property
    def request_class(self) -> RequestClass:
        return class_of_priority(priority_for(self, None))


def class_of_priority(priority: int | None) -> RequestClass:
    return RequestClass.OFFLINE if priority is not None and priority < 0 else RequestClass.ONLINE


def parse_http(
    body: Any,
    headers: Mapping[str, str],
    *,
    tiers: Mapping[str, RequestClass | None] = SERVICE_TIERS,
    ignored: Set[str] = frozenset(),
) -> Wish:
    """The wish of a request whose JSON body is `body` (None without one). Mutates nothing.

    headers  looked up by lower-case name
    tiers    what ``service_tier`` may be on this endpoint
    ignored  `SIGNS` that are not read

    RequestError names the field, key or header that is wrong.
    """
    offline = False
    gateway = None if "class_header" in ignored else headers.get(GATEWAY_HEADER)
    if gateway is not None:
        offline = _is_offline(gateway.strip().lower(), GATEWAY_PRIORITIES, field=GATEWAY_HEADER)
    said = None if "priority_header" in ignored else headers.get(VLLM_HEADER)
    gateway_priority = None if said is None else _vllm_priority(said.strip())
    asks_late, asks_usage = (
        _is_on(headers.get(name, "0").strip(), field=name) for name in (LATE_HEADER, USAGE_HEADER)
    )
    slo: dict[str, Any] = {}
    if "target_headers" not in ignored:
        slo = {
            key: parse_positive(_number(text, field=header), field=header)
            for header, key in SLO_HEADERS.items()
            if (text := headers.get(header)) is not None
        }
    if not isinstance(body, Mapping):
        return Wish(
            offline=offline,
            gateway_priority=gateway_priority,
            slo=slo,
            asks_late=asks_late,
            asks_usage=asks_usage,
        )
    is_read = gateway_priority is None and "priority" not in ignored
    priority = parse_priority(body.get("priority")) if is_read else None
    tier = None if "service_tier" in ignored else body.get("service_tier")
    if tier is not None and _is_offline(tier, tiers, field="service_tier"):
        if priority is not None and class_of_priority(priority) is RequestClass.ONLINE:
            raise RequestError(
                "service_tier",
                f"{tier!r} means offline, but priority {priority} means online; "
                "leave one out, or give a priority below 0",
            )
        offline = True
    if "body_targets" not in ignored:
        slo |= _cosched_params(body.get("custom_params"), field="custom_params")
        check_sampling_params(body.get("sampling_params"))
    return Wish(
        offline=offline,
        priority=priority,
        tier=None if offline or gateway_priority is not None else tier,
        gateway_priority=gateway_priority,
        slo=slo,
        asks_late=asks_late,
        asks_usage=asks_usage,
    )


def parse_priority(value: Any, *, field: str = "priority") -> int | None:
    """A priority as a client sent it. RequestError unless it is an integer or absent."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(field, f"must be an integer, not {shown(value)}")
    return value


def priority_for(wish: Wish, priority: int | None) -> int | None:
    """The priority that a request takes to the scheduler. `priority` is what SGLang has for it:
    the body's, unless the endpoint drops it or one of SGLang's own headers overrides it."""
    if wish.gateway_priority is not None:
        priority = wish.gateway_priority
    if priority is None:
        priority = wish.priority
    found = class_of_priority(priority)
    wanted = RequestClass.OFFLINE if wish.offline else found
    if wish.only is not None:
        wanted = wish.only
    if wanted is found:
        return priority
    return OFFLINE_PRIORITY if wanted is RequestClass.OFFLINE else None


def parse_slo(params: Any, *, field: str = "custom_params.cosched") -> Slo:
    """The targets in ``custom_params["cosched"]``. RequestError names the wrong key, the hint's
    too."""
    if params is None:
        return Slo()
    if not isinstance(params, Mapping):
        raise RequestError(field, f"must be an object, not {shown(params)}")
    targets: dict[str, float] = {}
    parse_hint(params, field=field)
    for key, value in params.items():
        if key == HINT_KEY:
            continue
        if key not in SLO_FIELDS:
            keys = choices((*SLO_FIELDS, HINT_KEY))
            raise RequestError(f"{field}.{key}", f"unknown key; choose from {keys}")
        name, seconds = SLO_FIELDS[key]
        targets[name] = parse_positive(value, field=f"{field}.{key}") * seconds
    return Slo(**targets)


def parse_hint(params: Mapping[str, Any], *, field: str = "custom_params.cosched") -> int | None:
    """The output that the client expects [tokens], None: it says nothing. RequestError unless it
    is a positive integer."""
    if HINT_KEY not in params:
        return None
    value = params[HINT_KEY]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MOST_HINT:
        raise RequestError(
            f"{field}.{HINT_KEY}",
            f"must be a whole number of tokens from 1 to {MOST_HINT - 1}, not {shown(value)}",
        )
    return value


def parse_positive(value: Any, *, field: str) -> float:
    """A positive finite number. RequestError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(field, f"must be a number, not {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not _LEAST_NUMBER <= number < math.inf:
        raise RequestError(field, f"must be positive and finite, not {shown(value)}")
    return number


def check_sampling_params(sampling_params: Any, *, field: str = "sampling_params") -> None:
    """RequestError unless the targets in SGLang's sampling parameters (one object, a list of
    them, or None) are valid. Everything else in them is SGLang's to check."""
    if isinstance(sampling_params, list):
        for i, params in enumerate(sampling_params):
            check_sampling_params(params, field=f"{field}[{i}]")
    elif isinstance(sampling_params, Mapping):
        _cosched_params(sampling_params.get("custom_params"), field=f"{field}.custom_params")


def with_slo(sampling_params: Any, slo: Mapping[str, Any]) -> Any:
    """Checked sampling parameters with the targets `slo` added where they set none of their own.
    Mutates nothing."""
    if not slo:
        return sampling_params
    return map_targets(sampling_params, lambda own: {**slo, **own})


def map_targets(
    sampling_params: Any, granted: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Any:
    """Checked sampling parameters with the targets that `granted` makes of their own. Mutates
    nothing."""
    return _with_custom(sampling_params, PARAMS_KEY, lambda own: granted(own or {}))


def without_targets(sampling_params: Any) -> Any:
    """Sampling parameters, checked or not, without targets and hints. Mutates nothing."""
    return _with_custom(sampling_params, PARAMS_KEY, lambda own: {})


def with_server_params(sampling_params: Any, told: Mapping[str, Any]) -> Any:
    """Sampling parameters, checked or not, in which `told` is all that the HTTP side tells the
    scheduler. Mutates nothing."""
    return _with_custom(sampling_params, SERVER_KEY, lambda own: told)


def _with_custom(sampling_params: Any, key: str, value: Callable[[Any], Mapping[str, Any]]) -> Any:
    """Sampling parameters with `value` of what their ``custom_params`` have under `key`, or without
    the key where that is empty. What is no object stays: SGLang refuses it."""
    if isinstance(sampling_params, list):
        return [_with_custom(params, key, value) for params in sampling_params]
    params = {} if sampling_params is None else sampling_params
    custom = params.get("custom_params") if isinstance(params, Mapping) else params
    custom = {} if custom is None else custom
    if not isinstance(custom, Mapping):
        return sampling_params
    new = value(custom.get(key))
    if new == custom.get(key, {}):
        return sampling_params
    others = {name: each for name, each in custom.items() if name != key}
    return {**params, "custom_params": {**others, key: new} if new else others}


def server_params(custom_params: Any) -> Mapping[str, Any]:
    """What the HTTP side told the scheduler of a request."""
    told = custom_params.get(SERVER_KEY) if isinstance(custom_params, Mapping) else None
    return told if isinstance(told, Mapping) else {}


def slo_of_params(custom_params: Any) -> Slo:
    """The targets of a request inside the scheduler. What the HTTP layer let through is valid; a
    request that came another way (an embedded engine) and is not, has no targets."""
    try:
        return parse_slo((custom_params or {}).get(PARAMS_KEY))
    except RequestError:
        return Slo()


def hint_of_params(custom_params: Any) -> int | None:
    """The hint of a request inside the scheduler; None where it is not valid (`slo_of_params`)."""
    try:
        return parse_hint((custom_params or {}).get(PARAMS_KEY) or {})
    except (AttributeError, RequestError, TypeError):
        return None


def params_of_slo(slo: Slo) -> dict[str, float]:
    """The inverse of `parse_slo`: what to put into ``custom_params["cosched"]``; empty if none."""
    targets = {key: (getattr(slo, name), unit) for key, (name, unit) in SLO_FIELDS.items()}
    return {key: value / unit for key, (value, unit) in targets.items() if value is not None}


def _cosched_params(custom_params: Any, *, field: str) -> Mapping[str, Any]:
    if custom_params is None:
        return {}
    if not isinstance(custom_params, Mapping):
        raise RequestError(field, f"must be an object, not {shown(custom_params)}")
    params = custom_params.get(PARAMS_KEY)
    parse_slo(params, field=f"{field}.{PARAMS_KEY}")
    return params or {}


def _is_offline(name: Any, classes: Mapping[str, RequestClass | None], *, field: str) -> bool:
    if not isinstance(name, str) or name not in classes:
        raise RequestError(field, f"unknown value {shown(name)}; choose from {choices(classes)}")
    return classes[name] is RequestClass.OFFLINE


def _vllm_priority(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        message = f"must be an integer of at most 18 digits, not {shown(text)}"
        raise RequestError(VLLM_HEADER, message)
    return -int(text)


def _is_on(text: str, *, field: str) -> bool:
    if text not in ("0", "1"):
        raise RequestError(field, f"unknown value {shown(text)}; choose from 0, 1")
    return text == "1"


def _number(text: str, *, field: str) -> float:
    try:
        # An underscore between digits is Python's notation, not HTTP's.
        return float(text.replace("_", "?"))
    except ValueError:
        raise RequestError(field, f"must be a number, not {shown(text)}") from None
