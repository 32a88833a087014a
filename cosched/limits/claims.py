"""The key ``claims`` of ``COSCHED_CONFIG``: what clients may ask for (docs/api.md).

Bounds of targets, signs that are ignored, and limits per API key. What clients can ask for is in
`cosched.wire`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from cosched.core.request import RequestClass, Slo
from cosched.core.tiers import Tier, allowed_tier, tier_rank
from cosched.errors import ConfigError, LimitError, RequestError, choices
from cosched.wire import (
    SIGNS,
    SLO_FIELDS,
    Bounds,
    Wish,
    class_of_priority,
    parse_slo,
    priority_for,
)

ANY_KEY = "*"
"""In ``keys``: every key without an entry of its own, and requests without one."""

RETRY_AFTER_S: Mapping[RequestClass, int] = {RequestClass.ONLINE: 1, RequestClass.OFFLINE: 10}
"""For a client above a limit: a chat ends within seconds, a batch takes longer."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class TargetLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value per target; absent: no limit.

    ttft_ms     to the first token [ms]
    tpot_ms     from token to token [ms]
    deadline_s  to the end of the reply [s]
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, not {value}")

    def slo(self) -> Slo:
        values = (self.ttft_ms, self.tpot_ms, self.deadline_s)
        units = zip(SLO_FIELDS.values(), values, strict=True)
        return Slo(**{name: None if v is None else v * unit for (name, unit), v in units})


class KeyClaims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What requests with one API key may have.

    name           of its owner, in what requests cost (docs/operate.md); absent: the name in
                   `batches.owners`, or the first digits of its digest
    request_class  the class of all its requests, whatever they ask for
    tiers          tiers that its online requests may claim; a request that claims another gets the
                   next lower one of these, or the lowest. Absent: all, and for `*` the tier of
                   requests that claim none and those below it
    floors         floors of their targets, if above the server's
    ceilings       ceilings of their targets, if below the server's
    max_online     most online sequences in flight at a time; one more gets 429
    max_offline    most offline sequences in flight; one more gets 429. Lines of batches are not
                   counted; 0 means no batches either
    max_running_offline  most offline requests of its owner that run at a time, lines of batches
                   included; others wait
    """

    name: str | None = None
    request_class: Literal["online", "offline"] | None = msgspec.field(name="class", default=None)
    tiers: tuple[str, ...] | None = None
    floors: TargetLimits = TargetLimits()
    ceilings: TargetLimits = TargetLimits()
    max_online: int | None = None
    max_offline: int | None = None
    max_running_offline: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_online", "max_offline", "max_running_offline"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, not {value}")
        if self.tiers == ():
            raise ValueError("tiers must name at least one tier")
        if self.name is not None:
            check_name(self.name)
        _check_order(self.bounds())

    def bounds(self) -> Bounds:
        return Bounds(floors=self.floors.slo(), ceilings=self.ceilings.slo())

    def limit(self, request_class: RequestClass) -> int | None:
        return self.max_online if request_class is RequestClass.ONLINE else self.max_offline


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients may ask for.

    floor_ratio  floor of TTFT and TPOT where `floors` names none, as a share of the server's own
                 targets. The tightest target of a batch paces all of it
    floors       tightest targets; absent, a deadline's is that of TTFT
    ceilings     loosest targets
    ignore       signs of class and targets that are not read (docs/api.md)
    keys         API key, or ``sha256:`` and its hex digest -> its claims; ``*``: all other keys
    """

    floor_ratio: float = 0.25
    floors: TargetLimits = TargetLimits()
    ceilings: TargetLimits = TargetLimits()
    ignore: tuple[str, ...] = ()
    keys: dict[str, KeyClaims] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.floor_ratio <= 1:
            raise ValueError(f"floor_ratio must be in [0, 1], not {self.floor_ratio}")
        for sign in self.ignore:
            if sign not in SIGNS:
                raise ValueError(f"ignore: unknown sign {sign!r}; choose from {choices(SIGNS)}")
        # The environment of the server's processes must not have keys in clear text.
        hashed = {
            key if key == ANY_KEY else configured_digest(key, "keys"): it
            for key, it in self.keys.items()
        }
        if len(hashed) != len(self.keys):
            raise ValueError("keys: one key is there twice, in clear text and as sha256")
        msgspec.structs.force_setattr(self, "keys", hashed)

    @property
    def ignored(self) -> frozenset[str]:
        return frozenset(self.ignore)

    def bounds(self, server: Slo) -> Bounds:
        """Of any request; `server`: its own targets."""
        own = self.floors.slo()
        ttft_s, tpot_s = own.ttft_s, own.tpot_s
        if ttft_s is None and server.ttft_s is not None:
            ttft_s = self.floor_ratio * server.ttft_s
        if tpot_s is None and server.tpot_s is not None:
            tpot_s = self.floor_ratio * server.tpot_s
        deadline_s = ttft_s if own.deadline_s is None else own.deadline_s
        floors = Slo(ttft_s=ttft_s, tpot_s=tpot_s, deadline_s=deadline_s)
        bounds = Bounds(floors=floors, ceilings=self.ceilings.slo())
        _check_order(bounds)
        return bounds


def digest_of(key: str) -> str:
    """The digest of a key that a client sends. A digest is no key: its sender has only read the
    configuration."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def hex_digest(key: str) -> str:
    """Under which files and batches of a key are kept; "" without a key."""
    return digest_of(key).removeprefix("sha256:") if key else ""


def configured_digest(key: str, field: str) -> str:
    """The digest of a key in this field of the configuration, where it may be a digest already."""
    if not key.startswith("sha256:"):
        return digest_of(key)
    if not _DIGEST.fullmatch(key):
        raise ValueError(f"{field}: after 'sha256:' come 64 hexadecimal digits in lower case")
    return key


def check_name(name: str) -> None:
    """Of the owner of API keys: it stands before ``/`` and a tenant."""
    if "/" in name:
        raise ValueError(f"the name {name!r} of an API key's owner must not have a slash")


def presented_key(headers: Mapping[str, str]) -> str:
    """The API key of a request; empty: none. `headers` are looked up by lower-case name."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip()


def _check_order(bounds: Bounds) -> None:
    for key, (name, unit) in SLO_FIELDS.items():
        floor, ceiling = getattr(bounds.floors, name), getattr(bounds.ceilings, name)
        if floor is not None and ceiling is not None and floor > ceiling:
            raise ValueError(
                f"{key}: the floor {floor / unit:g} is above the ceiling {ceiling / unit:g}"
            )


def read_claims(text: str, *, source: str) -> Claims:
    """Claims from JSON, or from the file of that name. ConfigError names `source`."""
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{source} is neither a JSON object nor a readable file: {text!r} "
                f"({error.strerror})"
            ) from None
    try:
        return msgspec.json.decode(text, type=Claims)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: {error}") from None


@dataclass(slots=True, kw_only=True)
class Grant:
    """What one HTTP request was granted, until it ends.

    wish    its wish, within its key's claims
    bounds  of its key's targets; the scheduler applies the server's
    slo     its targets within both
    tier    name of the tier of an online request; "": there are none
    key     its entry in ``keys``
    name    of the owner of its API key, and of a tenant; empty: none is known
    owner   of files and batches, where its key has no name (`cosched.core.shares`)
    admitted  most sequences that it was admitted with
    taken   sequences that it counts as now
    outlives_reply  it goes on when its reply has ended: a response in the background
    """

    wish: Wish
    bounds: Bounds = field(default_factory=Bounds)
    slo: Slo = field(default_factory=Slo)
    tier: str = ""
    key: str | None = None
    name: str = ""
    owner: str = ""
    admitted: int = 0
    taken: int = 0
    outlives_reply: bool = False

    @property
    def request_class(self) -> RequestClass:
        return self.wish.request_class


class KeyGate:
    """Enforces the claims of API keys. One per process that serves HTTP."""

    def __init__(self, claims: Claims, server: Slo, tiers: Sequence[Tier] = ()) -> None:
        """tiers: of online requests, from the highest to the lowest."""
        self.claims = claims
        self._tiers = tiers
        self._bounds = claims.bounds(server)
        self._in_flight: Counter[tuple[str, RequestClass]] = Counter()

    def grant(self, wish: Wish, headers: Mapping[str, str]) -> Grant:
        """What a request with `wish` may have. `headers` are looked up by lower-case name."""
        entry = self._entry(headers)
        bounds = Bounds()
        if entry is not None:
            key = self.claims.keys[entry]
            bounds = key.bounds()
            if key.request_class is not None:
                wish = replace(wish, only=RequestClass(key.request_class))
        slo = self._bounds.clamp(bounds.clamp(parse_slo(wish.slo)))
        return Grant(wish=wish, bounds=bounds, slo=slo, key=entry)

    def enter(self, wish: Wish, headers: Mapping[str, str], num_sequences: int) -> Grant:
        """Admit a request; `leave` must follow. LimitError if its key has too many in flight."""
        grant = self.grant(wish, headers)
        self.admit(grant, num_sequences)
        return grant

    def admit(self, grant: Grant, num_sequences: int) -> None:
        """A request goes to the scheduler as so many sequences. LimitError if its key has too many
        in flight; not for as many as it was admitted with before."""
        more = num_sequences - grant.taken
        if grant.key is None or more <= 0:
            return
        request_class = grant.request_class
        limit = self.claims.keys[grant.key].limit(request_class)
        in_flight = self._in_flight[grant.key, request_class]
        if limit is not None and num_sequences > grant.admitted and in_flight + more > limit:
            raise LimitError(
                f"this API key may have {limit} {request_class.value} sequences in flight; "
                f"it has {in_flight}, and this request asks for {num_sequences}",
                retry_after_s=RETRY_AFTER_S[request_class],
            )
        self._in_flight[grant.key, request_class] += more
        grant.taken = num_sequences
        grant.admitted = max(grant.admitted, num_sequences)

    def priority(self, grant: Grant, priority: int | None) -> int | None:
        """The priority that a request takes to the scheduler; notes its tier in `grant`. priority:
        what SGLang has for it."""
        wish, tiers = grant.wish, self._tiers
        priority = priority_for(wish, priority)
        if not tiers or class_of_priority(priority) is RequestClass.OFFLINE:
            return priority
        claimed = tier_rank(tiers, priority)
        named = next((r for r, tier in enumerate(tiers) if tier.name == wish.tier), claimed)
        if priority is not None and named != claimed:
            raise RequestError(
                "service_tier",
                f"{wish.tier!r} is not the tier of priority {priority}, which is "
                f"{tiers[claimed].name!r}; leave one out",
            )
        rank = allowed_tier(tiers, named, self._allowed_tiers(grant.key))
        grant.tier = tiers[rank].name
        return priority if priority is not None and rank == claimed else tiers[rank].priority

    def _allowed_tiers(self, entry: str | None) -> Sequence[str] | None:
        """None: all."""
        if entry is None:
            return None
        named = self.claims.keys[entry].tiers
        if named is None and entry == ANY_KEY:  # whom the operator does not know
            return [tier.name for tier in self._tiers[tier_rank(self._tiers, None) :]]
        return named

    def leave(self, grant: Grant) -> None:
        """Its sequences have ended. A second call does nothing."""
        if grant.key is not None:
            self._in_flight[grant.key, grant.request_class] -= grant.taken
        grant.taken = 0

    def _entry(self, headers: Mapping[str, str]) -> str | None:
        keys = self.claims.keys
        if not keys:
            return None
        presented = presented_key(headers)
        if presented and digest_of(presented) in keys:
            return digest_of(presented)
        return ANY_KEY if ANY_KEY in keys else None
