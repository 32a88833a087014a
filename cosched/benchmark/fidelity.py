"""How near a simulation comes to the server it simulates.

A server runs on this machine; one workload gives its profile (the shape and time of every iteration
it ran), another is then run twice: live, and in virtual time with that profile as the cost model.
Both see the same prompts. What is compared is what a user would compare: TTFT, TPOT, how long it
took, and how much of the prompts was found in the cache.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cosched.benchmark.live import LiveTarget, measure_live
from cosched.core.request import RequestClass
from cosched.cost_models.profile_model import ProfileModel
from cosched.jobs.server import serving
from cosched.latency.profile_file import MeasuredPoint, Profile, read_iteration_log
from cosched.metrics.records import RequestRecord
from cosched.simulation.machine import Machine
from cosched.simulation.parallel import execute_all
from cosched.simulation.run import CostSpec, RunSpec, WorkloadSpec, load_requests
from cosched.simulation.scenario import scenario

__all__ = ["FidelityCase", "compare_runs", "run_fidelity"]

_WARM_UP_ITERATIONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityCase:
    """One server and the load on it.

    model_path           what the live server serves
    machine              its settings; `kv_tokens` small enough makes its cache thrash
    offline              more than the duration is enough for: a run that is idle for a part of it
                         would compare mixtures of two states
    offline_concurrency  above what runs at a time, so that the engine never waits for the client
    """

    name: str
    model_path: str
    machine: Machine
    policy: str = "sarathi"
    online: WorkloadSpec = field(default_factory=lambda: WorkloadSpec(name="alpaca", rate=1.0))
    offline: WorkloadSpec = field(
        default_factory=lambda: WorkloadSpec(name="mmlu-like", num_requests=2000)
    )
    offline_concurrency: int = 32
    duration_s: float = 60.0
    seed: int = 0
    vocab_size: int = 2000


def run_fidelity(case: FidelityCase, *, show: Callable[[str], None]) -> dict[str, Any]:
    """Profile, run live, simulate, compare. Takes about twice the duration and a server start."""
    with tempfile.TemporaryDirectory(prefix="cosched-fidelity-") as folder:
        log = Path(folder) / "iterations.jsonl"
        live, num_profiled = asyncio.run(_run_server(case, log, Path(folder), show))
        points = read_iteration_log(log)
        # The profile must not know the run it is tested on.
        model = ProfileModel.fit(points[_WARM_UP_ITERATIONS:num_profiled])
        profile = Path(folder) / "profile.json"
        Profile(points=model.points).save(profile)
        show(f"profile of {len(model.points)} iterations, error {model.held_out.mean:.1%}")
        spec = _spec(case, seed=case.seed, profile=profile)
        (_, result), *_ = execute_all([spec], num_jobs=1)
        simulated = result.records
        iteration_error = _iteration_error(model, points[num_profiled:])
    return {
        "case": case.name,
        "profile_held_out_error": model.held_out.mean,
        "iteration_error": iteration_error,
        **compare_runs(live, simulated),
    }


async def _run_server(
    case: FidelityCase, log: Path, folder: Path, show: Callable[[str], None]
) -> tuple[list[RequestRecord], int]:
    flags = [
        *case.machine.flags(),
        *("--cosched-policy", case.policy, "--cosched-iteration-log", str(log)),
        *("--dtype", "float32", "--enable-cache-report", "--mem-fraction-static", "0.3"),
    ]
    log_path = folder / "server.log"
    async with serving(model_path=case.model_path, flags=flags, log_path=log_path) as base_url:
        target = LiveTarget(base_url=base_url, vocab_size=case.vocab_size)
        show("the server is up; measuring its iterations")
        await _load(target, case, seed=case.seed + 1)
        num_profiled = len(read_iteration_log(log))
        async with asyncio.timeout(30):
            await _flush_cache(base_url)
        show("the run to compare")
        live = await _load(target, case, seed=case.seed)
    return live, num_profiled


async def _load(target: LiveTarget, case: FidelityCase, *, seed: int) -> list[RequestRecord]:
    spec = _spec(case, seed=seed, profile=None)
    result = await measure_live(target, spec, *load_requests(spec))
    return list(result.records)


def _spec(case: FidelityCase, *, seed: int, profile: Path | None) -> RunSpec:
    return RunSpec(
        scenario=replace(scenario("cap"), name=case.policy, policy=case.policy),
        machine=case.machine,
        online=case.online,
        offline=case.offline,
        cost=CostSpec(name="profile", profile=str(profile) if profile else None),
        duration_s=case.duration_s,
        seed=seed,
        cap=case.offline_concurrency,
    )


async def _flush_cache(base_url: str) -> None:
    import httpx

    async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
        while (await client.post("/flush_cache")).status_code != 200:
            await asyncio.sleep(0.5)


def _iteration_error(model: ProfileModel, points: Sequence[MeasuredPoint]) -> float | None:
    """Mean relative error of the profile on iterations it was not fitted to."""
    errors = [abs(model.iteration_s(p.batch) / p.seconds - 1) for p in points if p.seconds > 0]
    return float(np.mean(errors)) if errors else None


def compare_runs(
    live: Sequence[RequestRecord], simulated: Sequence[RequestRecord]
) -> dict[str, Any]:
    """Live and simulated values and the relative error of each, simulated / live - 1.

    ``duration_s`` is the time that the same number of offline requests took: as many as the slower
    of the two finished.
    """
    values = {name: (measure(live), measure(simulated)) for name, measure in _MEASURES.items()}
    ends = [_offline_ends(live), _offline_ends(simulated)]
    num_both = min(map(len, ends))
    if num_both:
        values["duration_s"] = (ends[0][num_both - 1], ends[1][num_both - 1])
    return {
        name: {
            "live": a,
            "simulated": b,
            "error": None if a is None or b is None or a == 0 else b / a - 1,
        }
        for name, (a, b) in values.items()
    }


def _of(
    request_class: RequestClass,
    value: Callable[[RequestRecord], float | None],
    reduce: Callable[[list[float]], Any],
) -> Callable[[Sequence[RequestRecord]], float | None]:
    def measure(records: Sequence[RequestRecord]) -> float | None:
        found = [value(r) for r in records if r.request_class is request_class and r.is_finished]
        known = [v for v in found if v is not None]
        return float(reduce(known)) if known else None

    return measure


def _quantile(share: float) -> Callable[[list[float]], Any]:
    return lambda values: np.quantile(values, share)


def _offline_ends(records: Sequence[RequestRecord]) -> list[float]:
    return sorted(
        r.finish_s
        for r in records
        if r.request_class is RequestClass.OFFLINE and r.finish_s is not None
    )


def _num_offline(records: Sequence[RequestRecord]) -> float:
    return float(sum(r.request_class is RequestClass.OFFLINE and r.is_finished for r in records))


def _hit_ratio(records: Sequence[RequestRecord]) -> float | None:
    known = [r for r in records if r.num_cached_tokens is not None and r.is_finished]
    num_prompt = sum(r.num_prompt_tokens for r in known)
    return sum(r.num_cached_tokens or 0 for r in known) / num_prompt if num_prompt else None


_ONLINE = RequestClass.ONLINE
_MEASURES: dict[str, Callable[[Sequence[RequestRecord]], float | None]] = {
    "ttft_mean_s": _of(_ONLINE, lambda r: r.ttft_s, np.mean),
    "ttft_p50_s": _of(_ONLINE, lambda r: r.ttft_s, _quantile(0.5)),
    "ttft_p90_s": _of(_ONLINE, lambda r: r.ttft_s, _quantile(0.9)),
    "tpot_mean_s": _of(_ONLINE, lambda r: r.tpot_s, np.mean),
    "tpot_p50_s": _of(_ONLINE, lambda r: r.tpot_s, _quantile(0.5)),
    "tpot_p90_s": _of(_ONLINE, lambda r: r.tpot_s, _quantile(0.9)),
    "offline_requests": _num_offline,
    "hit_ratio": _hit_ratio,
}
