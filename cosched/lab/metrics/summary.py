"""Metrics of a run. docs/metrics.md defines each, with its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cosched.core.request import RequestClass, Slo
from cosched.lab.metrics.iterations import (
    HostSummary,
    IterationMetrics,
    IterationSummary,
    KvSummary,
)
from cosched.lab.metrics.job import (
    JobSummary,
    TenantSummary,
    summarize_job,
    summarize_tenants,
)
from cosched.lab.metrics.records import Floats, IterationLog, RequestRecord
from cosched.lab.metrics.slo import (
    ROUNDING_S,
    Attainment,
    JctTarget,
    Judgement,
    Verdict,
    judge,
    with_defaults,
)
from cosched.lab.metrics.stats import (
    EMPTY,
    Distribution,
    Window,
    last_event_s,
    ratio,
    to_dict,
)
from cosched.predict.line_cost import LineCost


@dataclass(frozen=True, slots=True, kw_only=True)
class AttainmentSummary:
    """Share of requests that met each target. tbt: share of gaps between tokens within the TPOT
    target. joint: all targets of a request. jct: EcoServe's satisfaction ratio."""

    ttft: Attainment
    tpot: Attainment
    tbt: Attainment
    deadline: Attainment
    joint: Attainment
    jct: Attainment


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassSummary:
    """One class of requests.

    Rates count all work done in the window. The rest is about the requests of the window: online
    requests that arrived in it, offline requests that were present in it.
    """

    num_requests: int
    num_finished: int
    num_failed: int
    num_unfinished: int
    ttft_s: Distribution
    missed_ttft_s: Distribution
    tpot_s: Distribution
    tbt_s: Distribution
    worst_tbt_s: Distribution
    e2e_s: Distribution
    normalized_latency_s: Distribution
    attainment: AttainmentSummary
    goodput_requests_per_s: float | None
    requests_per_s: float | None
    tokens_per_s: float | None
    output_tokens_per_s: float | None
    cached_tokens_per_s: float | None
    finished_tokens_per_s: float | None
    finished_output_tokens_per_s: float | None
    computed_tokens_per_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    hit_ratio: float | None
    num_lost_tokens: int | None
    num_preemptions: int
    num_preempted_requests: int
    num_recomputed_tokens: int
    recomputed_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Metrics over `window` of a run that was observed until `observed_until_s`. `job` and
    `tenants` are about the whole run. tiers: of online requests by priority, the highest first;
    empty if all are equal."""

    window: Window
    observed_until_s: float
    online: ClassSummary
    offline: ClassSummary
    job: JobSummary
    tenants: Mapping[str, TenantSummary]
    iterations: IterationSummary
    kv: KvSummary
    host: HostSummary
    tiers: Mapping[str, ClassSummary] = field(default_factory=dict)

    def to_dict(self, *, with_host: bool = True) -> dict[str, Any]:
        """Plain data for JSON: always the same keys, no NaN. Without ``host`` equal runs give equal
        bytes."""
        summary: dict[str, Any] = to_dict(self)
        if not with_host:
            del summary["host"]
        return summary


def summarize(
    records: Iterable[RequestRecord],
    iterations: IterationLog | None = None,
    *,
    window: Window | None = None,
    observed_until_s: float | None = None,
    default_slos: Mapping[RequestClass, Slo] | None = None,
    jct_target: JctTarget | None = None,
    line_costs: Mapping[str, LineCost] | None = None,
) -> Summary:
    """Metrics of a run. Mutates nothing; the order of the records does not matter.

    iterations        None: not known (a live server); metrics that need them are then None
    window            None: the whole run
    observed_until_s  end of observation [s], at which open requests are judged; None: the end of
                      the window or the last event, whichever is later
    default_slos      targets of requests that have none of their own
    line_costs        rid of an offline request -> its cost in the best batch of its job alone
    """
    records = list(records)
    log = IterationLog() if iterations is None else iterations
    window = Window.covering(records, log) if window is None else window
    if observed_until_s is None:
        observed_until_s = max(window.end_s, last_event_s(records, log))
    rows = IterationMetrics(log, window)
    slos = default_slos or {}

    def of_class(
        request_class: RequestClass, records: Sequence[RequestRecord], num_computed: int | None
    ) -> ClassSummary:
        mine = _ClassRecords(
            request_class=request_class,
            records=[r for r in records if r.request_class is request_class],
            window=window,
            now_s=observed_until_s,
        )
        default = slos.get(request_class, Slo())
        judgements = mine.judge(default, jct_target)
        return _class_summary(mine, judgements, default, num_computed)

    classes = {name: of_class(name, records, rows.computed_tokens(name)) for name in RequestClass}
    online = [r for r in records if r.request_class is RequestClass.ONLINE]
    offline = [r for r in records if r.request_class is RequestClass.OFFLINE]
    priorities = sorted({r.priority for r in online}, reverse=True)
    return Summary(
        window=window,
        observed_until_s=observed_until_s,
        online=classes[RequestClass.ONLINE],
        offline=classes[RequestClass.OFFLINE],
        job=summarize_job(offline, end_s=observed_until_s, costs=line_costs),
        tenants=summarize_tenants(offline, end_s=observed_until_s),
        iterations=rows.summary(),
        kv=rows.kv(),
        host=rows.host(),
        tiers={
            str(each): of_class(
                RequestClass.ONLINE, [r for r in online if r.priority == each], None
            )
            for each in (priorities if len(priorities) > 1 else ())
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Emissions:
    """Served tokens, each at the time at which it counts.

    A prompt counts as a whole at its first token, cached part included: before that preemption can
    undo it. Tokens of failed requests do not count.
    """

    prompt_times: Floats
    prompt_tokens: Floats
    output_times: Floats
    output_tokens: Floats


def served_tokens(records: Iterable[RequestRecord], *, until_s: float) -> Emissions:
    prompts: list[tuple[float, int]] = []
    times: list[Floats] = [np.empty(0)]
    weights: list[Floats] = [np.empty(0)]
    for r in records:
        if r.first_s is None or not r.ok:
            continue
        prompts.append((r.first_s, r.num_prompt_tokens))
        emitted, weight = r.emissions(until_s=until_s)
        times.append(emitted)
        weights.append(np.full(len(emitted), weight))
    pairs = np.array(prompts, dtype=np.float64).reshape(-1, 2)
    return Emissions(
        prompt_times=pairs[:, 0],
        prompt_tokens=pairs[:, 1],
        output_times=np.concatenate(times),
        output_tokens=np.concatenate(weights),
    )


class _ClassRecords:
    """The records of one class, and the subsets that the metrics are about."""

    def __init__(
        self,
        *,
        request_class: RequestClass,
        records: Sequence[RequestRecord],
        window: Window,
        now_s: float,
    ) -> None:
        self.records = records
        self.window = window
        self.now_s = now_s
        self._is_online = request_class is RequestClass.ONLINE
        self.population = [r for r in records if self._belongs(r)]
        self.unfailed = [r for r in self.population if r.ok]
        self.finished = [r for r in self.unfailed if self.counts(r.finish_s)]

    def _belongs(self, record: RequestRecord) -> bool:
        if self._is_online:
            return record.arrival_s in self.window
        gone = record.finish_s is not None and record.finish_s < self.window.start_s
        return record.arrival_s < self.window.end_s and not gone

    def counts(self, time_s: float | None) -> bool:
        """True if an event at this time is measured: online requests are followed to their end,
        offline requests to the end of the window."""
        return time_s is not None and (self._is_online or time_s in self.window)

    def gaps(self) -> Floats:
        """All gaps between consecutive tokens [s]."""
        parts = [np.empty(0)]
        for r in self.unfailed:
            if r.token_times is not None and len(r.token_times) > 1:
                times = np.array(r.token_times)
                gaps = np.diff(times)
                parts.append(gaps if self._is_online else gaps[self.window.holds(times[1:])])
        return np.concatenate(parts)

    def gap_attainment(self, default: Slo) -> Attainment:
        """Gaps between tokens against the TPOT target. A failed reply misses one more; the open gap
        of an open reply counts as missed once it is too long."""
        num_met = num_missed = num_undecided = 0
        for r in self.population:
            limit_s = with_defaults(r.slo, default).tpot_s
            if limit_s is None or r.token_times is None or not len(r.token_times):
                continue
            gaps = np.diff(np.array(r.token_times))
            num_in_time = int((gaps <= limit_s + ROUNDING_S).sum())
            num_met += num_in_time
            num_missed += len(gaps) - num_in_time + (not r.ok)
            if r.is_open:
                is_late = self.now_s - r.token_times[-1] > limit_s + ROUNDING_S
                num_missed += is_late
                num_undecided += not is_late
        return Attainment.counted(num_met, num_missed, num_undecided)

    def admitted(self) -> list[RequestRecord]:
        """Requests whose number of cached prompt tokens is known."""
        return [
            r
            for r in self.population
            if r.num_cached_tokens is not None
            and self.counts(r.first_s if r.admitted_s is None else r.admitted_s)
        ]

    def judge(
        self, default: Slo, jct_target: JctTarget | None
    ) -> list[tuple[RequestRecord, Judgement]]:
        return [
            (
                r,
                judge(r, with_defaults(r.slo, default), now_s=self.now_s, jct_target=jct_target),
            )
            for r in self.population
        ]


def _class_summary(
    mine: _ClassRecords,
    judgements: Sequence[tuple[RequestRecord, Judgement]],
    default: Slo,
    num_computed_tokens: int | None,
) -> ClassSummary:
    window, finished, unfailed = mine.window, mine.finished, mine.unfailed
    num_failed = len(mine.population) - len(unfailed)
    done = [r for r in mine.records if r.finish_s is not None and r.ok and r.finish_s in window]
    served = served_tokens(mine.records, until_s=mine.now_s)
    num_served_prompt = _sum_in(window, served.prompt_times, served.prompt_tokens)
    num_served_output = _sum_in(window, served.output_times, served.output_tokens)
    admitted = mine.admitted()
    num_prompt = sum(r.num_prompt_tokens for r in admitted)
    num_cached = sum(r.num_cached_tokens or 0 for r in admitted)
    num_recomputed = sum(r.num_recomputed_tokens for r in mine.population)

    return ClassSummary(
        num_requests=len(mine.population),
        num_finished=len(finished),
        num_failed=num_failed,
        num_unfinished=len(unfailed) - len(finished),
        ttft_s=_distribution(r.ttft_s for r in unfailed if mine.counts(r.first_s)),
        missed_ttft_s=_distribution(
            r.ttft_s
            for r, judgement in judgements
            if judgement.ttft is Verdict.MISSED and r.ok and mine.counts(r.first_s)
        ),
        tpot_s=_distribution(r.tpot_s for r in finished),
        tbt_s=Distribution.of(mine.gaps()),
        worst_tbt_s=_distribution(r.worst_tbt_s for r in finished),
        e2e_s=_distribution(r.e2e_s for r in finished),
        normalized_latency_s=_distribution(ratio(r.e2e_s, r.num_output_tokens) for r in finished),
        attainment=AttainmentSummary(
            tbt=mine.gap_attainment(default),
            **{
                target: Attainment.of(getattr(judgement, target) for _, judgement in judgements)
                for target in ("ttft", "tpot", "deadline", "joint", "jct")
            },
        ),
        goodput_requests_per_s=_goodput(mine, judgements),
        requests_per_s=window.per_s(len(done)),
        tokens_per_s=window.per_s(num_served_prompt + num_served_output),
        output_tokens_per_s=window.per_s(num_served_output),
        cached_tokens_per_s=window.per_s(
            sum(
                r.num_cached_tokens or 0
                for r in mine.records
                if r.ok and r.first_s is not None and r.first_s in window
            )
        ),
        finished_tokens_per_s=window.per_s(
            sum(r.num_prompt_tokens + r.num_output_tokens for r in done)
        ),
        finished_output_tokens_per_s=window.per_s(sum(r.num_output_tokens for r in done)),
        computed_tokens_per_s=window.per_s(num_computed_tokens),
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        hit_ratio=ratio(num_cached, num_prompt),
        num_lost_tokens=_num_lost(admitted),
        num_preemptions=sum(r.num_preemptions for r in mine.population),
        num_preempted_requests=sum(r.num_preemptions > 0 for r in mine.population),
        num_recomputed_tokens=num_recomputed,
        recomputed_ratio=_recomputed_ratio(finished),
    )


def _goodput(
    mine: _ClassRecords, judgements: Sequence[tuple[RequestRecord, Judgement]]
) -> float | None:
    if all(judgement.joint is None for _, judgement in judgements):
        return None
    num_good = sum(
        judgement.joint is Verdict.MET and mine.counts(record.finish_s)
        for record, judgement in judgements
    )
    return mine.window.per_s(num_good)


def _recomputed_ratio(finished: Iterable[RequestRecord]) -> float | None:
    """Share of prefill tokens that preemption caused."""
    known = [r for r in finished if r.num_cached_tokens is not None]
    again = sum(r.num_recomputed_tokens for r in known)
    once = sum(r.num_prompt_tokens - (r.num_cached_tokens or 0) for r in known)
    return ratio(again, once + again)


def _num_lost(admitted: Iterable[RequestRecord]) -> int | None:
    """None if not known for any request."""
    known = [r.num_lost_tokens for r in admitted if r.num_lost_tokens is not None]
    return sum(known) if known else None


def _distribution(values: Iterable[float | None]) -> Distribution:
    known = [value for value in values if value is not None]
    return Distribution.of(known) if known else EMPTY


def _sum_in(window: Window, times: Floats, amounts: Floats) -> float:
    return float(np.sort(amounts[window.holds(times)]).sum())
