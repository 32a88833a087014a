"""The requests of a run and the client of the offline ones."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from cosched.batch.config import BatchesConfig
from cosched.batch.jsonl.prefix_order import LINES_AT_SERVER, in_prefix_order
from cosched.core.request import RequestClass, Slo
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.metrics.slo import JctTarget, Verdict, judge, with_defaults
from cosched.lab.simulation.arrivals import VOCAB_SIZE, Source
from cosched.lab.simulation.clients import (
    AimdClient,
    ClosedLoopClient,
    OpenLoopClient,
    WaveClient,
)
from cosched.lab.simulation.feeder_client import FeederClient, jobs_of, prompt_key
from cosched.lab.simulation.run_spec import RunSpec, offline_client_of
from cosched.lab.simulation.setting import OfflineClient
from cosched_traces.catalogue import load_workload
from cosched_traces.transform import busiest_window, replay_faster
from cosched_traces.workload import TraceRequest


def load_requests(spec: RunSpec) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """(online, offline) requests of a run; empty for a class that the setting leaves out."""
    data_dir = Path(spec.data_dir) if spec.data_dir else None
    online: list[TraceRequest] = []
    offline: list[TraceRequest] = []
    if spec.setting.has_online and spec.online is not None:
        faster, rate = spec.online.faster, spec.online.rate
        workload = load_workload(
            spec.online.name,
            seed=spec.seed,
            request_class=RequestClass.ONLINE,
            data_dir=data_dir,
            rate=rate and rate / faster,
            num_sessions=spec.online.num_sessions,
            duration_s=spec.duration_s * faster,
            num_requests=spec.online.num_requests,
        )
        workload = replay_faster(workload, faster)
        if spec.online.peak_window_s is not None:
            workload = busiest_window(workload, spec.online.peak_window_s)
        requests = _with_deadlines(workload.requests, spec.jct)
        online.extend(_with_tiers(requests, spec.online.tiers, spec.seed))
    if spec.setting.has_offline and spec.offline is not None:
        workload = load_workload(
            spec.offline.name,
            seed=spec.seed,
            request_class=RequestClass.OFFLINE,
            data_dir=data_dir,
            num_requests=spec.offline.num_requests,
        )
        offline.extend(workload.requests)
    offline = _with_own_rids(offline, {request.rid for request in online})
    if spec.clairvoyant:
        online, offline = (
            [replace(r, max_new_tokens=r.num_output_tokens) for r in requests]
            for requests in (online, offline)
        )
    return online, offline


class TierPart(NamedTuple):
    """A tier of the online requests of a run. part: weight among them."""

    priority: int
    part: float
    slo: Slo


def tier_parts(text: str) -> list[TierPart]:
    """`WorkloadSpec.tiers`. ValueError."""
    parts = []
    for word in text.split():
        priority, part, *targets = word.split(":")
        if len(targets) not in (0, 2):
            raise ValueError(f"{word!r} is not PRIORITY:PART or PRIORITY:PART:TTFT_MS:TPOT_MS")
        ttft_s, tpot_s = [float(target) / 1e3 for target in targets] or (None, None)
        slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
        parts.append(TierPart(int(priority), float(part), slo))
    return parts


def checked_tiers(text: str) -> str:
    tier_parts(text)
    return text


def _with_tiers(requests: Sequence[TraceRequest], tiers: str, seed: int) -> Sequence[TraceRequest]:
    """Each session or request with one of the tiers, and its targets where it has none."""
    parts = tier_parts(tiers)
    if not parts:
        return requests
    rng = Random(f"tiers {seed}")
    weights = [part.part for part in parts]
    of: dict[str, TierPart] = {}
    for request in requests:
        name = request.session or request.rid
        if name not in of:
            of[name] = rng.choices(parts, weights)[0]
    chosen = [(r, of[r.session or r.rid]) for r in requests]
    return [
        replace(r, priority=tier.priority, slo=with_defaults(r.slo, tier.slo)) for r, tier in chosen
    ]


def _with_own_rids(offline: list[TraceRequest], taken: Set[str]) -> list[TraceRequest]:
    """Distinct rids if one workload is both online and offline."""
    if all(request.rid not in taken for request in offline):
        return offline

    def own(rid: str | None) -> str | None:
        return rid and f"offline-{rid}"

    return [replace(r, rid=f"offline-{r.rid}", after=own(r.after)) for r in offline]


def _with_deadlines(
    requests: Sequence[TraceRequest], jct: JctTarget | None
) -> Sequence[TraceRequest]:
    """Each with the deadline of its length, if it has none of its own."""
    if jct is None:
        return requests

    def deadline(request: TraceRequest) -> Slo:
        return Slo(deadline_s=jct.limit_s(request.num_output_tokens))

    return [replace(r, slo=with_defaults(r.slo, deadline(r))) for r in requests]


def offline_client(
    spec: RunSpec, offline: Sequence[TraceRequest], *, vocab_size: int = VOCAB_SIZE
) -> Source:
    """The client of the offline requests, in virtual time or live."""
    kind, asked = offline_client_of(spec), spec.offline
    if spec.setting.client is None and asked is not None:
        if asked.wave:
            return WaveClient(offline, size=asked.wave, vocab_size=vocab_size)
        if asked.refill:
            return ClosedLoopClient(offline, concurrency=asked.refill, vocab_size=vocab_size)
    if any(request.arrival_s for request in offline) and kind in (
        OfflineClient.FEEDER,
        OfflineClient.LINES,
    ):
        kind = OfflineClient.ALL  # not one job: each is sent when the trace says so
    match kind:
        case OfflineClient.FEEDER:
            return FeederClient(
                jobs_of(offline, num_batches=1 if asked is None else asked.num_batches),
                config=msgspec.convert(dict(spec.config).get("batches", {}), BatchesConfig),
                vocab_size=vocab_size,
            )
        case OfflineClient.LINES:
            ordered = list(in_prefix_order(offline, prompt_key, together=len(offline)))
            return ClosedLoopClient(ordered, concurrency=LINES_AT_SERVER, vocab_size=vocab_size)
        case OfflineClient.ALL:
            return OpenLoopClient(offline, vocab_size=vocab_size)
        case OfflineClient.CAP:
            return ClosedLoopClient(offline, concurrency=spec.cap, vocab_size=vocab_size)
        case OfflineClient.AIMD:
            return AimdClient(
                offline,
                is_missed=lambda record: is_missed(record, spec, now_s=record.finish_s or 0.0),
                max_concurrency=spec.max_concurrency,
                vocab_size=vocab_size,
            )


def is_missed(record: RequestRecord, spec: RunSpec, *, now_s: float) -> bool:
    slo = with_defaults(record.slo, spec.slo)
    return judge(record, slo, now_s=now_s).joint is Verdict.MISSED
