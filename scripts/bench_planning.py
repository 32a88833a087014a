#!/usr/bin/env python3
"""Host time of scheduling per iteration, with many offline requests waiting.

    .venv/bin/python scripts/bench_planning.py --data-dir DIR
    .venv/bin/python scripts/bench_planning.py --waiting 10000 --policies hygen --stock

SGLang's scheduler runs in this process on a virtual A100 (docs/simulation.md): policy, view,
adapter, SGLang's loop and queues are those of production; only the forward pass is modelled.
--waiting offline requests of --tokens tokens arrive at the start, behind 57 shared prefixes of nine
tenths of the prompt, and another one when one ends; online requests arrive at --online-rate. Timing
starts when 90 % of --running requests run, or after 2,000 iterations.

  plan      view, policy, validation, and learning from the last iteration
  policy    part of plan: the policy's call
  result    what cosched learns from the tokens of an iteration, while the next one runs
  apply     the rest of SGLang's `get_next_batch_to_run`: building the batch
  schedule  plan + apply; under stock scheduling all of `get_next_batch_to_run`

Each policy runs in its own process. The garbage collector has its default thresholds, as in a
server; full collections that fall into a plan are included and counted. The last line is JSON.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import gc
import json
import os
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import count, islice
from multiprocessing import get_context
from typing import Any

import numpy as np

from cosched.config import ENV_VAR
from cosched.core.request import RequestClass
from cosched.lab.simulation.arrivals import Arrival
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import config_of, cost_model_of, engine_flags, identity_of
from cosched.lab.simulation.run_spec import CostSpec, RunSpec
from cosched.lab.simulation.setting import Setting
from cosched.policies import POLICIES
from cosched.versions import versions

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
NUM_HEADS = 57
FULL_RATIO = 0.9
MAX_WARM_UP = 2000
DEFAULT_THRESHOLDS = (700, 10, 10)
PERCENTILES = {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100}


class Traffic:
    """A source for `VirtualEngine`: all offline requests at the start, online ones all the time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rng = np.random.default_rng(options.seed)
        self._offline = self._offline_arrivals()
        self._num_online = 0
        self._num_due = options.waiting + options.running
        self._next_s = 0.0

    def due(self, now_s: float) -> Iterator[Arrival]:
        yield from islice(self._offline, self._num_due)
        self._num_due = 0
        while self._next_s <= now_s:
            ids = self._rng.integers(10, 30_000, self._options.online_tokens)
            yield self._arrival(f"on{self._num_online}", RequestClass.ONLINE, ids)
            self._num_online += 1
            self._next_s += self._rng.exponential(1 / self._options.online_rate)

    def next_s(self) -> float | None:
        return self._next_s

    def on_finish(self, record: Any, output_ids: Any = None) -> None:
        self._num_due += record.request_class is RequestClass.OFFLINE

    def _offline_arrivals(self) -> Iterator[Arrival]:
        options, rng = self._options, np.random.default_rng(self._options.seed)
        num_head_tokens = options.tokens * 9 // 10
        heads = rng.integers(0, 32_000, (NUM_HEADS, num_head_tokens))
        for index in count():
            tail = rng.integers(0, 32_000, options.tokens - num_head_tokens)
            ids = np.concatenate([heads[rng.integers(NUM_HEADS)], tail])
            yield self._arrival(f"off{index}", RequestClass.OFFLINE, ids)

    def _arrival(self, rid: str, request_class: RequestClass, ids: Any) -> Arrival:
        mean = self._options.output_tokens
        return Arrival(
            rid=rid,
            arrival_s=self._next_s if request_class is RequestClass.ONLINE else 0.0,
            request_class=request_class,
            input_ids=array("q", ids.tolist()),
            num_output_tokens=int(self._rng.integers(mean // 2, mean * 3 // 2)),
            max_new_tokens=mean * 2,
        )


class Stopwatch:
    """Times wrapped methods; one row of seconds per iteration while it is on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_on = False
        self.rows: defaultdict[str, list[float]] = defaultdict(list)
        self.num_full_collections = 0
        self._now: defaultdict[str, float] = defaultdict(float)
        gc.callbacks.append(self._on_gc)

    def around(self, target: Any, method: str, name: str) -> None:
        original: Callable[..., Any] = getattr(target, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            try:
                return original(*args, **kwargs)
            finally:
                self._now[name] += self._clock() - began

        setattr(target, method, timed)

    def next_iteration(self) -> None:
        if self.is_on:
            for name, seconds in self._now.items():
                self.rows[name].append(seconds)
        self._now.clear()

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        self.num_full_collections += self.is_on and phase == "stop" and info["generation"] == 2


def measure(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Fill the scheduler, let it run, time it."""
    spec = RunSpec(
        setting=setting,
        machine=Machine(max_running_requests=options.running),
        cost=CostSpec(name=options.cost_model),
        seed=options.seed,
        data_dir=options.data_dir,
        config=(("latency_model", options.latency_model),) if options.latency_model else (),
    )
    os.environ[ENV_VAR] = config_of(spec).to_json()
    from cosched.lab.simulation.virtual import VirtualEngine

    watch = Stopwatch(CLOCKS[options.clock])
    with VirtualEngine(
        flags=engine_flags(spec), cost_model=cost_model_of(spec), identity=identity_of(spec)
    ) as engine:
        scheduler = engine.scheduler
        watch.around(scheduler, "get_next_batch_to_run", "schedule")
        controller = getattr(scheduler, "cosched", None)
        if controller is not None:
            watch.around(controller.planner.policy, "plan", "policy")
            watch.around(controller, "plan", "plan")
            watch.around(controller, "finished", "result")
        slots = scheduler.req_to_token_pool
        first = 0
        num_running: list[int] = []
        num_waiting: list[int] = []

        def is_over() -> bool:
            nonlocal first
            num_done = len(engine.iterations)
            watch.next_iteration()
            if num_done == 0:
                gc.set_threshold(*DEFAULT_THRESHOLDS)  # the simulator collects less than a server
                return False
            running = slots.size - slots.available_size()
            if not watch.is_on:
                watch.is_on = running >= FULL_RATIO * options.running or num_done >= MAX_WARM_UP
                first = num_done
                return False
            num_running.append(running)
            num_waiting.append(len(scheduler.waiting_queue))
            watch.is_on = num_done < first + options.iterations
            return not watch.is_on

        engine.run([Traffic(options)], until=is_over)
        iteration_s = float(engine.iterations.column("duration_s")[first:].mean())
    rows = {name: np.array(seconds) for name, seconds in watch.rows.items()}
    if "plan" in rows:
        rows["apply"] = rows["schedule"] - rows["plan"]
    return {
        "mean_running": round(float(np.mean(num_running)), 1),
        "mean_waiting": round(float(np.mean(num_waiting))),
        "mean_iteration_ms": round(iteration_s * 1e3, 3),
        "full_collections": watch.num_full_collections,
        "host_ms": {name: summary(seconds) for name, seconds in rows.items()},
    }


def summary(seconds: np.ndarray) -> dict[str, float]:
    values = dict(zip(PERCENTILES, np.percentile(seconds, list(PERCENTILES.values())), strict=True))
    return {
        name: round(float(value) * 1e3, 4)
        for name, value in {"mean": seconds.mean(), **values}.items()
    }


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    for name in options.policies:
        yield Setting(name=name, summary="", policy=name)
    for order in options.stock:
        is_priority = order == "priority"
        yield Setting(
            name=f"stock {order}",
            summary="",
            policy="priority" if is_priority else "sglang",
            schedule_policy=None if is_priority else order,
        )


def print_table(results: dict[str, Any]) -> None:
    columns = ("mean", *PERCENTILES)
    print(f"\nhost time [ms]{'':12}" + "".join(f"{name:>9}" for name in columns))
    for name, result in results.items():
        for part, row in result["host_ms"].items():
            print(f"{name:<16}{part:<10}" + "".join(f"{row[key]:9.3f}" for key in columns))
        print(
            f"{name:<16}{result['mean_running']:.0f} running, {result['mean_waiting']:,} waiting, "
            f"iterations of {result['mean_iteration_ms']:.1f} ms, "
            f"{result['full_collections']} full collections"
        )


def parse() -> argparse.Namespace:
    planning = [name for name, entry in POLICIES.items() if entry.make is not None]
    learning = [name for name in planning if POLICIES[name].predictor is None]
    stock = ["fcfs", "lpm", "priority"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--policies",
        nargs="*",
        choices=planning,
        default=learning,
        help="default: all that need no profile",
    )
    add("--stock", nargs="*", choices=[*stock, "dfs-weight"], default=stock, help=" ".join(stock))
    add("--waiting", type=int, default=100_000, help="offline requests (100,000)")
    add("--running", type=int, default=200, help="request slots (200)")
    add("--tokens", type=int, default=1000, help="of an offline prompt (1,000)")
    add("--online-tokens", type=int, default=500, help="of an online prompt (500)")
    add("--output-tokens", type=int, default=200, help="of a reply, mean (200)")
    add("--online-rate", type=float, default=8.0, help="requests/s (8)")
    add("--iterations", type=int, default=2000, help="timed per policy (2,000)")
    add("--clock", choices=CLOCKS, default="wall", help="cpu: time of the thread only (wall)")
    add("--cost-model", default="kernel-table", help="of the virtual A100 (kernel-table)")
    add("--latency-model", metavar="FILE", help="profile to begin with (none)")
    add("--data-dir", default=os.environ.get("COSCHED_DATA"), metavar="DIR")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    results: dict[str, Any] = {}
    for setting in settings(options):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            results[setting.name] = process.submit(measure, setting, options).result()
        print(f"{setting.name}: done", flush=True)
    print_table(results)
    config = {name: value for name, value in vars(options).items() if name != "data_dir"}
    print(json.dumps({"config": config, "versions": versions(), "results": results}))


if __name__ == "__main__":
    main()
