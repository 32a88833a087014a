"""Goals on the latencies of online requests.

p99_ttft<=1000ms    mean, p50, p90, p95 or p99 of ttft, tpot, tbt or e2e; in ms or s
p99_tbt<=+5%        at most 5 % above the same run without offline requests (HyGen §5.1)
attainment>=99%     share of the online requests that meet their own targets
attainment>=-1%     at most 1 point below the same run without offline requests
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cosched.core.request import RequestClass
from cosched.errors import ConfigError
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.metrics.stats import Distribution
from cosched.lab.metrics.summary import Summary

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
METRICS = ("ttft", "tpot", "tbt", "e2e")

_LATENCY = re.compile(
    rf"({'|'.join(STATISTICS)})_({'|'.join(METRICS)})<=(\+?)(\d+(?:\.\d+)?)(ms|s|%)"
)
_ATTAINMENT = re.compile(r"attainment>=(-?)(\d+(?:\.\d+)?)%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One goal.

    text         as it was written, without blanks
    statistic    one of `STATISTICS`; None: an attainment
    metric       one of `METRICS`, or ``attainment``
    limit        maximum in seconds or minimum share (0-1); relative: maximum growth over the
                 baseline, or maximum difference below it (both 0-1)
    is_relative  to a run of the online requests alone
    """

    text: str
    statistic: str | None
    metric: str
    limit: float
    is_relative: bool = False

    def measure(self, summary: Summary, records: Iterable[RequestRecord]) -> float | None:
        """Value of a run, in seconds or as a share; None: nothing to measure.

        A request that is open when the run ends counts with its time so far if that raises the
        value, so that a request that is never served does not look fast.
        """
        if self.statistic is None:
            return summary.online.attainment.joint.ratio
        window, now_s = summary.window, summary.observed_until_s
        online = [
            r
            for r in records
            if r.request_class is RequestClass.ONLINE and r.ok and r.arrival_s in window
        ]
        done = [value for r in online for value in _finished(r, self.metric)]
        so_far = [value for r in online for value in _open(r, self.metric, now_s)]
        value = self._of(done)
        raised = [x for x in so_far if value is None or x > value]
        return self._of([*done, *raised])

    def bound(self, baseline: float | None) -> float | None:
        """The limit in the unit of `measure`; None: it needs a baseline and has none. baseline:
        value of a run without offline requests."""
        if not self.is_relative:
            return self.limit
        if baseline is None:
            return None
        if self.statistic is None:
            return baseline - self.limit
        return (1 + self.limit) * baseline

    def is_met(self, value: float | None, bound: float | None) -> bool:
        if value is None or bound is None:
            return False
        return value >= bound if self.statistic is None else value <= bound

    def _of(self, values: Sequence[float]) -> float | None:
        assert self.statistic is not None
        value: float | None = getattr(Distribution.of(values), self.statistic)
        return value


def attainment_goal(share: float) -> Goal:
    """At least this share of the online requests meet their targets."""
    text = f"attainment>={share:.0%}"
    return Goal(text=text, statistic=None, metric="attainment", limit=share)


def parse_goal(text: str) -> Goal:
    """ConfigError naming the syntax."""
    written = "".join(text.split())
    attainment = _ATTAINMENT.fullmatch(written)
    if attainment:
        is_relative, limit = bool(attainment[1]), float(attainment[2]) / 100
        if limit <= 1 and (is_relative or limit > 0):
            return Goal(
                text=written,
                statistic=None,
                metric="attainment",
                limit=limit,
                is_relative=is_relative,
            )
    latency = _LATENCY.fullmatch(written)
    if latency:
        statistic, metric, plus, number, unit = latency.groups()
        is_relative = unit == "%"
        if is_relative == bool(plus) and (is_relative or float(number) > 0):
            return Goal(
                text=written,
                statistic=statistic,
                metric=metric,
                limit=float(number) / {"ms": 1000, "s": 1, "%": 100}[unit],
                is_relative=is_relative,
            )
    raise ConfigError(
        f"{text!r} is not a goal; write STATISTIC_METRIC<=LIMIT with a statistic of "
        f"{', '.join(STATISTICS)}, a metric of {', '.join(METRICS)} and a limit such as 1000ms, "
        "1.5s or +5% (above online requests alone), or attainment>=99% or >=-1% (below them)"
    )


def _finished(record: RequestRecord, metric: str) -> list[float]:
    """The known values: one, none, or each gap."""
    if metric == "tbt":
        gaps: list[float] = np.diff(np.array(record.token_times or [])).tolist()
        return gaps
    if metric == "ttft":
        value = record.ttft_s
    elif not record.is_finished:
        value = None
    else:
        value = record.tpot_s if metric == "tpot" else record.e2e_s
    return [] if value is None else [value]


def _open(record: RequestRecord, metric: str, now_s: float) -> list[float]:
    """Time so far of an unfinished reply or gap."""
    if record.is_finished:
        return []
    first_s = record.first_s
    if metric == "e2e" or (metric == "ttft" and first_s is None):
        return [now_s - record.arrival_s]
    if metric == "ttft" or first_s is None:
        return []
    if metric == "tbt":
        return [now_s - record.token_times[-1]] if record.token_times else []
    return [(now_s - first_s) / max(record.num_output_tokens, 1)]
