#!/usr/bin/env python3
"""The figures of BROS's evaluation (§7) in virtual time, one after the other.

    .venv/bin/python scripts/bench_bros.py --figures 3 10 12 13 --data-dir DIR --results DIR

Figure 3 is stock first come, first served beside preemption by time left, online requests alone;
10 and 11 are one sweep over online rates with waves of offline requests; 12 is online requests
alone; 13 is the KV memory, on OPT-30B. Figure 14 is scripts/bench_planning.py. Every run is kept in
--results, so an interrupted call goes on where it was, and `--duration 60` is a look at it.

`--latency-models DIR` has a profile per machine (`opt-13b.json`, `opt-30b.json`,
`llama-3-70b.json`), each of `python -m cosched.profile measure --virtual` with the machine's
options; where there is none policies learn while they run.

Shown per run, of the online requests: normalized latency, its share that was waiting for the first
admission, attainment of TTFT and TPOT per request, of TPOT per token (every gap), of both; of the
offline requests: finished per second, tokens per second, stops.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measuring import end, parser_of, runs_of, show_rows

from cosched.core.request import RequestClass, Slo
from cosched.simulation.machine import Machine
from cosched.simulation.run import CostSpec, RunResult, RunSpec, WorkloadSpec
from cosched.simulation.scenario import Scenario, scenario
from cosched.simulation.store import ResultStore

SLO = Slo(ttft_s=0.4, tpot_s=0.2)
"""BROS §7.1."""

MACHINES = {
    "opt-13b": Machine(model="OPT-13B", gpu="A100-40", tp=2),
    "opt-30b": Machine(model="OPT-30B", gpu="A100-40", tp=4),
    "llama-3-70b": Machine(model="Llama-3-70B", gpu="A100-80", tp=8),
}
RATES = {"opt-13b": (2, 4, 8, 12, 16), "opt-30b": (2, 4, 8, 12, 16), "llama-3-70b": (2, 4, 8, 15)}
"""Requests/s; the paper's are not in its text, but for "even under 15 req/s" of the 70B model."""

ONLINE = ("sharegpt-bros", "lmsys")
"""BROS Table 2."""

SWEPT = ("s0", "vllm-like", "priority", "bros-rr", "bros", "bros-late-last")
OTHERS = ("bros-literal-cost", "cosched.policy.bros:literal_breaks", "bros-noreplace", "bros-fixed")
BESIDE = ("hygen", "echo-bs+e+s")
MEMORY = ("bros", "bros-tail", "bros-keep", "bros-nobi")


def alone(name: str) -> Scenario:
    return replace(scenario(name), name=f"{name} alone", has_offline=False)


def specs(args: argparse.Namespace, figure: str) -> Iterator[RunSpec]:
    offline = WorkloadSpec(name="bros-offline", num_requests=args.offline_requests, wave=args.wave)

    def spec(
        of: Scenario, machine: str, online: str, rate: float, **machine_fields: Any
    ) -> RunSpec:
        profile = args.latency_models and args.latency_models / f"{machine}.json"
        return RunSpec(
            scenario=of,
            machine=replace(
                MACHINES[machine],
                page_size=args.page_size,
                max_running_requests=args.rows,
                context_length=4096,
                **machine_fields,
            ),
            online=WorkloadSpec(name=online, rate=rate),
            offline=offline,
            cost=CostSpec(name="kernel-table" if args.data_dir else "roofline"),
            slo=SLO,
            duration_s=args.duration,
            seed=args.seed,
            data_dir=args.data_dir,
            config=(("latency_model", str(profile)),) if profile and profile.exists() else (),
        )

    machines = args.machines
    if figure == "3":
        for rate in args.rates or RATES["opt-13b"]:
            for name in ("vllm-like", "bros-rt"):
                yield spec(alone(name), "opt-13b", "sharegpt-bros", rate)
    if figure == "10":
        names = args.scenarios or (*SWEPT, *OTHERS, *BESIDE)
        for machine in machines:
            for online in args.online:
                for rate in args.rates or RATES[machine]:
                    for name in names:
                        yield spec(scenario(name), machine, online, rate)
    if figure == "12":
        for machine in machines:
            for online in args.online:
                for rate in args.rates or RATES[machine]:
                    for name in ("vllm-like", "bros-rt"):
                        yield spec(alone(name), machine, online, rate)
    if figure == "13":
        for rate in args.rates or (10,):
            for kv_tokens in (None, args.short_kv):
                for name in args.scenarios or MEMORY:
                    yield spec(
                        scenario(name), "opt-30b", "sharegpt-bros", rate, kv_tokens=kv_tokens
                    )


def row(result: RunResult) -> dict[str, Any]:
    online, offline = result.summary.online, result.summary.offline
    waits = [
        (r.admitted_s - r.arrival_s) / r.e2e_s
        for r in result.records
        if r.request_class is RequestClass.ONLINE and r.e2e_s and r.admitted_s is not None
    ]
    met = online.attainment
    spec = result.spec
    assert spec.online is not None
    return {
        "scenario": spec.scenario.name,
        "model": spec.machine.model,
        "kv_tokens": spec.machine.capacity(),
        "online": spec.online.name,
        "rate": spec.online.rate,
        "normalized_latency_s": online.normalized_latency_s.mean,
        "queueing_share": float(np.mean(waits)) if waits else None,
        "ttft": met.ttft.ratio,
        "tpot": met.tpot.ratio,
        "tpot_per_token": met.tbt.ratio,
        "both": met.joint.ratio,
        "online_finished": online.num_finished,
        "online_requests": online.num_requests,
        "offline_requests_per_s": offline.requests_per_s,
        "offline_tokens_per_s": offline.tokens_per_s,
        "offline_stops": offline.num_preemptions,
        "online_stops": online.num_preemptions,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    store = None if args.results is None else ResultStore(args.results)
    figures: dict[str, list[dict[str, Any]]] = {}
    for figure in args.figures:
        results = runs_of(
            f"figure {figure}", list(specs(args, figure)), num_jobs=args.jobs, store=store
        )
        figures[figure] = [row(result) for result in results]
        show_rows(figures[figure], title=f"Figure {figure}")
    return {"figures": figures}


def main() -> None:
    parser = parser_of(__file__, __doc__, jobs=os.cpu_count() or 1)
    known = ["3", "10", "12", "13"]
    parser.add_argument("--figures", nargs="+", choices=known, default=known)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=["opt-13b"])
    parser.add_argument("--scenarios", nargs="+", help="in place of the figure's own")
    parser.add_argument("--online", nargs="+", choices=ONLINE, default=ONLINE, help="10 and 12")
    parser.add_argument("--rates", nargs="+", type=float, help="requests/s, in place of its own")
    parser.add_argument("--duration", type=float, default=600.0, help="s (600, BROS §7.1)")
    parser.add_argument("--wave", type=int, default=256, help="offline requests sent at once (256)")
    parser.add_argument("--offline-requests", type=int, default=20_000)
    parser.add_argument("--page-size", type=int, default=16, help="BROS §7.1 (16)")
    parser.add_argument("--rows", type=int, default=1024, help="--max-running-requests (1024)")
    parser.add_argument(
        "--short-kv", type=int, default=20_000, help="KV tokens, figure 13 (20,000)"
    )
    parser.add_argument("--latency-models", type=Path, metavar="DIR")
    parser.add_argument("--data-dir", default=os.environ.get("COSCHED_DATA"), metavar="DIR")
    parser.add_argument("--results", type=Path, metavar="DIR", help="keep runs there")
    end(parser, run)


if __name__ == "__main__":
    main()
