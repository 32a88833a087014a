"""How many lines of which batches a server takes next.

Free places go by `shares`: to keys and tenants by their weights, then to late batches, and equally
to the others. Batches of a tenant keep in step: each takes the lines of its share from where the
first of them is in prefix order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from cosched.batch.config import BatchesConfig
from cosched.batch.data import Batch, Status
from cosched.batch.forecast import Demand, shares
from cosched.batch.leases import Claim
from cosched.batch.store import BatchStore
from cosched.core.shares import Share

_BEGUN_S = 3.0
"""In which a server takes no more than its part of a batch: the others look once in a step."""
_MAX_AHEAD = 512
_MOST_PEERS = 8
"""Batches of a tenant that servers divide together: each costs a claim of another two queries."""
_SHARES_AHEAD = 4
"""On a shared store a server sets aside a quarter of its part of what is left: all end together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The lines at the scheduler of one server.

    in_flight    batch -> their number
    num_servers  live servers that share the store
    late         batches that go before others of their tenant
    """

    in_flight: Mapping[str, int]
    num_servers: int = 1
    late: Container[str] = ()

    @property
    def num(self) -> int:
        return sum(self.in_flight.values())


class Claims:
    """Of one server. Reads the store only, so any thread may ask."""

    def __init__(
        self, store: BatchStore, config: BatchesConfig, share: Callable[[str, str], Share]
    ) -> None:
        """share: owner and tenant of a batch -> its share"""
        self._store = store
        self._config = config
        self._share = share

    def are_due(self, num_in_flight: int) -> bool:
        """Whether so few lines are at the scheduler that more are taken: a page at a time."""
        return num_in_flight <= self._config.low_watermark

    def next(self, found: Sequence[Batch], here: Here) -> list[Claim]:
        """found: batches in progress, oldest first"""
        taken = self._store.num_taken()
        demands = [self._demand(batch, here, taken.get(batch.id, 0)) for batch in found]
        num_free = self._config.high_watermark - here.num
        limits = shares(demands, num_free=num_free)
        num_left = {batch.id: batch.num_left for batch in found}
        leaders: dict[tuple[str, ...], str] = {}
        tenants: dict[tuple[str, ...], list[str]] = {}
        for one in demands:
            tenants.setdefault(one.share.path, []).append(one.batch_id)
        claims = []
        for one in sorted(demands, key=lambda it: math.inf if it.due is None else it.due):
            name = one.batch_id
            if not (limits.get(name) or here.in_flight.get(name)):
                continue
            leader = leaders.setdefault(one.share.path, name)
            if name in limits:
                claims.append(
                    Claim(
                        batch_id=name,
                        limit=limits[name],
                        num_ahead=_num_ahead(num_left[name], here.num_servers),
                        leader=leader,
                        most_behind=self._config.high_watermark,
                        peers=tuple(
                            peer for peer in tenants[one.share.path][:_MOST_PEERS] if peer != name
                        ),
                    )
                )
        return claims

    def _demand(self, batch: Batch, here: Here, num_taken: int) -> Demand:
        num_here = here.in_flight.get(batch.id, 0)
        num_in_flight = max(num_here, num_taken)
        num_waiting = batch.num_left - num_in_flight
        if self._store.now() - batch.times[Status.IN_PROGRESS] < _BEGUN_S:
            part = math.ceil(batch.num_left / here.num_servers)
            num_waiting = min(num_waiting, part - num_here)
        return Demand(
            batch_id=batch.id,
            share=self._share(batch.owner, batch.tenant),
            num_in_flight=num_in_flight,
            num_waiting=num_waiting,
            due=batch.expires_at if batch.id in here.late else None,
        )


def _num_ahead(num_left: int, num_servers: int) -> int:
    """Lines of a batch that one server sets aside."""
    return 0 if num_servers < 2 else min(num_left // (_SHARES_AHEAD * num_servers), _MAX_AHEAD)
