"""How well iterations can be predicted, and how fast.

    python -m cosched.predictors compare --truth kernel-table --data-dir DIR
    python -m cosched.predictors compare --log iterations.jsonl --in-order --plot errors.png
    python -m cosched.predictors calibrate --truth roofline --noise 0.05 --slower 2
    python -m cosched.predictors time --truth roofline

`compare` fits every predictor to the same iterations and shows its error on others: of a cost
model, of a log that a server wrote with --cosched-iteration-log, or of a profile. `calibrate`
starts cold and learns from one iteration after the other. `time` measures prediction, inverse and
fit on this machine. Each prints a table and, as its last line, one JSON object. Each takes some 5
to 30 s.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from cosched.command_line import (
    JsonOption,
    Kind,
    NewFile,
    OldFile,
    Parser,
    Part,
    add_command,
    add_field_option,
    existing_file,
    number,
    run_command,
    save_output,
    whole,
)
from cosched.core.batch import BatchShape, BatchTotals, Prefill
from cosched.core.estimates import Predictor
from cosched.cost_models.base import CostModel
from cosched.cost_models.capacity import kv_capacity_tokens
from cosched.cost_models.graph_sizes import default_graph_sizes
from cosched.cost_models.noise import NoisyModel
from cosched.cost_models.registry import COST_MODELS, make_cost_model
from cosched.cost_models.specs import GPUS, MODELS, gpu_spec, model_spec
from cosched.errors import ConfigError
from cosched.latency.calibration import Calibrator
from cosched.latency.compare import (
    KINDS,
    Comparison,
    compare_predictors,
    error_table,
    errors_of,
    hold_out,
    kind_of,
    measure,
    scheduler_batches,
)
from cosched.latency.features import totals_table
from cosched.latency.graphs import GraphSizes
from cosched.latency.predictor import PREDICTORS
from cosched.latency.profile_file import MeasuredPoint, read_points
from cosched.latency.relative_error import summarise
from cosched.metrics.figure import check_can_draw, new_figure, save, tidy
from cosched.simulation.machine import Machine
from cosched.simulation.options import SEED, data_dir_of
from cosched.simulation.run import CostSpec, RunSpec

__all__ = ["main"]


class _Truth(JsonOption):
    """
    outliers  of the iterations, ten times as long (default: none)
    graphs    tell `cosched` the sizes of the CUDA graphs where there are any
    """

    outliers: Annotated[float, Kind(number(at_least=0, at_most=1), "SHARE")] = 0.0
    iterations: Annotated[int, Kind(whole(at_least=10), "N")] = 8000
    graphs: bool = True


class Compare(_Truth):
    """Errors of all predictors on held-out iterations.

    log       iterations of a server, instead of --truth: its --cosched-iteration-log, or a profile
              that `python -m cosched.profile measure` wrote
    held_out  of the iterations
    in_order  hold out the last iterations and not some of all: what a fit says of the time after it
    plot      picture of predicted against measured
    """

    log: OldFile | None = None
    held_out: Part = 0.3
    in_order: bool = False
    plot: NewFile | None = None


class Calibrate(_Truth):
    """Error of a predictor that learns while it runs.

    slower  how much longer iterations take in the third quarter
    """

    slower: Annotated[float, Kind(None, "FACTOR")] = 1.0


class Time(_Truth):
    """How long prediction, inverse and fit take here."""

    iterations: Annotated[int, Kind(whole(at_least=10), "N")] = 80_000


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m cosched.predictors", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    known = "\n".join(f"  {e.name:<10}{e.summary} ({e.source})" for e in PREDICTORS.values())
    for command in (
        add_command(commands, Compare, _compare, description=f"Predictors:\n{known}"),
        add_command(commands, Calibrate, _calibrate),
        add_command(commands, Time, _time),
    ):
        _add_truth(command)
    return parser


def _add_truth(parser: argparse.ArgumentParser) -> None:
    add = partial(add_field_option, parser, CostSpec)
    add("name", "--truth", dest="truth", default=None, choices=sorted(COST_MODELS))
    add("profile", type=existing_file, metavar="FILE")
    add("noise_sigma", "--noise", dest="noise", type=number(at_least=0, at_most=1), metavar="SIGMA")
    add = partial(add_field_option, parser, Machine)
    add("model", choices=sorted(MODELS))
    add("gpu", choices=sorted(GPUS))
    add("tp")
    add = partial(add_field_option, parser, RunSpec)
    add("data_dir", type=Path, metavar="DIR")
    add("seed", type=SEED)


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments are wrong."""
    run_command(build_parser().parse_args(argv), packages=["numpy"], with_config=True)


def _truth(arguments: argparse.Namespace) -> tuple[CostModel, GraphSizes | None, int]:
    """(cost model, its CUDA graphs, KV capacity [tokens]), noise not added."""
    named = data_dir_of(arguments)
    name = arguments.truth or ("kernel-table" if named else "roofline")
    truth = make_cost_model(
        name,
        model=arguments.model,
        gpu=arguments.gpu,
        tp=arguments.tp,
        data_dir=named,
        profile=arguments.profile,
    )
    gpu = gpu_spec(arguments.gpu)
    padded = name == "kernel-table" and arguments.graphs
    graphs = default_graph_sizes(gpu, arguments.tp) if padded else None
    return truth, graphs, kv_capacity_tokens(model_spec(arguments.model), gpu, arguments.tp)


def _noisy(truth: CostModel, arguments: argparse.Namespace) -> CostModel:
    if not arguments.noise and not arguments.outliers:
        return truth
    return NoisyModel(
        truth,
        seed=arguments.seed,
        sigma=arguments.noise,
        outlier_ratio=arguments.outliers,
        outlier_factor=10.0,
    )


def _shuffled(batches: list[BatchShape], seed: int) -> list[BatchShape]:
    return [batches[i] for i in np.random.default_rng(seed).permutation(len(batches))]


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.plot is not None:
        check_can_draw()
    graphs: GraphSizes | None = None
    if arguments.log is not None:
        points = read_points(arguments.log)
    else:
        truth, graphs, capacity = _truth(arguments)
        batches = scheduler_batches(
            seed=arguments.seed, num=arguments.iterations, max_kv_tokens=capacity
        )
        points = measure(_noisy(truth, arguments).iteration_s, batches)
    rest, held_out = hold_out(
        points, arguments.held_out, seed=None if arguments.in_order else arguments.seed
    )
    results = compare_predictors(rest, held_out, graphs=graphs)
    print("\n".join(error_table(results, len(rest))))
    save_output(arguments, arguments.plot, lambda path: _plot(path, held_out, results))
    return {
        "num_fitted": len(rest),
        "num_held_out": len(held_out),
        "errors": errors_of(results),
    }


def _pc(share: float, width: int, digits: int = 2) -> str:
    return f"{100 * share:>{width}.{digits}f}"


def _plot(
    path: Path, held_out: Sequence[MeasuredPoint], results: Mapping[str, Comparison | str]
) -> None:
    """Predicted against measured time, one panel per predictor, one colour per kind of batch."""
    fitted = {name: r for name, r in results.items() if not isinstance(r, str)}
    if not fitted:
        raise ConfigError("no predictor could be fitted: there is nothing to plot")
    figure = new_figure(width=3.6 * len(fitted), height=4.0)
    measured = np.array([point.seconds for point in held_out]) * 1e3
    kinds = np.array([kind_of(point.batch) for point in held_out])
    bounds = (measured.min() * 0.8, measured.max() * 1.25)
    panels = figure.subplots(1, len(fitted), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (name, result) in zip(panels, fitted.items(), strict=True):
        tidy(axes, title=f"{name}: {100 * result.errors['all'].mean:.1f} %", x="measured [ms]")
        axes.plot(bounds, bounds, color="#888888", linewidth=0.8)
        predicted = np.array(result.predicted_s) * 1e3
        for kind, colour in zip(KINDS, _COLOURS, strict=True):
            of_kind = kinds == kind
            axes.scatter(measured[of_kind], predicted[of_kind], s=3, color=colour, label=kind)
        axes.set(xscale="log", yscale="log", xlim=bounds, ylim=bounds)
    panels[0].set_ylabel("predicted [ms]", fontsize=9.5)
    panels[0].legend(frameon=False, fontsize=8, markerscale=3)
    save(figure, path)


# Okabe and Ito's, as in the other pictures: kinds of batches are not classes of requests.
_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73")


def _calibrate(arguments: argparse.Namespace) -> dict[str, Any]:
    truth, graphs, capacity = _truth(arguments)
    batches = _shuffled(
        scheduler_batches(seed=arguments.seed, num=arguments.iterations, max_kv_tokens=capacity),
        arguments.seed,
    )
    noisy = _noisy(truth, arguments)
    calibrator = Calibrator(graphs=graphs)
    slow = range(len(batches) // 2, len(batches) * 3 // 4)
    true_s, estimate_s, predicted_s = [], [], []
    for i, batch in enumerate(batches):
        factor = arguments.slower if i in slow else 1.0
        totals = BatchTotals.of(batch)
        true_s.append(truth.iteration_s(batch) * factor)
        estimate_s.append(calibrator.estimate_s(totals))
        predicted_s.append(calibrator.predict_s(totals))
        calibrator.observe(batch, noisy.iteration_s(batch) * factor)

    print("error of estimate and prediction against the time without noise [%]")
    print(f"{'iterations':<16}{'estimate':>10}{'predicted':>12}{'too short by > 3 %':>22}")
    rows = []
    for first, last in _stretches(len(batches), slow):
        true = np.array(true_s[first:last])
        estimate = summarise(estimate_s[first:last], true.tolist())
        ratio = np.array(predicted_s[first:last]) / true - 1
        short = float((ratio < -0.03).mean())
        print(
            f"{f'{first}-{last}':<16}{_pc(estimate.mean, 10)}"
            f"{f'{100 * ratio.mean():+.2f}':>12}{_pc(short, 22)}"
        )
        rows.append(
            {
                "first": first,
                "last": last,
                "estimate": asdict(estimate),
                "predicted_bias": float(ratio.mean()),
                "too_short_ratio": short,
            }
        )
    return {"stretches": rows, "num_fits": calibrator.num_fits}


def _stretches(num: int, slow: range) -> list[tuple[int, int]]:
    """Half-open stretches of iterations: doubling, and finer after each change of the machine."""
    ends = {0, num, slow.start, slow.stop}
    ends |= {64 << i for i in range(20) if 64 << i < slow.start}
    ends |= {change + n for change in (slow.start, slow.stop) for n in (1, 20) if change + n < num}
    ordered = sorted(ends)
    return list(pairwise(ordered))


def _time(arguments: argparse.Namespace) -> dict[str, Any]:
    truth, graphs, capacity = _truth(arguments)
    batches = scheduler_batches(
        seed=arguments.seed, num=arguments.iterations, max_kv_tokens=capacity
    )
    noisy = _noisy(truth, arguments)
    seconds = np.array([noisy.iteration_s(batch) for batch in batches])
    table_s = _least_s(partial(totals_table, batches), number=1)
    table = totals_table(batches)
    mixed = BatchTotals.of(
        BatchShape(prefills=[Prefill(512, 8000)], decodes=list(range(100, 4100, 20)))
    )
    decode = mixed.decodes_only()
    rows: dict[str, dict[str, float]] = {}
    for name, entry in PREDICTORS.items():
        predictor = entry.fit(table, seconds, graphs)
        rows[name] = {
            **_call_times(predictor, mixed, decode),
            "fit_s": _least_s(partial(entry.fit, table, seconds, graphs), number=1),
        }
    calibrator = Calibrator(graphs=graphs)
    observed = sorted(
        timeit.timeit(partial(calibrator.observe, batch, noisy.iteration_s(batch)), number=1)
        for batch in _shuffled(batches, arguments.seed)[:4000]
    )
    rows[calibrator.name] = _call_times(calibrator, mixed, decode)
    print(f"{'':<12}{'predict mixed':>14}{'decode':>10}{'inverse [us]':>14}{'fit [ms]':>12}")
    for name, row in rows.items():
        print(
            f"{name:<12}{row['predict_mixed_s'] * 1e6:>14.2f}{row['predict_decode_s'] * 1e6:>10.2f}"
            f"{row['max_prefill_s'] * 1e6:>14.1f}"
            + (f"{row['fit_s'] * 1e3:>12.1f}" if "fit_s" in row else "")
        )
    observe = {
        "p50_s": observed[len(observed) // 2],
        "p99_s": observed[int(len(observed) * 0.99)],
        "max_s": observed[-1],
    }
    print(f"table of {len(batches)} batches: {table_s * 1e3:.0f} ms")
    print(
        "observe: "
        + ", ".join(f"{name[:-2]} {value * 1e6:.0f} us" for name, value in observe.items())
    )
    return {"seconds": rows, "table_s": table_s, "observe": observe}


def _call_times(predictor: Predictor, mixed: BatchTotals, decode: BatchTotals) -> dict[str, float]:
    limit_s = 2 * predictor.predict_s(mixed)
    return {
        "predict_mixed_s": _least_s(partial(predictor.predict_s, mixed)),
        "predict_decode_s": _least_s(partial(predictor.predict_s, decode)),
        "max_prefill_s": _least_s(
            partial(predictor.max_prefill, mixed, 4000, limit_s, 8192), number=1000
        ),
    }


def _least_s(function: Callable[[], object], number: int = 10_000) -> float:
    return min(timeit.repeat(function, number=number, repeat=5)) / number


if __name__ == "__main__":
    main()
