"""The columns of a table of results. Definitions: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from cosched.lab.metrics.stats import ratio
from cosched.lab.metrics.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A number of a run, multiplied by `scale`, with `digits` digits after the point."""

    of: Callable[[Summary], float | None]
    digits: int = 1
    scale: float = 1.0

    def shown(self, summary: Summary) -> str:
        """Empty if the run has no such number."""
        value = self.of(summary)
        return "" if value is None else f"{self.scale * value:,.{self.digits}f}"


def _num_evicted(s: Summary) -> int | None:
    known = [n for n in (s.online.num_lost_tokens, s.offline.num_lost_tokens) if n is not None]
    return sum(known) if known else None


def _recomputed_ratio(s: Summary) -> float | None:
    """Of all prompt tokens that were computed."""
    both = (s.online, s.offline)
    again = sum(one.num_recomputed_tokens for one in both)
    once = sum(one.num_prompt_tokens - one.num_cached_tokens for one in both)
    return ratio(again, once + again)


def _tier(place: int, target: str) -> Callable[[Summary], float | None]:
    def met(s: Summary) -> float | None:
        tiers = [*s.tiers.values()]
        if place >= len(tiers):
            return None
        ratio: float | None = getattr(tiers[place].attainment, target).ratio
        return ratio

    return met


def _of_tenant(name: str, field: str, s: Summary) -> float | None:
    value: float | None = getattr(s.tenants.get(name), field, None)
    return value


COLUMNS: Mapping[str, Column] = {
    "both met %": Column(of=lambda s: s.online.attainment.joint.ratio, scale=100),
    "TTFT met %": Column(of=lambda s: s.online.attainment.ttft.ratio, scale=100),
    "TPOT met %": Column(of=lambda s: s.online.attainment.tpot.ratio, scale=100),
    "TBT met %": Column(of=lambda s: s.online.attainment.tbt.ratio, scale=100),
    **{
        f"tier {place + 1} {name} %": Column(of=_tier(place, target), scale=100)
        for name, target in (("met", "joint"), ("TTFT met", "ttft"), ("TPOT met", "tpot"))
        for place in range(3)
    },
    "JCT met %": Column(of=lambda s: s.online.attainment.jct.ratio, scale=100),
    "TTFT p50 s": Column(of=lambda s: s.online.ttft_s.p50, digits=2),
    "TTFT p99 s": Column(of=lambda s: s.online.ttft_s.p99, digits=2),
    "TTFT p50 ms": Column(of=lambda s: s.online.ttft_s.p50, digits=0, scale=1e3),
    "TTFT p99 ms": Column(of=lambda s: s.online.ttft_s.p99, digits=0, scale=1e3),
    "missed TTFT p99 s": Column(of=lambda s: s.online.missed_ttft_s.p99, digits=2),
    "TPOT p50 ms": Column(of=lambda s: s.online.tpot_s.p50, scale=1e3),
    "TPOT p99 ms": Column(of=lambda s: s.online.tpot_s.p99, scale=1e3),
    "TBT mean ms": Column(of=lambda s: s.online.tbt_s.mean, scale=1e3),
    "TBT p99 ms": Column(of=lambda s: s.online.tbt_s.p99, scale=1e3),
    "normalized latency ms": Column(of=lambda s: s.online.normalized_latency_s.mean, scale=1e3),
    "online req/s": Column(of=lambda s: s.online.requests_per_s, digits=2),
    "online output tokens/s": Column(of=lambda s: s.online.output_tokens_per_s, digits=0),
    "job done s": Column(of=lambda s: s.job.makespan_s),
    "not before s": Column(of=lambda s: s.job.least_makespan_s),
    "mean completion s": Column(of=lambda s: s.job.completion_mean_s),
    "p95 completion s": Column(of=lambda s: s.job.completion_p95_s),
    "longest wait s": Column(of=lambda s: s.job.longest_wait_s),
    "work/s": Column(of=lambda s: s.job.work_per_s, digits=3),
    "of bound %": Column(of=lambda s: s.job.bound_ratio, scale=100),
    "offline tokens/s": Column(of=lambda s: s.offline.tokens_per_s, digits=0),
    "offline req/s": Column(of=lambda s: s.offline.requests_per_s, digits=2),
    "online hit %": Column(of=lambda s: s.online.hit_ratio, scale=100),
    "offline hit %": Column(of=lambda s: s.offline.hit_ratio, scale=100),
    **{
        f"{name} {title}": Column(of=partial(_of_tenant, name, field), scale=scale)
        for name in ("alice", "bob", "mallory")
        for title, field, scale in (("share %", "share", 100.0), ("done s", "done_s", 1.0))
    },
    "evicted prompt tokens": Column(of=_num_evicted, digits=0),
    "preemptions": Column(
        of=lambda s: s.online.num_preemptions + s.offline.num_preemptions, digits=0
    ),
    "recomputed tokens": Column(
        of=lambda s: s.online.num_recomputed_tokens + s.offline.num_recomputed_tokens, digits=0
    ),
    "iteration error %": Column(of=lambda s: s.iterations.prediction_error_ratio.mean, scale=100),
    "recomputed %": Column(of=_recomputed_ratio, scale=100),
    "planning %": Column(
        of=lambda s: ratio(s.host.planning_s.mean, s.iterations.duration_s.mean),
        digits=0,
        scale=100,
    ),
    "planning p50 ms": Column(of=lambda s: s.host.planning_s.p50, digits=2, scale=1e3),
    "planning p99 ms": Column(of=lambda s: s.host.planning_s.p99, digits=2, scale=1e3),
}
"""By the names that suites, pages and tables use."""
