"""Requests and iterations for tests of the metrics. Times lie on a grid of 1/1024 s: sums and
differences of such times are exact, so a target that is just met stays just met."""

from __future__ import annotations

from array import array
from itertools import count

from hypothesis import strategies as st

from cosched.core.request import RequestClass, Slo
from cosched.lab.metrics.records import IterationLog, IterationRecord, RequestRecord

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE
TICK_S = 1 / 1024

_rids = count()


def request(arrival_s: float = 0.0, times: tuple[float, ...] = (), **fields) -> RequestRecord:
    """A request whose tokens came at `times`; complete with the last one unless said otherwise."""
    return RequestRecord(
        **{
            "rid": f"r{next(_rids)}",
            "request_class": ONLINE,
            "arrival_s": arrival_s,
            "first_token_s": times[0] if times else None,
            "finish_s": times[-1] if times else None,
            "num_prompt_tokens": 100,
            "num_output_tokens": len(times),
            "token_times": array("d", times) if times else None,
            **fields,
        }
    )


def iterations(*rows: dict) -> IterationLog:
    return IterationLog(IterationRecord(**row) for row in rows)


def _ticks(largest: int):
    return st.integers(0, largest).map(lambda ticks: ticks * TICK_S)


slos = st.builds(
    Slo,
    ttft_s=st.none() | _ticks(2048),
    tpot_s=st.none() | _ticks(128),
    deadline_s=st.none() | _ticks(8192),
)


@st.composite
def requests(draw) -> RequestRecord:
    arrival_s = draw(_ticks(4096))
    gaps = draw(st.lists(_ticks(1024), max_size=6))
    times, now_s = [], arrival_s
    for gap in gaps:
        now_s += gap
        times.append(now_s)
    fate = draw(st.sampled_from(["finished", "open", "failed"]))
    keeps_times = draw(st.booleans())
    num_prompt_tokens = draw(st.integers(0, 50))
    return request(
        arrival_s,
        tuple(times),
        request_class=draw(st.sampled_from(list(RequestClass))),
        finish_s=None if fate == "open" else now_s + draw(_ticks(64)),
        token_times=array("d", times) if times and keeps_times else None,
        ok=fate != "failed",
        slo=draw(slos),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=draw(st.none() | st.integers(0, num_prompt_tokens)),
        num_recomputed_tokens=draw(st.integers(0, 20)),
        num_preemptions=draw(st.integers(0, 3)),
    )


@st.composite
def logs(draw) -> IterationLog:
    log, now_s = IterationLog(), 0.0
    for _ in range(draw(st.integers(0, 8))):
        duration_s = draw(st.integers(1, 512)) * TICK_S
        held = draw(st.tuples(*[st.integers(0, 100)] * 4))
        log.append(
            IterationRecord(
                start_s=now_s,
                duration_s=duration_s,
                predicted_s=draw(st.none() | _ticks(512)),
                num_online_prefill_tokens=draw(st.integers(0, 100)),
                num_offline_decodes=draw(st.integers(0, 100)),
                kv_online_tokens=held[0],
                kv_offline_tokens=held[1],
                kv_cached_tokens=held[2],
                kv_free_tokens=held[3],
                planning_s=draw(st.none() | _ticks(4)),
            )
        )
        now_s += duration_s + draw(_ticks(512))
    return log
