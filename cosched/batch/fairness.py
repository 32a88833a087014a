"""How many lines each batch may send next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One batch: its lines under way, and those that wait.

    tenant  who shares with whom
    weight  of its tenant: how large its share is beside the others'
    due     None, or of one that is late when its window ends: the earliest goes first
    """

    batch_id: str
    tenant: tuple[str, str]
    num_under_way: int
    num_waiting: int
    weight: float = 1.0
    due: float | None = None


def shares(demands: Sequence[Demand], *, room: int) -> dict[str, int]:
    """Batch -> lines to take of it, `room` in all if so many wait.

    Each goes to the tenant that has the fewest under way for its weight, and there to the late
    batch that is due first; without a late one to the batch that has the fewest; the earlier one of
    equals. So tenants have shares by their weights, however many batches they have and however
    short their windows are, and what one cannot use goes to the others.
    """
    by_tenant: Counter[tuple[str, str]] = Counter()
    for one in demands:
        by_tenant[one.tenant] += one.num_under_way
    given: Counter[str] = Counter()
    for _ in range(room):
        left = [one for one in demands if given[one.batch_id] < one.num_waiting]
        if not left:
            break
        next_one = min(
            left,
            key=lambda one: (
                by_tenant[one.tenant] / one.weight,
                math.inf if one.due is None else one.due,
                one.num_under_way + given[one.batch_id],
            ),
        )
        by_tenant[next_one.tenant] += 1
        given[next_one.batch_id] += 1
    return dict(given)
