"""Runs judged by the time to the whole reply: what EcoServe's evaluation measures (§2.2, §4).

A run at a rate is sent requests for a time and then goes on until all are answered (`at_rate`), so
that the mean over its requests is that of all of them; rates of work are of the time in which they
were sent. `unloaded` runs have one request at a time, and give what targets are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cosched.errors import ConfigError
from cosched.metrics.records import Floats, IterationLog, RequestRecord
from cosched.metrics.slo import JctTarget
from cosched.metrics.summary import summarize
from cosched.metrics.window import Window
from cosched.simulation.run import RunResult, RunSpec, WorkloadSpec
from cosched.simulation.search import last_good, values_between

__all__ = [
    "NORMALIZED_LIMIT",
    "Measures",
    "Unloaded",
    "at_rate",
    "measure",
    "saturated",
    "sustained_rate",
    "unloaded",
    "unloaded_of",
]

NORMALIZED_LIMIT = 3.0
"""A rate is sustained while the mean normalized latency is at most so many times that of an
unloaded machine (own; EcoServe §4 compares "similar latencies")."""

_UNLOADED_RATE = 0.005
"""Requests/s of an unloaded run: no reply of these data sets takes a tenth of the time between
two of them."""

_ANSWERED_WITHIN = 8
"""A run at a rate ends after so many times as long as requests are sent, answered or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloaded:
    """What a request takes on a machine of its own, in the mean over a data set.

    prompt_s              arrival to first token [s]; EcoServe's t_p
    token_s               between two tokens [s]; t_g
    normalized_latency_s  arrival to end, per output token [s]
    """

    prompt_s: float
    token_s: float
    normalized_latency_s: float

    def target(self, scale: float = 2.0) -> JctTarget:
        return JctTarget(prompt_s=self.prompt_s, token_s=self.token_s, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """A run in numbers; shares are of 1, times in seconds, None where nothing has the measure.

    The first group is over the requests: JCT is arrival to end. Of the time in all JCTs,
    waiting_share was before the first admission, stopped_share between a stop and the next
    iteration, held_share between tokens without being stopped and without an iteration (KV kept).
    The second group is over the time in which requests were sent, its iterations and busy time.

    jct_met_share       met their JCT target; open ones missed it once it is over
    num_open            not answered when the run ended; no other number has them
    kv_share            of the pool, held by requests that were admitted and not stopped
    num_running         requests in an iteration, in the mean
    forward_tokens      tokens in an iteration, in the mean
    failed_share        of the iterations: before them somebody was stopped
    idle_share          of the iterations: nobody ended with them
    planning_share      host time of planning over busy time; None: not planned by cosched
    planning_p99_s      of an iteration, host time
    """

    num_requests: int
    num_open: int
    jct_met_share: float | None
    jct_s: float | None
    normalized_latency_s: float | None
    ttft_s: float | None
    tbt_s: float | None
    tbt_p5_s: float | None
    tbt_p95_s: float | None
    max_tbt_s: float | None
    waiting_share: float | None
    stopped_share: float | None
    held_share: float | None
    num_stops: int

    requests_per_s: float | None
    output_tokens_per_s: float | None
    kv_share: float | None
    num_running: float | None
    forward_tokens: float | None
    failed_share: float | None
    idle_share: float | None
    planning_share: float | None
    planning_p99_s: float | None


def unloaded(spec: RunSpec, *, num_requests: int = 100) -> RunSpec:
    """`spec` with one request at a time, as good as always."""
    online = replace(_online(spec), rate=_UNLOADED_RATE, num_requests=num_requests)
    return replace(spec, online=online, duration_s=2 * num_requests / _UNLOADED_RATE, jct=None)


def unloaded_of(result: RunResult) -> Unloaded:
    """ConfigError where no request has the measure."""
    online = result.summary.online
    values = (online.ttft_s.mean, online.tbt_s.mean, online.normalized_latency_s.mean)
    prompt_s, token_s, normalized_s = values
    if prompt_s is None or token_s is None or normalized_s is None:
        raise ConfigError("the unloaded run answered no request of two tokens or more")
    return Unloaded(prompt_s=prompt_s, token_s=token_s, normalized_latency_s=normalized_s)


def at_rate(spec: RunSpec, rate: float, *, duration_s: float) -> RunSpec:
    """`spec` with requests that come at this rate for so long, and are answered."""
    num_requests = max(round(rate * duration_s), 1)
    online = replace(_online(spec), rate=rate, num_requests=num_requests)
    return replace(spec, online=online, duration_s=_ANSWERED_WITHIN * duration_s)


def saturated(spec: RunSpec, rate: float, *, duration_s: float) -> RunSpec:
    """`spec` with more requests than it can serve, cut off where they end."""
    return replace(spec, online=replace(_online(spec), rate=rate), duration_s=duration_s)


def _online(spec: RunSpec) -> WorkloadSpec:
    if spec.online is None:
        raise ConfigError("JCT is measured of online requests: name them")
    return spec.online


def measure(result: RunResult, *, warmup_s: float = 0.0) -> Measures:
    """Of a run of `at_rate` or `saturated`. The second group of numbers begins at `warmup_s`."""
    records, iterations = result.records, result.iterations
    sent_s = max((r.arrival_s for r in records), default=0.0)
    last_s = float(np.nextafter(sent_s, np.inf))
    requests = summarize(
        records,
        iterations,
        window=Window(start_s=0.0, end_s=last_s),
        observed_until_s=max(result.end_s, last_s),
        jct_target=result.spec.jct,
    ).online
    window = Window(start_s=min(warmup_s, sent_s), end_s=max(sent_s, warmup_s))
    work = summarize(records, iterations, window=window)
    finished = [r for r in records if r.is_finished]
    gaps = np.concatenate([np.empty(0), *(_gaps(r) for r in records)])
    waiting_s = sum(r.admitted_s - r.arrival_s for r in finished if r.admitted_s is not None)
    stopped_s = sum(map(_stopped_s, finished))
    held_s = _held_s(finished, iterations) if len(iterations) else None
    jct_s = sum(r.e2e_s or 0.0 for r in finished)
    kv, steps = work.kv, work.iterations
    inside = window.holds(iterations.end_s)
    planning_s = work.host.planning_total_s
    busy_s = steps.busy_ratio and steps.busy_ratio * window.length_s
    return Measures(
        num_requests=requests.num_requests,
        num_open=requests.num_unfinished,
        jct_met_share=requests.attainment.jct.ratio,
        jct_s=requests.e2e_s.mean,
        normalized_latency_s=requests.normalized_latency_s.mean,
        ttft_s=requests.ttft_s.mean,
        tbt_s=requests.tbt_s.mean,
        tbt_p5_s=float(np.percentile(gaps, 5)) if len(gaps) else None,
        tbt_p95_s=requests.tbt_s.p95,
        max_tbt_s=requests.tbt_s.max,
        waiting_share=waiting_s / jct_s if jct_s else None,
        stopped_share=stopped_s / jct_s if jct_s else None,
        held_share=held_s / jct_s if jct_s and held_s is not None else None,
        num_stops=requests.num_preemptions,
        requests_per_s=work.online.requests_per_s,
        output_tokens_per_s=work.online.output_tokens_per_s,
        # The log counts what held requests have to the other class: they sit out iterations.
        kv_share=_sum(kv.online.mean_ratio, kv.offline.mean_ratio),
        num_running=_mean(
            iterations.column("num_online_prefills")[inside]
            + iterations.column("num_online_decodes")[inside]
        ),
        forward_tokens=steps.num_tokens.mean,
        failed_share=_failed_share(records, iterations.column("start_s"), window),
        idle_share=_idle_share(records, iterations.end_s[inside]),
        planning_share=planning_s / busy_s if planning_s is not None and busy_s else None,
        planning_p99_s=work.host.planning_s.p99,
    )


def _gaps(record: RequestRecord) -> Floats:
    return np.diff(np.array(record.token_times)) if record.token_times else np.empty(0)


def _stopped_s(record: RequestRecord) -> float:
    return sum(again_s - stopped_s for stopped_s, again_s in record.pauses if again_s is not None)


def _held_s(finished: Iterable[RequestRecord], iterations: IterationLog) -> float:
    """Between first and last tokens, outside the iterations that made a token and outside stops."""
    ends = iterations.end_s
    durations = iterations.column("duration_s")
    held_s = 0.0
    for record in finished:
        if record.token_times is None or len(record.token_times) < 2:
            continue
        times = np.array(record.token_times)
        # An end is a sum; the token's time is the same sum, rounded elsewhere.
        own = np.minimum(np.searchsorted(ends, times[1:] - 1e-9), len(ends) - 1)
        stopped_s = sum(
            again_s - stopped_s
            for stopped_s, again_s in record.pauses
            if again_s is not None and stopped_s >= times[0]
        )
        between_s = float(times[-1] - times[0] - durations[own].sum()) - stopped_s
        held_s += max(between_s, 0.0)
    return held_s


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _failed_share(records: Iterable[RequestRecord], starts: Floats, window: Window) -> float | None:
    """Of the iterations that begin in the window. A stop belongs to the next one to begin."""
    inside = window.holds(starts)
    if not inside.any():
        return None
    stops = np.sort([stopped_s for r in records for stopped_s, _ in r.pauses])
    failed = np.zeros(len(starts), dtype=bool)
    index = np.searchsorted(starts, stops)
    failed[index[index < len(starts)]] = True
    return float(failed[inside].mean())


def _idle_share(records: Iterable[RequestRecord], ends: Floats) -> float | None:
    if not len(ends):
        return None
    finishes = np.array([r.finish_s for r in records if r.finish_s is not None])
    index = np.searchsorted(ends, finishes - 1e-9)
    return 1.0 - len(np.unique(index[index < len(ends)])) / len(ends)


def sustained_rate(
    run: Callable[[Sequence[float]], Sequence[float | None]],
    *,
    limit_s: float,
    low: float,
    high: float,
    tolerance: float = 0.05,
    num_at_once: int = 1,
) -> float | None:
    """The highest rate in ``[low, high]`` [1/s] with at most this mean normalized latency [s], to
    the tolerance; None: `low` is too high. `run` gives the latencies at some rates; None: nobody
    was answered.
    """
    rates = values_between(low, high, tolerance=tolerance, digits=3)

    def probe(some: Sequence[float]) -> list[bool]:
        return [latency_s is not None and latency_s <= limit_s for latency_s in run(some)]

    return last_good(rates, probe, num_at_once=num_at_once)
