"""Pure functions from workload to workload. Each adds a note of what it did; requests keep their
rids unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from cosched.core.request import RequestClass
from cosched_traces.errors import WorkloadError
from cosched_traces.seeds import KEYS, key_base, rng_of
from cosched_traces.workload import Workload


def period_s(workload: Workload) -> float:
    """Length of the workload: from the first arrival to one mean gap after the last."""
    requests = workload.requests
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if span_s <= 0:
        raise WorkloadError(f"{workload.name}: all requests arrive at once, so it has no rate")
    return span_s * len(requests) / (len(requests) - 1)


def replay_faster(workload: Workload, factor: float) -> Workload:
    """The same requests `factor` times as fast, bursts included."""
    check_positive("factor", factor)
    if factor == 1:
        return workload
    check_no_sessions(workload)
    requests = tuple(replace(r, arrival_s=r.arrival_s / factor) for r in workload.requests)
    return workload.changed(requests, f"replayed {factor:g} times as fast")


def sample_to_rate(
    workload: Workload, rate: float, *, seed: int, duration_s: float | None = None
) -> Workload:
    """HyGen §5.1: of the first T seconds, T·Q requests drawn evenly without replacement, their
    arrival times kept. T = `duration_s`, at most what the workload lasts; Q = `rate` [req/s]."""
    check_positive("rate", rate)
    check_no_sessions(workload)
    window_s = period_s(workload)
    if duration_s is not None and duration_s < window_s:
        workload, window_s = slice_time(workload, 0.0, duration_s), duration_s
    present = len(workload.requests)
    wanted = round(rate * window_s)
    if wanted > present:
        raise WorkloadError(
            f"{workload.name}: a rate of {rate:g} req/s needs {wanted} requests, the trace has "
            f"{present}; sample at a lower rate, or use a generated workload"
        )
    rng = rng_of(seed, "sample")
    chosen = sorted(rng.choice(present, size=wanted, replace=False).tolist())
    requests = tuple(workload.requests[index] for index in chosen)
    return workload.changed(requests, f"sampled {wanted} of {present} to {rate:g} req/s, {seed=}")


def slice_time(workload: Workload, start_s: float, end_s: float) -> Workload:
    """The requests that arrive in ``[start_s, end_s)``; `start_s` becomes 0."""
    if not 0 <= start_s < end_s:
        raise WorkloadError(f"no time between {start_s} and {end_s} s")
    requests = tuple(
        r if start_s == 0 else replace(r, arrival_s=r.arrival_s - start_s)
        for r in workload.requests
        if start_s <= r.arrival_s < end_s
    )
    return workload.changed(requests, f"cut to [{start_s:g}, {end_s:g}) s")


def busiest_window(workload: Workload, length_s: float) -> Workload:
    """The stretch of `length_s` with the most tokens (prompt and output), the first of equal ones.
    A shorter workload stays whole."""
    check_positive("length_s", length_s)
    check_no_sessions(workload)
    requests = workload.requests
    weights = [r.num_prompt_tokens + r.num_output_tokens for r in requests]
    best, best_start_s, held, end = -1, 0.0, 0, 0
    for first, request in enumerate(requests):
        while end < len(requests) and requests[end].arrival_s < request.arrival_s + length_s:
            held += weights[end]
            end += 1
        if held > best:
            best, best_start_s = held, request.arrival_s
        held -= weights[first]
    return slice_time(workload, best_start_s, best_start_s + length_s)


def repeat(workload: Workload, duration_s: float) -> Workload:
    """The workload again and again until `duration_s`.

    A later lap has new keys, so that it finds nothing of an earlier one in the cache; sharing
    within a lap is kept. Rids get the number of the lap. Token ids cannot be repeated.
    """
    check_no_sessions(workload)
    lap_s = period_s(workload)
    if duration_s <= lap_s:
        return slice_time(workload, 0.0, duration_s)
    first_s = workload.requests[0].arrival_s
    requests = [r for r in workload.requests if r.arrival_s < duration_s]
    for lap in range(1, math.ceil((duration_s - first_s) / lap_s)):
        shift = key_base("lap", lap)
        for request in workload.requests:
            arrival_s = request.arrival_s + lap * lap_s
            if arrival_s >= duration_s:
                break
            if request.token_ids:
                raise WorkloadError(f"{request.rid}: given tokens cannot be repeated as new ones")
            segments = tuple(s._replace(key=(s.key + shift) % KEYS) for s in request.segments)
            rid = f"{request.rid}/{lap}"
            requests.append(replace(request, rid=rid, arrival_s=arrival_s, segments=segments))
    return workload.changed(tuple(requests), f"repeated every {lap_s:.1f} s to {duration_s:g} s")


def first_requests(workload: Workload, num_requests: int) -> Workload:
    """The first `num_requests`, or all if there are fewer."""
    check_positive("num_requests", num_requests)
    requests = workload.requests[:num_requests]
    return workload.changed(requests, f"first {len(requests)} of {len(workload.requests)}")


def shuffle(workload: Workload, *, seed: int) -> Workload:
    """The requests in a random order; the arrival times stay."""
    check_no_sessions(workload)
    order = rng_of(seed, "shuffle").permutation(len(workload.requests)).tolist()
    requests = tuple(
        replace(workload.requests[index], arrival_s=place.arrival_s)
        for index, place in zip(order, workload.requests, strict=True)
    )
    return workload.changed(requests, f"shuffled, {seed=}")


def with_arrivals(workload: Workload, arrivals_s: Sequence[float]) -> Workload:
    """The first ``len(arrivals_s)`` requests, in their order, at the times given (ascending)."""
    check_no_sessions(workload)
    present = len(workload.requests)
    if len(arrivals_s) > present:
        raise WorkloadError(f"{workload.name}: {len(arrivals_s)} arrivals for {present} requests")
    if any(later < earlier for earlier, later in pairwise(arrivals_s)):
        raise WorkloadError(f"{workload.name}: the arrivals given are not in ascending order")
    requests = tuple(
        replace(request, arrival_s=float(time))
        for request, time in zip(workload.requests, arrivals_s, strict=False)
    )
    return workload.changed(requests, f"arrivals given to {len(requests)} of {present} requests")


def at_once(workload: Workload, request_class: RequestClass) -> Workload:
    """Every request at 0 and of the class given: a trace as an offline set."""
    check_no_sessions(workload)
    requests = tuple(
        replace(r, arrival_s=0.0, request_class=request_class) for r in workload.requests
    )
    return workload.changed(requests, f"all at 0, {request_class.value}")


def check_no_sessions(workload: Workload) -> None:
    """Raises `WorkloadError` for sessions, whose turns have no arrival times."""
    if workload.has_sessions:
        raise WorkloadError(f"{workload.name}: turns of sessions cannot be moved or drawn apart")


def check_positive(what: str, value: float) -> None:
    """Raises `WorkloadError`; also for NaN."""
    if not value > 0:
        raise WorkloadError(f"{what} {value} is not above 0")
