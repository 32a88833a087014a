"""Measure what the host costs in an iteration, and fit the constants of ``--host-time FACTOR``.

    .venv/bin/python scripts/fit_host_time.py --data-dir DIR

SGLang's scheduler in one process on a virtual H100, with 50, 200 and 500 request slots and few or
many waiting offline requests (`bench_planning.Traffic`). What is measured is the time of the
scheduler's thread. Other processes can only make it longer, so a low quantile is fitted to the
`Terms` of `cosched.lab.simulation.host_time`. The last line is one JSON object.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import json
import os
import time
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench_planning import Traffic

from cosched.config import ENV_VAR
from cosched.lab.simulation.host_time import Load, Measured, Terms, kind_of
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.parallel import call_all
from cosched.lab.simulation.run import (
    CostSpec,
    RunSpec,
    config_of,
    cost_model_of,
    engine_flags,
    identity_of,
)
from cosched.lab.simulation.setting import setting_of
from cosched.policies import policy_entry
from cosched.predict.fitted import nnls
from cosched.versions import versions

Rows = list[tuple[Load, float]]


class Recorder(Measured):
    """Keeps what each launch and each result took."""

    def __init__(self) -> None:
        super().__init__(time.thread_time)
        self.launches: Rows = []
        self.results: Rows = []

    def launch_s(self, load: Load) -> float:
        seconds = super().launch_s(load)
        self.launches.append((load, seconds))
        return seconds

    def result_s(self, load: Load) -> float:
        seconds = super().result_s(load)
        self.results.append((load, seconds))
        return seconds


def record(name: str, running: int, waiting: int, options: argparse.Namespace) -> tuple[Rows, Rows]:
    spec = RunSpec(
        setting=setting_of(name),
        machine=Machine(gpu="H100", max_running_requests=running),
        cost=CostSpec(name="kernel-table" if options.data_dir else "roofline"),
        data_dir=options.data_dir,
    )
    os.environ[ENV_VAR] = config_of(spec).to_json()
    from cosched.lab.simulation.virtual import VirtualEngine

    traffic = Traffic(
        SimpleNamespace(  # type: ignore[arg-type]
            seed=options.seed,
            running=running,
            waiting=waiting,
            tokens=300,
            online_tokens=500,
            output_tokens=200,
            online_rate=4.0,
        )
    )
    host = Recorder()
    with VirtualEngine(
        flags=engine_flags(spec),
        cost_model=cost_model_of(spec),
        identity=identity_of(spec),
        host=host,
    ) as engine:
        engine.run([traffic], until=lambda: len(engine.iterations) >= options.iterations)
    # The first iterations receive all offline requests at once.
    return host.launches[5:], host.results[5:]


def fit(rows: Rows, quantile: float) -> Terms:
    """Of the relative error, by repeatedly weighted non-negative least squares."""
    factors = np.array([Terms.factors(load) for load, _ in rows], dtype=float)
    seconds = np.array([each for _, each in rows])
    relative = 1 / np.maximum(seconds, 1e-4)
    weights = relative
    for _ in range(40):
        weighted = factors * weights[:, None]
        found = nnls(weighted.T @ factors, weighted.T @ seconds)
        error = seconds - factors @ found
        side = np.where(error > 0, quantile, 1 - quantile)
        weights = relative * side / np.maximum(abs(error), 1e-5)
    names = [field.name for field in fields(Terms)]
    return Terms(**dict(zip(names, map(float, found), strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", nargs="*", default=["s1", "priority", "hygen", "cosched"])
    parser.add_argument("--running", type=int, nargs="*", default=[50, 200, 500])
    parser.add_argument("--waiting", type=int, nargs="*", default=[500, 8_000])
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--quantile", type=float, default=0.1)
    parser.add_argument("--data-dir", default=os.environ.get("COSCHED_DATA"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found: dict[str, tuple[Rows, Rows]] = {}
    grid = [
        (name, running, waiting, options)
        for name in options.scenarios
        for running in options.running
        for waiting in options.waiting
    ]
    for index, (launches, results) in call_all(record, grid, num_jobs=1):
        name, running, waiting, _ = grid[index]
        both = found.setdefault(kind_of(policy_entry(setting_of(name).policy)), ([], []))
        both[0].extend(launches)
        both[1].extend(results)
        means = [1e3 * float(np.mean([s for _, s in rows])) for rows in (launches, results)]
        print(
            f"{name}, {running} slots, {waiting} waiting: launch {means[0]:.2f} ms, "
            f"result {means[1]:.2f} ms",
            flush=True,
        )
    fitted: dict[str, dict[str, Any]] = {}
    for kind, (launches, results) in found.items():
        models = {
            part: fit(rows, options.quantile)
            for part, rows in (("launch", launches), ("result", results))
        }
        fitted[kind] = {part: asdict(terms) for part, terms in models.items()}
        print(f"{kind}: {models}", flush=True)
    config = {name: value for name, value in vars(options).items() if name != "data_dir"}
    print(json.dumps({"config": config, "versions": versions(), "fitted": fitted}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
