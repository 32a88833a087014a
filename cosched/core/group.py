"""Ranks that step together (DP attention): each has requests, KV memory and plans of its own, and
every iteration lasts as long as that of the slowest rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["NO_OTHERS", "OtherRanks", "RankNeeds", "others_of"]


class RankNeeds(NamedTuple):
    """What online requests of one rank need of the next iteration. The times are predicted [s].

    alone_s     of an iteration of its online decodes alone
    least_s     that online prefills beside these decodes may take in any case, at least `alone_s`
    required_s  of its online decodes and the online prefills that wait, whatever the targets allow;
                with `EngineCaps.takes_turns` 0 without prefills
    online_s    most, where there are online prefills
    offline_s   most, where there is offline work
    fills       1: offline requests wait to be computed, whatever time there is; else 0
    """

    alone_s: float = 0.0
    least_s: float = 0.0
    required_s: float = 0.0
    online_s: float = math.inf
    offline_s: float = math.inf
    fills: float = 0.0


class OtherRanks(NamedTuple):
    """What the other ranks of the group need of the next iteration. The times are predicted [s].

    alone_s    longest iteration of the online decodes of one of them
    taken_s    time that the online work of one of them takes in any case: free for this rank
    online_s   most, where there are online prefills
    offline_s  most, where there is offline work
    fills      offline requests of one of them wait to be computed
    must_decode  no rank may prefill now (`EngineCaps.takes_turns`)
    """

    alone_s: float = 0.0
    taken_s: float = -math.inf
    online_s: float = math.inf
    offline_s: float = math.inf
    fills: bool = False
    must_decode: bool = False

    def bound_online(self, own_s: float, least_s: float = 0.0) -> float:
        """The longest iteration with online prefills, of which this rank allows `own_s` [s].
        least_s: its `RankNeeds.least_s`."""
        return max(min(own_s, max(self.online_s, least_s)), self.taken_s)

    def bound_offline(self, own_s: float) -> float:
        """The longest iteration with offline work, of which this rank allows `own_s` [s]."""
        return max(min(own_s, self.offline_s), self.taken_s)


NO_OTHERS = OtherRanks()
"""The engine has one rank, or its ranks do not step together."""


def others_of(group: Sequence[RankNeeds], own: int) -> OtherRanks:
    """What the ranks of a group other than number `own` need."""
    online_s = min(needs.online_s for needs in group)
    others = [needs for rank, needs in enumerate(group) if rank != own]
    if not others:
        return NO_OTHERS
    return OtherRanks(
        alone_s=max(needs.alone_s for needs in others),
        taken_s=max(min(needs.required_s, max(online_s, needs.least_s)) for needs in others),
        online_s=min(needs.online_s for needs in others),
        offline_s=min(needs.offline_s for needs in others),
        fills=any(needs.fills for needs in others),
    )
