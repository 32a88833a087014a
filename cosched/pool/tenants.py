"""Fair shares of offline device time: whose waiting requests are asked first.

Idea         weighted fair queueing over the *device seconds* that requests cost
             (`cosched.predict.cost_account`), not over requests or tokens: neither tiny nor huge
             requests get a tenant more than its share. Each API key has a virtual time, what its
             requests have cost by its weight; so has each of its tenants, by theirs, and what is
             between them in a share path (`cosched.core.shares`). The key that is furthest behind
             is asked, and in it the tenant that is (start-time fair queueing, Goyal et al. 1996).
             An admission counts at once with what requests of the tenant cost
             in the mean: the charges follow while it runs.
Reuse        each tenant has a pool of its own, in prefix order. The tenant whose request was
             admitted last goes on while it is less than `lag_s` ahead of the others; after it, a
             tenant that shares the prefix in use begins with that.
Blocking     where no request of the tenant that is asked fits, the next ones are asked, but only
             those that are less than `lag_s` ahead of it: else small requests would take all the
             memory that large ones wait for.
Returning    a tenant that had nothing under way starts where the others are: what it did not use
             earlier is not saved. The tenants that have been idle for longest are forgotten where
             there are many: clients choose their names.
One tenant   its pool's order is the order, unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from cosched.core.shares import SharePath, share_of
from cosched.pool.order import PoolOrder
from cosched.pool.pool import PrefixRequest
from cosched.pool.prefix_pool import BucketStats, PoolStats, PrefixPool
from cosched.pool.radix import Shared

MOST_TENANTS = 64
"""With requests at a time; those beyond share the pool of their key."""

_IDLE_S = 600.0
"""After which a tenant without a request is forgotten, at the latest when another one comes."""

_ASKED = 16
"""Tenants that are compared at a time, those furthest behind first."""

_MOST_BLOCKED = 3
"""Tenants without a request that fits, after which a plan asks no more."""

_NEWEST = 0.1
"""Weight of the newest cost in the mean of a tenant."""


class PaidRequest(PrefixRequest, Protocol):
    """share_path: of its tenant; device_s: what it has cost so far [s]."""

    @property
    def share_path(self) -> SharePath: ...

    device_s: float


P = TypeVar("P", bound=PaidRequest)


@dataclass(slots=True, eq=False, kw_only=True)
class _Share:
    """A key, an owner or a tenant. virtual_s: charged seconds by weight; ahead_s: those that
    requests under way are expected to cost still, not by weight; num_active: requests that wait or
    run."""

    weight: float
    parent: _Share | None
    virtual_s: float = 0.0
    ahead_s: float = 0.0
    num_active: int = 0

    @property
    def position_s(self) -> float:
        return self.virtual_s + self.ahead_s / self.weight


@dataclass(slots=True, eq=False, kw_only=True)
class _Key(_Share):
    most_running: int | None
    num_running: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class _Tenant(_Share, Generic[P]):
    """line: from its key to itself; mean_s: cost of a request [s], None: none has ended; idle_s:
    since when it has had no request."""

    key: _Key
    pool: PrefixPool[P]
    line: tuple[_Share, ...] = ()
    mean_s: float | None = None
    idle_s: float = 0.0

    def charge(self, seconds: float) -> None:
        for share in self.line:
            share.virtual_s += seconds / share.weight


@dataclass(slots=True, eq=False)
class _UnderWay(Generic[P]):
    """An admitted request. expected_s: its whole cost; charged_s: what was charged."""

    tenant: _Tenant[P]
    request: P
    expected_s: float
    charged_s: float


@dataclass(eq=False, kw_only=True)
class TenantPool(Generic[P]):
    """Implements `cosched.pool.pool.OfflinePool`.

    make_pool     the pool of a tenant
    lag_s         see the module's docstring; None: tenants are not told apart
    weights       as of `cosched.core.shares.share_of`
    most_running  key -> most of its requests that run at a time

    As in `PrefixPool`, and O(tenants) for each pass and for each update of the time; an order asks
    `_ASKED` tenants.
    """

    make_pool: Callable[[], PrefixPool[P]]
    lag_s: float | None = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    most_running: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tenants: dict[SharePath, _Tenant[P]] = {}
        self.shares: dict[SharePath, _Share] = {}
        """Of keys and owners, by the beginnings of paths."""
        self.of: dict[str, _Tenant[P]] = {}
        """Waiting request -> tenant."""
        self.under_way: dict[str, _UnderWay[P]] = {}
        self.current: _Tenant[P] | None = None
        """The tenant of the last admission."""
        self._last: P | None = None
        self._now_s = 0.0

    # --- Requests ---

    def add(self, request: P) -> None:
        self._leave(request.rid)
        tenant = self._tenant_of(request)
        for share in tenant.line:
            if not share.num_active:
                self._charge_all()
                self._start(share)
            share.num_active += 1
        tenant.pool.add(request)
        self.of[request.rid] = tenant

    def remove(self, rid: str) -> P:
        tenant = self.of.pop(rid)
        request = tenant.pool.remove(rid)
        expected_s = self.expected_s(tenant)
        self.under_way[rid] = _UnderWay(tenant, request, expected_s, request.device_s)
        tenant.key.num_running += 1
        if tenant is not self.current and self._last is not None:
            tenant.pool.promote(self._last)
        self.current, self._last = tenant, request
        return request

    def abort(self, rid: str) -> P:
        tenant = self.of.pop(rid)
        self._count_out(tenant)
        return tenant.pool.abort(rid)

    def ended(self, num_tokens: int, seconds: float, rid: str = "") -> None:
        one = self._leave(rid)
        if one is None:
            return
        one.tenant.pool.ended(num_tokens, seconds)
        mean_s, cost_s = one.tenant.mean_s, one.request.device_s
        one.tenant.mean_s = cost_s if mean_s is None else mean_s + _NEWEST * (cost_s - mean_s)

    def promote(self, request: PrefixRequest) -> None:
        for tenant in self.tenants.values():
            tenant.pool.promote(request)

    def advance(self, now_s: float) -> None:
        self._now_s = now_s
        for tenant in self.tenants.values():
            tenant.pool.advance(now_s)
        if len(self.tenants) > 1:
            self._charge_all()

    def get(self, rid: str) -> P | None:
        tenant = self.of.get(rid)
        return None if tenant is None else tenant.pool.get(rid)

    def __contains__(self, rid: object) -> bool:
        return rid in self.of

    def __len__(self) -> int:
        return len(self.of)

    def order(self) -> PoolOrder[P] | TenantOrder[P]:
        if len(self.tenants) == 1 and not self.most_running:
            return next(iter(self.tenants.values())).pool.order()
        return TenantOrder(self)

    def future_references(self, packed: bytes, prefix_key: Hashable) -> list[Shared]:
        """As of `PrefixPool`, over all tenants."""
        found = [t.pool.future_references(packed, prefix_key) for t in self.tenants.values()]
        found = [shared for shared in found if shared]
        if len(found) < 2:
            return found[0] if found else []
        lengths = sorted({one.prefix_len for shared in found for one in shared})
        return [
            Shared(
                length,
                # Of each tenant those that share as much, or more.
                sum(
                    next((one.num_requests for one in shared if one.prefix_len >= length), 0)
                    for shared in found
                ),
            )
            for length in lengths
        ]

    def stats(self) -> PoolStats:
        """O(tenants x buckets)."""
        every = [tenant.pool.stats() for tenant in self.tenants.values()]
        if len(every) == 1:
            return every[0]
        ages = [one.oldest_age_s for one in every if one.oldest_age_s is not None]
        buckets: dict[int, list[BucketStats]] = {}
        for bucket in (bucket for one in every for bucket in one.buckets):
            buckets.setdefault(bucket.min_prompt_tokens, []).append(bucket)
        return PoolStats(
            num_requests=sum(one.num_requests for one in every),
            num_tokens=sum(one.num_tokens for one in every),
            oldest_age_s=max(ages, default=None),
            sharing_ratio=_mean([(one.num_tokens, one.sharing_ratio) for one in every]),
            expected_hit_ratio=_mean([(one.num_tokens, one.expected_hit_ratio) for one in every]),
            buckets=tuple(
                BucketStats(
                    min_prompt_tokens=low,
                    num_requests=sum(one.num_requests for one in some),
                    num_tokens=sum(one.num_tokens for one in some),
                    sharing_ratio=_mean([(one.num_tokens, one.sharing_ratio) for one in some]),
                )
                for low, some in sorted(buckets.items())
            ),
        )

    # --- Shares ---

    def expected_s(self, tenant: _Tenant[P]) -> float:
        """Cost of its next request: that of its earlier ones, else of those of all tenants [s]."""
        if tenant.mean_s is not None:
            return tenant.mean_s
        known = [one.mean_s for one in self.tenants.values() if one.mean_s is not None]
        return sum(known) / len(known) if known else 0.0

    def _tenant_of(self, request: P) -> _Tenant[P]:
        path = ("", "") if self.lag_s is None else request.share_path
        if path not in self.tenants:
            self._forget_idle()
            if len(self.tenants) >= MOST_TENANTS:
                path = (path[0], *[""] * (len(path) - 1))  # the pool of the key
        if path not in self.tenants:
            pool = self.make_pool()
            pool.advance(self._now_s)
            weights = share_of(path, self.weights).weights
            line: list[_Share] = []
            for depth, weight in enumerate(weights[:-1], start=1):
                line.append(self._share_at(path[:depth], weight, line[-1] if line else None))
            key = line[0]
            assert isinstance(key, _Key)
            tenant = _Tenant(weight=weights[-1], parent=line[-1], key=key, pool=pool)
            tenant.line = (*line, tenant)
            self.tenants[path] = tenant
        return self.tenants[path]

    def _share_at(self, path: SharePath, weight: float, parent: _Share | None) -> _Share:
        if path not in self.shares:
            if parent is None:
                most = self.most_running.get(path[0])
                self.shares[path] = _Key(weight=weight, parent=None, most_running=most)
            else:
                self.shares[path] = _Share(weight=weight, parent=parent)
        return self.shares[path]

    def _forget_idle(self) -> None:
        """Make room for a tenant: forget those that have been idle for long, and where that is not
        enough the one that has been for longest. Keys stay: the operator names them."""
        idle = [path for path, tenant in self.tenants.items() if not tenant.num_active]
        idle.sort(key=lambda path: self.tenants[path].idle_s)
        most_idle_s = self._now_s - _IDLE_S
        for path in idle:
            tenant = self.tenants[path]
            if len(self.tenants) < MOST_TENANTS and tenant.idle_s > most_idle_s:
                return
            del self.tenants[path]
            if self.current is tenant:
                self.current = self._last = None
            owner = path[:-1]
            if len(owner) > 1 and not any(other[:-1] == owner for other in self.tenants):
                del self.shares[owner]

    def _start(self, share: _Share) -> None:
        """It becomes active: where the others are that compete with it."""
        rivals = [
            other.virtual_s
            for other in (*self.shares.values(), *self.tenants.values())
            if other.num_active and other.parent is share.parent
        ]
        share.virtual_s = max(share.virtual_s, min(rivals, default=0.0))

    def _leave(self, rid: str) -> _UnderWay[P] | None:
        """A request is no longer under way: it has ended, or waits again."""
        one = self.under_way.pop(rid, None)
        if one is not None:
            one.tenant.charge(one.request.device_s - one.charged_s)
            one.tenant.key.num_running -= 1
            self._count_out(one.tenant)
        return one

    def _count_out(self, tenant: _Tenant[P]) -> None:
        for share in tenant.line:
            share.num_active -= 1
        tenant.idle_s = self._now_s

    def _charge_all(self) -> None:
        """Charge the requests under way for what they cost since. O(these)."""
        for share in (*self.shares.values(), *self.tenants.values()):
            share.ahead_s = 0.0
        for one in self.under_way.values():
            cost_s = one.request.device_s
            one.tenant.charge(cost_s - one.charged_s)
            one.charged_s = cost_s
            ahead_s = one.expected_s - cost_s
            if ahead_s > 0:
                for share in one.tenant.line:
                    share.ahead_s += ahead_s


class TenantOrder(Iterator[P]):
    """One pass over the pools of tenants, those that are furthest behind first; changes nothing."""

    knows_prefixes = True

    def __init__(self, pool: TenantPool[P]) -> None:
        self._pool = pool
        self._lag_s = pool.lag_s or 0.0
        self._current = pool.current
        self._orders: dict[_Tenant[P], PoolOrder[P]] = {}
        self._skips: list[tuple[P, int]] = []
        self._blocked: list[_Tenant[P]] = []
        waiting = [t for t in pool.tenants.values() if len(t.pool) and _may_run(t.key, 0)]
        self._position_s: dict[_Share, float] = {}
        for tenant in waiting:
            for share in tenant.line:
                if share not in self._position_s:
                    self._position_s[share] = share.position_s
        waiting.sort(key=self._positions)
        self._left, self._rest = waiting[:_ASKED], waiting[_ASKED:]
        self._num_taken: dict[_Key, int] = {}

    def __next__(self) -> P:
        while (tenant := self._asked()) is not None:
            request = next(self._order_of(tenant), None)
            if request is not None:
                self._count(tenant)
                return request
            self._left.remove(tenant)
        raise StopIteration

    def candidates(self, per_bucket: int) -> list[list[P]]:
        """The requests of the tenant that is asked."""
        while (tenant := self._asked()) is not None:
            found = self._order_of(tenant).candidates(per_bucket)
            if any(found):
                return found
            self._left.remove(tenant)
        return []

    def ask_next(self) -> bool:
        tenant = self._asked()
        if tenant is None:
            return False
        self._left.remove(tenant)
        self._blocked.append(tenant)
        other = self._asked()
        return (
            other is not None
            and len(self._blocked) < _MOST_BLOCKED
            and all(self._ahead_s(other, one) <= self._lag_s for one in self._blocked)
        )

    def take(self, request: P) -> None:
        tenant = self._pool.of[request.rid]
        self._order_of(tenant).take(request)
        self._count(tenant)

    def pass_over(self, request: P) -> None:
        self._order_of(self._pool.of[request.rid]).pass_over(request)

    @property
    def urgent_until_s(self) -> float:
        tenant = self._asked()
        return -math.inf if tenant is None else tenant.pool.urgent_until_s

    def skip_sharing(self, request: P, num_tokens: int) -> None:
        self._skips.append((request, num_tokens))
        for order in self._orders.values():
            order.skip_sharing(request, num_tokens)

    def num_shared(self, request: P) -> int:
        return self._order_of(self._pool.of[request.rid]).num_shared(request)

    def _order_of(self, tenant: _Tenant[P]) -> PoolOrder[P]:
        if tenant not in self._orders:
            order = self._orders[tenant] = tenant.pool.order()
            for request, num_tokens in self._skips:
                order.skip_sharing(request, num_tokens)
        return self._orders[tenant]

    def _asked(self) -> _Tenant[P] | None:
        if not self._left:
            self._left, self._rest = self._rest[:_ASKED], self._rest[_ASKED:]
        current = self._current
        if current in self._left and all(
            self._ahead_s(current, other) <= self._lag_s for other in self._left
        ):
            return current
        return min(self._left, key=self._positions, default=None)

    def _positions(self, tenant: _Tenant[P]) -> list[float]:
        return [self._position_s[share] for share in tenant.line]

    def _ahead_s(self, one: _Tenant[P], other: _Tenant[P]) -> float:
        """How much more virtual time one has used than the other, or their keys [s]."""
        for mine, its in zip(one.line, other.line, strict=False):
            if mine is not its:
                return self._position_s[mine] - self._position_s[its]
        return 0.0

    def _count(self, tenant: _Tenant[P]) -> None:
        """A request of it is next, or is admitted."""
        expected_s = self._pool.expected_s(tenant)
        for share in tenant.line:
            self._position_s[share] += expected_s / share.weight
        self._current = tenant
        self._num_taken[tenant.key] = num_taken = self._num_taken.get(tenant.key, 0) + 1
        if not _may_run(tenant.key, num_taken):
            for some in (self._left, self._rest):
                some[:] = [other for other in some if other.key is not tenant.key]


def _may_run(key: _Key, num_more: int) -> bool:
    """Whether one more of its requests may run beside these."""
    return key.most_running is None or key.num_running + num_more < key.most_running


def _mean(weighed: list[tuple[int, float]]) -> float:
    total = sum(weight for weight, _ in weighed)
    return sum(weight * value for weight, value in weighed) / total if total else 0.0
