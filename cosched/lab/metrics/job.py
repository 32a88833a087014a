"""Completion times and work of an offline job.

Doing cheap tokens first raises tokens per second, but not work per second: each line counts the
device seconds that it costs in the best batch of its job alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cosched.lab.metrics.records import RequestRecord
from cosched.lab.metrics.stats import Window
from cosched.predict.line_cost import LineCost

EDGE_SHARE = 0.1
"""Share of a run that the steady window leaves out at each end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A job: all offline requests of a run.

    makespan_s         first arrival to the end of the last line [s]; None: a line did not finish
    completion_mean_s  first arrival to the end of a line, mean over finished lines [s]
    completion_p95_s   95th percentile of the same [s]
    longest_wait_s     longest time from the arrival of a line at the server to its admission, or to
                       the end of the run [s]
    work_s             work of the whole job [device seconds]; None: costs are not known
    work_per_s         work done per second in the steady window; 1 is the best batch alone on the
                       whole device. None: costs are not known
    bound_per_s        upper bound of work per second in that window, beside the online requests of
                       the run; None: not known
    least_makespan_s   lower bound of the makespan beside them [s]; None: not known, or the job did
                       not finish
    """

    num_lines: int = 0
    num_finished: int = 0
    makespan_s: float | None = None
    completion_mean_s: float | None = None
    completion_p95_s: float | None = None
    longest_wait_s: float | None = None
    work_s: float | None = None
    work_per_s: float | None = None
    bound_per_s: float | None = None
    least_makespan_s: float | None = None

    @property
    def bound_ratio(self) -> float | None:
        """Work done as a share of the upper bound."""
        return self.work_per_s / self.bound_per_s if self.work_per_s and self.bound_per_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSummary:
    """Offline requests of one tenant.

    done_s  end of its last line [s]; None: one did not finish
    share   its part of the offline device seconds while all tenants had work, the cost of each
            request spread over the time that it ran; None: costs are not known
    """

    done_s: float | None
    share: float | None


def summarize_tenants(
    records: Sequence[RequestRecord], *, end_s: float
) -> dict[str, TenantSummary]:
    """By name; empty where requests have none. records: offline ones."""
    by_name: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.tenant:
            by_name.setdefault(record.tenant, []).append(record)
    done_s = {
        name: max(r.finish_s or 0.0 for r in mine) if all(r.is_finished for r in mine) else None
        for name, mine in by_name.items()
    }
    until_s = min((done for done in done_s.values() if done is not None), default=end_s)
    spent_s = {
        name: sum(_spent_s(record, until_s, end_s) for record in mine)
        for name, mine in by_name.items()
    }
    total_s = sum(spent_s.values())
    return {
        name: TenantSummary(done_s=done_s[name], share=spent / total_s if total_s else None)
        for name, spent in spent_s.items()
    }


def _spent_s(record: RequestRecord, until_s: float, end_s: float) -> float:
    """What it cost until then [s]."""
    if not record.device_s or record.admitted_s is None:
        return 0.0
    ran_s = max((end_s if record.finish_s is None else record.finish_s) - record.admitted_s, 1e-9)
    return record.device_s * min(max((until_s - record.admitted_s) / ran_s, 0.0), 1.0)


def steady_window(*, start_s: float, end_s: float) -> Window | None:
    """A run without its first and last tenth; None if nothing is left."""
    edge_s = EDGE_SHARE * (end_s - start_s)
    return Window(start_s=start_s + edge_s, end_s=end_s - edge_s) if edge_s > 0 else None


def summarize_job(
    records: Sequence[RequestRecord],
    *,
    end_s: float,
    costs: Mapping[str, LineCost] | None = None,
) -> JobSummary:
    """Summary of the offline records of a run that ended at `end_s` [s]. Unfinished lines count
    with the part that was done; failed lines do not count."""
    if not records:
        return JobSummary()
    start_s = min(record.arrival_s for record in records)
    ends = np.array([r.finish_s - start_s for r in records if r.is_finished and r.finish_s])
    is_done = len(ends) == len(records)
    return JobSummary(
        num_lines=len(records),
        num_finished=len(ends),
        makespan_s=float(ends.max()) if is_done else None,
        completion_mean_s=float(ends.mean()) if len(ends) else None,
        completion_p95_s=float(np.percentile(ends, 95)) if len(ends) else None,
        longest_wait_s=max(
            (end_s if r.admitted_s is None else r.admitted_s) - r.arrival_s for r in records
        ),
        work_per_s=_work_per_s(records, start_s, end_s, costs) if costs else None,
    )


def _work_per_s(
    records: Sequence[RequestRecord], start_s: float, end_s: float, costs: Mapping[str, LineCost]
) -> float | None:
    window = steady_window(start_s=start_s, end_s=end_s)
    if window is None:
        return None
    work_s = 0.0
    for record in records:
        cost = costs.get(record.rid)
        if cost is None or not record.ok or record.first_s is None:
            continue
        if record.first_s in window:
            work_s += cost.prompt_s
        times, weight = record.emissions(until_s=end_s)
        if len(times) > 1:
            work_s += cost.token_s * weight * int(window.holds(times[1:]).sum())
    return window.per_s(work_s)
