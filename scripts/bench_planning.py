#!/usr/bin/env python3
"""Host time of scheduling, iteration by iteration, with 100,000 requests waiting.

    .venv/bin/python scripts/bench_planning.py --data-dir DIR
    .venv/bin/python scripts/bench_planning.py --waiting 10000 --policies hygen --stock

SGLang's own scheduler runs in this process on a virtual A100 (see docs/simulation.md): the policy,
the view, the adapter, SGLang's loop and its queues are the production ones, the forward pass alone
is modelled. --waiting offline requests are there from the start, of --tokens tokens, behind 57
shared prefixes of nine tenths of the prompt, as MMLU's subjects with five shots; --online-rate
online requests a second come beside them. Once --running requests run (nearly), --iterations
are timed:

  plan      view, policy and check of the plan, learning from the last iteration included
  apply     the rest of SGLang's `get_next_batch_to_run`: building the batch
  schedule  both: for stock all of its `get_next_batch_to_run`
  learn     of plan: `Calibrator.observe`, a call per iteration
  policy    of plan: the policy's call, with what it asks of the view
  again     with --again: the same once more on a view made anew, when all it reads has just been
            fetched from memory. Not in plan

Stock SGLang runs on the same requests under each of its --schedule-policy named by --stock, and
under priority scheduling. A policy per process, one after the other. Python's garbage collector is
as in a server: what was there after the start is frozen, thresholds are the default ones; full
collections are in the figures where they fall into a plan, and are counted beside them, as is the
longest one while requests came in.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import gc
import json
import os
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench_pool import prompts, sglang_array

from cosched.config import ENV_VAR
from cosched.core.request import RequestClass, Slo
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, config_of, cost_model_of, engine_flags
from cosched.lab.simulation.setting import Setting
from cosched.policies import POLICIES
from cosched.versions import versions

GOAL_PLAN_P99_MS = 1.0
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
DEFAULT_THRESHOLDS = (700, 10, 10)
"""Of Python's garbage collector, which SGLang leaves as they are."""

FULL = 0.9
"""Part of the request slots that must be taken before timing begins."""


class Traffic:
    """A source for `VirtualEngine`: everything offline at the start, online all the time."""

    def __init__(self, options: argparse.Namespace) -> None:
        from cosched.lab.simulation.arrivals import Arrival

        self._make = Arrival
        self._options = options
        self._rng = np.random.default_rng(options.seed)
        self._offline = self._offline_arrivals()
        self._num_online = 0
        self._next_s = 0.0

    def due(self, now_s: float) -> Iterator[Any]:
        yield from self._offline
        while self._next_s <= now_s:
            ids = self._rng.integers(10, 30_000, self._options.online_tokens)
            yield self._arrival("on", self._num_online, RequestClass.ONLINE, sglang_array(ids))
            self._num_online += 1
            self._next_s += self._rng.exponential(1 / self._options.online_rate)

    def next_s(self) -> float | None:
        return self._next_s

    def on_finish(self, record: Any) -> None:
        pass

    def _offline_arrivals(self) -> Iterator[Any]:
        options = self._options
        _, each = prompts(
            "heads",
            count=options.waiting + options.running,
            num_tokens=options.tokens,
            rng=np.random.default_rng(options.seed),
        )
        for index, ids in enumerate(each):
            yield self._arrival("off", index, RequestClass.OFFLINE, sglang_array(ids))

    def _arrival(
        self, kind: str, index: int, request_class: RequestClass, input_ids: array[int]
    ) -> Any:
        mean = self._options.output_tokens
        return self._make(
            rid=f"{kind}{index}",
            arrival_s=self._next_s if kind == "on" else 0.0,
            request_class=request_class,
            input_ids=input_ids,
            num_output_tokens=int(self._rng.integers(mean // 2, mean * 3 // 2)),
            max_new_tokens=mean * 2,
        )


class Stopwatch:
    """Puts itself around methods of objects; one row of seconds per iteration while it is on."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.is_on = False
        self.rows: dict[str, list[float]] = {}
        self.collections: dict[int, list[float]] = {0: [], 1: [], 2: []}
        self.longest_before_s = 0.0
        self._now: dict[str, float] = {}
        self._gc_began_s = 0.0
        gc.callbacks.append(self._on_gc)

    def around(self, target: Any, method: str, name: str) -> None:
        original: Callable[..., Any] = getattr(target, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            try:
                return original(*args, **kwargs)
            finally:
                self._now[name] = self._now.get(name, 0.0) + self._clock() - began

        setattr(target, method, timed)

    def next_iteration(self) -> None:
        if self.is_on:
            for name, seconds in self._now.items():
                self.rows.setdefault(name, []).append(seconds)
        self._now.clear()

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began_s = self._clock()
            return
        seconds = self._clock() - self._gc_began_s
        if self.is_on:
            self.collections[info["generation"]].append(seconds)
        else:
            self.longest_before_s = max(self.longest_before_s, seconds)


def plan_again(controller: Any, watch: Stopwatch) -> None:
    """Have each plan made once more on a view made anew, timed as "again": policies are pure."""
    view_args: tuple[Any, ...] = ()
    make_view = controller.view

    def view(*args: Any) -> Any:
        nonlocal view_args
        view_args = args
        return make_view(*args)

    def plan_twice(view: Any, carry: Any) -> Any:
        made = first.plan(view, carry)
        again.plan(make_view(*view_args), carry)
        return made

    policy = controller.policy
    first, again = SimpleNamespace(plan=policy.plan), SimpleNamespace(plan=policy.plan)
    watch.around(first, "plan", "policy")
    watch.around(again, "plan", "again")
    controller.view, policy.plan = view, plan_twice


def measure(setting: Setting, num_iterations: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fill the scheduler, let it run, time it."""
    spec = RunSpec(
        setting=setting,
        machine=Machine(max_running_requests=options.running),
        cost=CostSpec(name=options.cost_model),
        slo=Slo(ttft_s=1.0, tpot_s=0.05),
        seed=options.seed,
        data_dir=options.data_dir,
        config=(("latency_model", options.latency_model),) if options.latency_model else (),
    )
    os.environ[ENV_VAR] = config_of(spec).to_json()
    from cosched.lab.simulation.run import identity_of
    from cosched.lab.simulation.virtual import VirtualEngine

    watch = Stopwatch(CLOCKS[options.clock])
    with VirtualEngine(
        flags=engine_flags(spec),
        cost_model=cost_model_of(spec),
        identity=identity_of(spec),
    ) as engine:
        scheduler = engine.scheduler
        controller = getattr(scheduler, "cosched", None)
        watch.around(scheduler, "get_next_batch_to_run", "schedule")
        if controller is not None:
            if options.again:
                plan_again(controller, watch)
            else:
                watch.around(controller.policy, "plan", "policy")
            watch.around(controller, "plan", "plan")
            watch.around(controller.predictor, "observe", "learn")
        rows_held = scheduler.req_to_token_pool
        first, longest_s = 0, 0.0
        num_running: list[int] = []
        num_waiting: list[int] = []

        def is_over() -> bool:
            nonlocal first, longest_s
            num_done = len(engine.iterations)
            watch.next_iteration()
            if num_done == 0:
                gc.set_threshold(*DEFAULT_THRESHOLDS)  # the simulator collects less than a server
                return False
            running = rows_held.size - rows_held.available_size()
            if not watch.is_on:
                longest_s = watch.longest_before_s
                watch.is_on = running >= FULL * options.running or num_done >= options.most_warm_up
                first = num_done
                return False
            num_running.append(running)
            num_waiting.append(len(scheduler.waiting_queue))
            if num_done < first + num_iterations:
                return False
            watch.is_on = False
            return True

        engine.run([Traffic(options)], until=is_over)
        iteration_s = np.array(engine.iterations.column("duration_s"))[first:]
    rows = {name: np.array(seconds) for name, seconds in watch.rows.items()}
    if "again" in rows:
        rows["plan"] -= rows["again"]
        rows["schedule"] -= rows["again"]
    if "plan" in rows:
        rows["apply"] = rows["schedule"] - rows["plan"]
    mean_iteration_s = float(iteration_s.mean())
    return {
        "num_iterations": len(iteration_s),
        "warm_up_iterations": first,
        "mean_running": round(float(np.mean(num_running)), 1),
        "mean_waiting": round(float(np.mean(num_waiting))),
        "mean_iteration_ms": round(mean_iteration_s * 1e3, 3),
        "host_ms": {name: summary(seconds, mean_iteration_s) for name, seconds in rows.items()},
        "garbage": {
            f"generation {generation}": {
                "collections": len(pauses),
                "max_ms": round(max(pauses, default=0.0) * 1e3, 2),
            }
            for generation, pauses in watch.collections.items()
        }
        | {"longest_while_filling_ms": round(longest_s * 1e3, 1)},
    }


def summary(seconds: np.ndarray, mean_iteration_s: float) -> dict[str, float]:
    p50, p99, p999 = (float(value) * 1e3 for value in np.percentile(seconds, [50, 99, 99.9]))
    return {
        "mean": round(float(seconds.mean()) * 1e3, 4),
        "p50": round(p50, 4),
        "p99": round(p99, 4),
        "p99.9": round(p999, 4),
        "max": round(float(seconds.max()) * 1e3, 4),
        "share_of_iteration": round(float(seconds.mean()) / mean_iteration_s, 5),
    }


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    for name in options.policies:
        yield Setting(name=name, summary="", policy=name)
    for order in options.stock:
        if order == "priority":
            yield Setting(name="stock priority", summary="", policy="priority")
        else:
            yield Setting(name=f"stock {order}", summary="", policy="sglang", schedule_policy=order)


def print_table(results: dict[str, Any]) -> None:
    header = f"{'':<16}{'':<10}{'mean':>9}{'p50':>9}{'p99':>9}{'p99.9':>9}{'max':>9}  of iteration"
    print(f"\nhost time [ms]\n{header}")
    for name, result in results.items():
        for part in ("plan", "policy", "again", "apply", "schedule", "learn"):
            row = result["host_ms"].get(part)
            if row is not None:
                numbers = "".join(
                    f"{row[key]:9.3f}" for key in ("mean", "p50", "p99", "p99.9", "max")
                )
                print(f"{name:<16}{part:<10}{numbers}  {row['share_of_iteration']:12.2%}")
    print("\nstate and garbage collection")
    for name, result in results.items():
        full = result["garbage"]["generation 2"]
        print(
            f"{name:<16}{result['mean_running']:.0f} running, {result['mean_waiting']:,} waiting,"
            f" iterations of {result['mean_iteration_ms']:.1f} ms; full collections:"
            f" {full['collections']}, longest {full['max_ms']:.0f} ms, while filling"
            f" {result['garbage']['longest_while_filling_ms']:.0f} ms"
        )


def parse() -> argparse.Namespace:
    planning = [name for name, entry in POLICIES.items() if entry.make is not None]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policies", nargs="*", choices=planning, default=planning, help="default: all that plan"
    )
    parser.add_argument(
        "--stock",
        nargs="*",
        choices=["fcfs", "lpm", "dfs-weight", "priority"],
        default=["fcfs", "lpm", "priority"],
        help="stock orders beside them (fcfs lpm priority); none: leave stock out",
    )
    parser.add_argument("--waiting", type=int, default=100_000, help="offline requests (100,000)")
    parser.add_argument("--running", type=int, default=200, help="request slots (200)")
    parser.add_argument("--tokens", type=int, default=1000, help="of an offline prompt (1,000)")
    parser.add_argument("--online-tokens", type=int, default=500, help="of an online prompt (500)")
    parser.add_argument("--output-tokens", type=int, default=200, help="of a reply, mean (200)")
    parser.add_argument("--online-rate", type=float, default=8.0, help="requests/s (8)")
    parser.add_argument("--iterations", type=int, default=2000, help="timed per policy (2,000)")
    parser.add_argument(
        "--stock-iterations", type=int, default=500, help="timed of each stock order (500)"
    )
    parser.add_argument(
        "--most-warm-up", type=int, default=2000, help="iterations after which timing begins anyway"
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu leaves out when other processes had the core (wall)",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="make each plan twice: the second time from warm memory",
    )
    parser.add_argument("--cost-model", default="kernel-table", help="of the virtual A100")
    parser.add_argument("--latency-model", metavar="FILE", help="profile to begin with (none)")
    parser.add_argument("--data-dir", default=os.environ.get("COSCHED_DATA"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    options = parse()
    results: dict[str, Any] = {}
    for setting in settings(options):
        is_stock = POLICIES[setting.policy].make is None
        count = options.stock_iterations if is_stock else options.iterations
        # SGLang keeps process-wide state, and what one policy left behind would be collected during
        # the next.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            results[setting.name] = process.submit(measure, setting, count, options).result()
        print(f"{setting.name}: done", flush=True)
    print_table(results)
    p99_ms = {name: results[name]["host_ms"]["plan"]["p99"] for name in options.policies}
    met = all(value <= GOAL_PLAN_P99_MS for value in p99_ms.values())
    print(f"goal {'met' if met else 'MISSED'}: p99 of plan at most {GOAL_PLAN_P99_MS:g} ms")
    entry = {
        "program": "bench_planning",
        "config": {key: value for key, value in vars(options).items() if key != "data_dir"},
        "seed": options.seed,
        "versions": versions(),
        "goal_plan_p99_ms": GOAL_PLAN_P99_MS,
        "goal_met": met,
        "results": results,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(entry), flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
