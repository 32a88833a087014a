#!/usr/bin/env python3
"""`cosched:saturation` of a live server, and how many chats meet their targets.

    scripts/live_saturation.py [--model-path M] [--rates 0.3,0.6,0.9,1.2] [--seconds 90]

One server gets chat at these rates in turn. The figure tells of the last minute, so the table has
its mean over the seconds of a rate after the first minute. Without --model-path the model is the
demo model on a CPU. The last line is JSON.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from cosched.core.request import Slo
from cosched.lab.benchmark.admin_client import metrics_of
from cosched.lab.benchmark.live import LiveTarget, measure_live
from cosched.lab.benchmark.own_server import OwnServers
from cosched.lab.benchmark.trial_phases import DEMO_FLAGS
from cosched.lab.demo_model import ensure_demo_model
from cosched.lab.metrics.table import markdown_rows
from cosched.lab.simulation.requests import load_requests
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import Setting
from cosched.versions import versions

WINDOW_S, PERIOD_S = 60.0, 2.0
FLAGS = ("--enable-metrics", *DEMO_FLAGS)
HEAD = ("chats/s", "saturation", "both met %", "TTFT met %", "TPOT met %", "TTFT p90 s", "chats")


async def read_often(target: LiveTarget, seen: list[float]) -> None:
    """Once the last minute is of this rate alone."""
    await asyncio.sleep(WINDOW_S)
    while True:
        seen.append((await metrics_of(target))["cosched:saturation"])
        await asyncio.sleep(PERIOD_S)


async def measure(target: LiveTarget, spec: RunSpec) -> list[Any]:
    """A row of the table."""
    seen: list[float] = []
    reading = asyncio.create_task(read_often(target, seen))
    try:
        live = await measure_live(target, spec, *load_requests(spec))
    finally:
        reading.cancel()
    online, met = live.summary.online, live.summary.online.attainment
    shares = [round(100 * one.ratio, 1) for one in (met.joint, met.ttft, met.tpot)]
    ratio = round(fmean(seen), 2) if seen else None
    p90_s = online.ttft_s.p90
    return [spec.online.rate, ratio, *shares, p90_s and round(p90_s, 2), online.num_requests]


async def measure_each(args: argparse.Namespace, model: str) -> list[list[Any]]:
    setting = Setting(name="cosched", summary="", policy="cosched", has_offline=False)
    spec = RunSpec(
        setting=setting,
        online=WorkloadSpec(name=args.online),
        slo=Slo(ttft_s=args.ttft, tpot_s=args.tpot),
        duration_s=args.seconds,
        seed=args.seed,
        clairvoyant=True,
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        servers = OwnServers(model_path=model, flags=FLAGS)
        async with servers.started(spec, log_path=Path(folder) / "server.log") as target:
            for rate in map(float, args.rates.split(",")):
                online = replace(spec.online, rate=rate)
                rows.append(await measure(target, replace(spec, online=online)))
                print(*zip(HEAD, rows[-1], strict=True), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", help="default: the demo model")
    parser.add_argument("--online", default="demo-chat")
    parser.add_argument("--rates", default="0.3,0.6,0.9,1.2", help="of chat [requests/s]")
    parser.add_argument("--seconds", type=float, default=90.0, help="for each rate")
    parser.add_argument("--ttft", type=float, default=2.0, help="target [s]")
    parser.add_argument("--tpot", type=float, default=0.1, help="target [s]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.seconds <= WINDOW_S:
        parser.error(f"--seconds must be above {WINDOW_S:g}")
    model = args.model_path or str(ensure_demo_model(dtype="bfloat16"))
    rows = asyncio.run(measure_each(args, model))
    print(markdown_rows(HEAD, [[str(one) for one in row] for row in rows]))
    print(json.dumps({"rows": [dict(zip(HEAD, row, strict=True)) for row in rows], **versions()}))


if __name__ == "__main__":
    main()
