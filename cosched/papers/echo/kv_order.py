"""What of the KV Echo evicts first, and what it keeps for online requests."""

from __future__ import annotations

import math

from cosched.memory.demand import DemandReservation
from cosched.memory.node import KvNode
from cosched.memory.value import KvValue


class EchoOrder:
    """Echo §4.2: offline KV with future references, by their number, above finished online KV
    (0.5), above offline KV without (0). Running requests hold theirs."""

    def __init__(self, value: KvValue) -> None:
        pass

    def __call__(self, node: KvNode, now_s: float) -> float:
        references = node.passing + sum(node.stops.values())
        return float(references) if references else 0.5 * node.is_online

    def next_change_s(self, node: KvNode, now_s: float) -> float:
        return math.inf


class EchoReservation(DemandReservation):
    """Mean plus deviations of what online requests hold (§5.3)."""

    counts_returning = False
    default_window_s = 3600.0

    def tokens(self, total: int) -> int:
        return min(self._demand.threshold, total)
