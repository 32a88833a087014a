"""Tiers of online requests: which one a request has, and its targets.

A tier is named by its priority: a request has the tier with the greatest priority that is not above
its own. Tiers are kept from the highest priority to the lowest, so the index of a tier is its rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from cosched.core.request import Slo

__all__ = ["DEFAULT_TIER", "Tier", "allowed_tier", "tier_rank", "with_targets"]

DEFAULT_TIER = "default"
"""The tier of requests without a priority, if there is one of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """slo: of its requests that name no targets; None: the server's. share: least share of the
    iterations with online prefills in which its requests come first, while higher tiers have work.
    """

    name: str
    priority: int
    slo: Slo = field(default_factory=Slo)
    share: float = 0.05


def tier_rank(tiers: Sequence[Tier], priority: int | None) -> int:
    """The rank of a request's tier; 0 without tiers. priority: None: the request names none."""
    if priority is None:
        named = (rank for rank, tier in enumerate(tiers) if tier.name == DEFAULT_TIER)
        return next(named, tier_rank(tiers, 0))
    ranks = (rank for rank, tier in enumerate(tiers) if tier.priority <= priority)
    return next(ranks, max(len(tiers) - 1, 0))


def allowed_tier(tiers: Sequence[Tier], rank: int, allowed: Collection[str] | None) -> int:
    """The rank that is granted to a request that claims `rank`: its own, the next lower one that is
    allowed, or else the lowest that is. allowed: names of tiers; None: all."""
    ranks = [r for r, tier in enumerate(tiers) if allowed is None or tier.name in allowed]
    return next((r for r in ranks if r >= rank), ranks[-1])


def with_targets(slo: Slo, tier: Tier) -> Slo:
    """The targets of a request; where it names none, its tier's."""
    return replace(
        slo,
        ttft_s=tier.slo.ttft_s if slo.ttft_s is None else slo.ttft_s,
        tpot_s=tier.slo.tpot_s if slo.tpot_s is None else slo.tpot_s,
    )
