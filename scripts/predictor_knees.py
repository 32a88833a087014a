#!/usr/bin/env python3
"""Error of the default predictor where kernels fill their tiles, and what it costs chat's pace.

    scripts/predictor_knees.py --data-dir DIR [--gpus A100-80,H100] [--seconds 120] [--write FILE]

For each simulated GPU (Llama-3.1-8B, `--device-overheads auto`) the predictor learns in two ways:
`serving` is that of a server after --seconds of chat beside a job of arXiv documents, `profile` is
fitted by ``cosched profile measure --virtual``. Then iterations of the sizes around the ends of
tiles, and between these, are predicted and compared with the simulated machine, beside 0 to 200
decodes with contexts of 500 to 8,000 tokens.

  time       error of the predicted time of the iteration, of sizes that the predictor has seen
  added      error of what a prompt token adds to the decodes alone, the mean of its prompt tokens
  step       of 16 tokens across the end of a tile: predicted less true, in shares of the iteration
  chosen     size that the pace of chat chooses by predictions, and by true times [tokens, median]
  lost       efficiency that its choice loses to the best size, by true times, and what a choice by
             these loses; 2 % may be given (`budgets.chat_pace`)

Each simulation runs in its own process. The last line is JSON.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from cosched.core.batch import BatchShape, BatchTotals, Prefill
from cosched.core.estimates import Predictor
from cosched.lab.cost_models.cost_model import CostModel
from cosched.lab.cost_models.overheads import Launches
from cosched.lab.simulation import machine as machines
from cosched.lab.simulation import run
from cosched.lab.simulation.run import cost_model_of, launches_of
from cosched.lab.simulation.run_spec import CostSpec, RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from cosched.predict.calibration import Calibrator
from cosched.predict.profile_file import Profile
from cosched.schedule.chat_pace import efficiencies, sizes_up_to, smallest
from cosched.versions import versions

GPUS = ("A100-80", "H100", "H200")
COST_MODELS = ("kernel-table", "roofline")
CHATS_PER_S = {"A100-80": 2.5, "H100": 5.0, "H200": 5.0}
KNEES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of an iteration where kernels fill a tile, or begin to."""
BESIDE = (-8, -1, 0, 1, 8)
DECODES = (0, 16, 64, 200)
CONTEXTS = (500, 2500, 8000)
CACHED = (0, 4000)
TARGET_S = 0.05
COST = 0.02
LEAST_NEW = 16


class Machine(NamedTuple):
    """The simulated machine: true times, and the memory for contexts."""

    cost_model: CostModel
    launches: Launches
    kv_tokens: int

    @classmethod
    def of(cls, spec: RunSpec) -> Machine:
        return cls(cost_model_of(spec), launches_of(spec), spec.machine.capacity())

    def seconds(self, shape: BatchShape) -> float:
        """Of an iteration in a row of such iterations, each launched once the host is free [s]."""
        kernels_s = self.cost_model.iteration_s(shape)
        host_s = done_s = before_s = 0.0
        for _ in range(4):
            before_s = done_s
            times = self.launches.launch(shape, now_s=host_s, device_done_s=done_s)
            done_s = max(times.start_s + kernels_s, times.returned_s)
            host_s = max(times.returned_s, before_s)  # two are under way at once
        return done_s - before_s


class Oracle(Predictor):
    """The true times, of batches whose requests are all alike."""

    margin = 0.0

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def knows(self, totals: BatchTotals) -> bool:
        return True

    def predict_s(self, totals: BatchTotals) -> float:
        return self._machine.seconds(shape_of(totals))


def shape_of(totals: BatchTotals) -> BatchShape:
    """A batch with these totals: prefills and decodes as equal as they can be."""

    def parts(total: int, number: int) -> list[int]:
        return [total // number + (place < total % number) for place in range(number)]

    num, decodes = totals.num_prefills, totals.num_decodes
    prefills = (
        [*map(Prefill, parts(totals.num_new, num), parts(totals.num_cached, num))] if num else []
    )
    return BatchShape(
        prefills=prefills,
        decodes=parts(totals.decode_context, decodes) if decodes else (),
    )


class Case(NamedTuple):
    """Decodes, and the prompt whose tokens are beside them."""

    decodes: int
    context: int
    cached: int

    def totals(self, num_new: int = 0) -> BatchTotals:
        totals = BatchTotals()
        if self.decodes:
            totals.add_decodes([self.context] * self.decodes)
        if num_new:
            totals.add_prefill(num_new, self.cached)
        return totals


def cases(kv_tokens: int) -> Iterator[Case]:
    for decodes, context, cached in product(DECODES, CONTEXTS, CACHED):
        is_first = bool(decodes) or context == CONTEXTS[0]
        if is_first and decodes * context <= kv_tokens:
            yield Case(decodes, context, cached)


def compared(predictor: Predictor, machine: Machine) -> dict[str, Any]:
    """What the docstring of this file names."""
    found: dict[str, list[float]] = defaultdict(list)
    oracle = Oracle(machine)
    at_knees = [knee + step for knee in KNEES for step in BESIDE]
    between = [(low + high) // 2 for low, high in pairwise(KNEES)]
    margin = 1 + predictor.margin

    def predicted_s(totals: BatchTotals) -> float:
        return predictor.predict_s(totals) / margin if totals.num_new + totals.num_decodes else 0.0

    for case in cases(machine.kv_tokens):
        alone = case.totals()
        alone_s = machine.seconds(shape_of(alone)) if case.decodes else 0.0
        predicted_alone_s = predicted_s(alone)
        times: dict[int, tuple[float, float]] = {}
        for where, sizes in (("knee", at_knees), ("between", between)):
            for size in sizes:
                num_new = size - case.decodes
                if num_new < LEAST_NEW:
                    continue
                totals = case.totals(num_new)
                if not predictor.knows(totals):
                    found["unknown"].append(1.0)
                    continue
                true_s, guess_s = oracle.predict_s(totals), predicted_s(totals)
                times[size] = true_s, guess_s
                found[f"time {where}"].append(guess_s / true_s - 1)
                added = (guess_s - predicted_alone_s) / (true_s - alone_s) - 1
                found[f"added {where}"].append(added)
        for knee in KNEES:
            low, high = times.get(knee - 8), times.get(knee + 8)
            if low and high:
                found["step"].append((high[1] - low[1] - (high[0] - low[0])) / low[0])
        if case.decodes:
            for name, value in chosen(predictor, oracle, case).items():
                found[name].append(value)
    return {name: summary(values) for name, values in found.items()}


def chosen(predictor: Predictor, oracle: Predictor, case: Case) -> dict[str, float]:
    """By the pace of chat, beside these decodes."""
    prompt = Prefill(2500, case.cached)
    totals = case.totals()
    true_sizes = sizes_up_to(oracle, totals, prompt, TARGET_S)
    if not predictor.knows(case.totals(true_sizes[-1][0])):
        return {}  # iterations are as long as the targets allow until they are known
    truth = efficiencies(oracle, totals, prompt, true_sizes)
    guessed_sizes = [
        (num_new, seconds)
        for num_new, seconds in sizes_up_to(predictor, totals, prompt, TARGET_S)
        if num_new <= true_sizes[-1][0]
    ]
    guess = efficiencies(predictor, totals, prompt, guessed_sizes)
    by_guess, by_truth = smallest(guess, COST), smallest(truth, COST)
    best = max(truth)
    return {
        "chosen": true_sizes[by_guess][0] + case.decodes,
        "chosen by true times": true_sizes[by_truth][0] + case.decodes,
        "lost": 1 - truth[by_guess] / best,
        "lost by true times": 1 - truth[by_truth] / best,
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Of signed errors: the median, and the largest and the median of their sizes."""
    sizes = [abs(value) for value in values]
    return {
        "bias": statistics.median(values),
        "median": statistics.median(sizes),
        "worst": max(sizes),
        "mean": statistics.fmean(sizes),
        "num": len(values),
    }


def spec_of(arguments: argparse.Namespace, gpu: str, cost_model: str) -> RunSpec:
    return RunSpec(
        setting=setting_of("cosched"),
        machine=machines.Machine(model="Llama-3.1-8B", gpu=gpu),
        cost=CostSpec(name=cost_model, device_overheads="auto"),
        online=WorkloadSpec(name="azure-like", rate=CHATS_PER_S[gpu]),
        offline=WorkloadSpec(name="arxiv", num_requests=2000, client="all"),
        duration_s=arguments.seconds,
        seed=arguments.seed,
        data_dir=str(arguments.data_dir),
    )


def after_serving(spec: RunSpec) -> dict[str, Any]:
    """With the predictor of a server that has served."""
    from cosched.lab.simulation.virtual import VirtualEngine

    engines: list[Any] = []
    runs = VirtualEngine.run

    def noted(self: Any, *given: Any, **named: Any) -> None:
        engines.append(self)
        runs(self, *given, **named)

    VirtualEngine.run = noted
    run.execute(spec)
    predictor = engines[0].scheduler.cosched.predictor
    return compared(predictor, Machine.of(spec))


def with_profile(spec: RunSpec) -> dict[str, Any]:
    """With the predictor of a profile of the same machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "cosched.profile", "measure", "--write", str(path)]
        command += ["--virtual", "--quiet", "--gpu", spec.machine.gpu, "--seed", str(spec.seed)]
        command += ["--cost-model", spec.cost.name, "--device-overheads", "auto"]
        command += ["--data-dir", str(spec.data_dir)]
        subprocess.run(command, check=True, capture_output=True)
        shape = Profile.load(path).predictor
    assert shape is not None
    return compared(Calibrator(shape), Machine.of(spec))


HOW = {"serving": after_serving, "profile": with_profile}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown. Errors are median / worst."""
    yield (
        "| GPU, cost model | learnt | time: at tiles' ends | between | added: at ends | between | "
        "step | size chosen, by true times | lost, by true times |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        found = row["found"]

        def errors(name: str, found: dict[str, Any] = found) -> str:
            return f"{100 * found[name]['median']:.1f} / {100 * found[name]['worst']:.0f}"

        def both(name: str, form: str, found: dict[str, Any] = found) -> str:
            return ", ".join(form.format(found[f"{name}{by}"]) for by in ("", " by true times"))

        lost = (
            f"{100 * found[name]['mean']:.1f} (at most {100 * found[name]['worst']:.1f})"
            for name in ("lost", "lost by true times")
        )
        yield (
            f"| {row['gpu']}, {row['cost_model']} | {row['how']} | {errors('time knee')} | "
            f"{errors('time between')} | {errors('added knee')} | {errors('added between')} | "
            f"{errors('step')} | {both('chosen', '{0[bias]:.0f}')} | {', '.join(lost)} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--gpus", default=",".join(GPUS))
    parser.add_argument("--cost-models", default=",".join(COST_MODELS))
    parser.add_argument("--how", default=",".join(HOW))
    parser.add_argument("--seconds", type=float, default=120.0, help="of serving (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="the table, as Markdown")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    parts = (arguments.gpus, arguments.cost_models, arguments.how)
    for gpu, cost_model, how in product(*(part.split(",") for part in parts)):
        spec = spec_of(arguments, gpu, cost_model)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as one:
            found = one.submit(HOW[how], spec).result()
        rows.append({"gpu": gpu, "cost_model": cost_model, "how": how, "found": found})
        print([*table(rows[-1:])][-1], flush=True)
    if arguments.write:
        arguments.write.write_text("\n".join(table(rows)) + "\n", encoding="utf-8")
    print(json.dumps({"program": "predictor_knees", "seed": arguments.seed, **versions()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
