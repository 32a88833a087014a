#!/usr/bin/env python3
"""Jobs of lines with images beside chat, with and without the encoder's time in plans.

    scripts/images.py [--gpus A100-80,H100] [--jobs captions,balanced-images,pages] [--seed 0]

Chat with ShareGPT's lengths on a simulated Qwen2.5-VL-7B, its targets the defaults. `text`: neither
the predictor nor the plans know that images are encoded, as before they did. The last line is JSON.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run_spec import CostSpec, RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from cosched.versions import versions

MODEL = "Qwen2.5-VL-7B"
CHATS_PER_S = {"A100-80": 3.0, "H100": 6.0, "H200": 6.0}
LINES = {"captions": 400, "balanced-images": 250, "pages": 150}
DURATION_S = 600.0
COLUMNS = (
    *("TTFT met %", "TPOT met %", "TTFT p99 ms", "TPOT p99 ms", "TBT p99 ms"),
    *("longest TBT ms", "job end s", "error of predictions %"),
)


def simulate(gpu: str, job: str, seed: int, *, knows_images: bool) -> list[float]:
    """The figures of `COLUMNS`."""
    from cosched.engine import observe, port
    from cosched.lab.simulation.run import execute

    if not knows_images:

        def text_shape(batch: Any) -> Any:
            return replace(port.shape_of(batch), encoded=())

        port.request.media_of = lambda req: ()
        observe.port = SimpleNamespace(**vars(port) | {"shape_of": text_shape})
    spec = RunSpec(
        setting=setting_of("cosched"),
        online=WorkloadSpec(name="sharegpt", rate=CHATS_PER_S[gpu]),
        offline=WorkloadSpec(name=job, num_requests=LINES[job]),
        machine=Machine(model=MODEL, gpu=gpu),
        cost=CostSpec(name="roofline"),
        duration_s=DURATION_S,
        seed=seed,
    )
    summary = execute(spec).summary
    online = summary.online
    assert summary.job is not None and summary.job.makespan_s is not None, "the job has ended"
    return [
        100 * (online.attainment.ttft.ratio or 0.0),
        100 * (online.attainment.tpot.ratio or 0.0),
        1e3 * (online.ttft_s.p99 or 0.0),
        1e3 * (online.tpot_s.p99 or 0.0),
        1e3 * (online.tbt_s.p99 or 0.0),
        1e3 * (online.tbt_s.max or 0.0),
        summary.job.makespan_s,
        100 * (summary.iterations.prediction_error_ratio.mean or 0.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", default="A100-80,H100")
    parser.add_argument("--jobs", default=",".join(LINES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = []
    print(f"| GPU | job | lines | plans know | {' | '.join(COLUMNS)} |")
    print("|" + "---|" * (4 + len(COLUMNS)))
    for gpu in args.gpus.split(","):
        for job in args.jobs.split(","):
            for knows_images in (False, True):
                with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                    run = alone.submit(simulate, gpu, job, args.seed, knows_images=knows_images)
                    figures = run.result()
                knows = "images" if knows_images else "text"
                shown = " | ".join(f"{figure:.1f}" for figure in figures)
                print(f"| {gpu} | {job} | {LINES[job]:,} | {knows} | {shown} |", flush=True)
                rows.append([gpu, job, knows, *figures])
    json.dump({"seed": args.seed, "rows": rows, "versions": versions()}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
