"""Measure how accurately output lengths are predicted, and how fast.

    python -m cosched.lengths compare --data-dir DIR
    python -m cosched.lengths compare --file prompts.jsonl --modes histogram,learned
    python -m cosched.lengths time

`compare` runs streams of prompts with known lengths through each mode: every request is asked about
when it arrives, and learned from when some more have come. Sets whose files are missing are left
out; three are generated. --file judges one's own: lines of {"prompt": text, "output_tokens": n}, or
with the "response" in place of its length. `time` measures on this machine what an estimate and a
lesson take. Each prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from cosched.command_line import (
    JsonOption,
    Kind,
    NewFile,
    OldFile,
    Parser,
    add_command,
    number,
    run_command,
    save_output,
    whole,
)
from cosched.errors import ConfigError, choices
from cosched.length import MODES, Facts, LengthConfig, LengthModel
from cosched.length.judge import LATER, Judged, Score, score, stream
from cosched.length.trees import held_out_medians
from cosched.metrics.figure import check_can_draw, new_figure, save, tidy
from cosched.simulation.options import SEED, data_dir_of
from cosched_traces.responses import (
    RESPONSE_SETS,
    Response,
    ResponseSet,
    iter_streams,
    read_responses_jsonl,
)

__all__ = ["main"]

TREES = "trees"
"""Not a mode: LightGBM, fitted offline to other requests of the same stream."""

_DEFAULT_MODES = ("limit", "histogram", "learned", "oracle-noise")


def _names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}: choose from {choices(known)}")
        return names

    return parse


Names = tuple[str, ...]


class Compare(JsonOption):
    """Errors, coverage and what is allocated, by mode and data set.

    sets       default: all that are there
    file       prompts of one's own, in place of sets
    by_stream  a row for each stream (model) of a set
    modes      default: limit,histogram,learned,oracle-noise; trees: LightGBM (to be installed),
               fitted to four fifths of a stream and judged by the rest
    coverage   of the upper estimate
    warm_up    first requests of each stream that are not judged
    delay      requests under way when one arrives (default: of the set; of a file 20)
    data_dir   default: $COSCHED_DATA
    plot       picture of the table
    """

    sets: Annotated[Names, Kind(_names(RESPONSE_SETS), "NAMES")] | None = None
    file: OldFile | None = None
    by_stream: bool = False
    modes: Annotated[Names, Kind(_names((*MODES, TREES)), "NAMES")] = _DEFAULT_MODES
    coverage: Annotated[float, Kind(number(above=0.5, below=1), "SHARE")] = 0.95
    warm_up: Annotated[int, Kind(whole(at_least=0), "N")] = 100
    delay: Annotated[int, Kind(whole(at_least=0), "N")] | None = None
    data_dir: Annotated[Path, Kind(Path, "DIR")] | None = None
    plot: NewFile | None = None
    seed: Annotated[int, Kind(SEED)] = 0


class Time(JsonOption):
    """How long an estimate and a lesson take here."""

    requests: Annotated[int, Kind(whole(at_least=100))] = 4000
    seed: Annotated[int, Kind(SEED)] = 0


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m cosched.lengths", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sets = "\n".join(f"  {name:<20}{one.summary}" for name, one in RESPONSE_SETS.items())
    modes = "\n".join(f"  {name:<20}{summary}" for name, summary in MODES.items())
    add_command(commands, Compare, _compare, description=f"Modes:\n{modes}\n\nSets:\n{sets}")
    add_command(commands, Time, _time)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments are wrong."""
    run_command(build_parser().parse_args(argv), packages=["numpy"], with_config=True)


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.plot is not None:
        check_can_draw()
    scores: dict[str, dict[str, Score]] = {}
    header = f"{'constant':>9}{'error':>9}{'tau':>7}{'pinball':>9}{'covered':>9}{'allocated':>11}"
    print(f"{'':<34}{header}{f'after {LATER}':>10}{'unasked':>9}")
    for name, responses, delay in _judged_apart(arguments):
        for mode in arguments.modes:
            found = scores.setdefault(name, {})[mode] = _score(arguments, responses, mode, delay)
            print(f"{name:<20.19}{mode:<14}{_row(found)}", flush=True)
    save_output(arguments, arguments.plot, lambda path: _plot(path, scores))
    return {
        "scores": {
            name: {mode: one._asdict() for mode, one in by_mode.items()}
            for name, by_mode in scores.items()
        }
    }


def _judged_apart(arguments: argparse.Namespace) -> Iterable[tuple[str, list[Response], int]]:
    """What gets rows of its own: sets, or their streams."""
    for name, responses, delay in _sets(arguments):
        if not arguments.by_stream:
            yield name, responses, delay
            continue
        for stream_name, of_stream in iter_streams(responses):
            yield stream_name or name, of_stream, delay


def _sets(arguments: argparse.Namespace) -> Iterable[tuple[str, list[Response], int]]:
    """(name, responses, requests under way) of what is to be judged. ConfigError when there is
    none."""
    if arguments.file is not None:
        delay = 20 if arguments.delay is None else arguments.delay
        yield arguments.file.name, read_responses_jsonl(arguments.file), delay
        return
    data_dir = data_dir_of(arguments)
    for name in arguments.sets or RESPONSE_SETS:
        one: ResponseSet = RESPONSE_SETS[name]
        if one.is_there(data_dir):
            delay = one.delay if arguments.delay is None else arguments.delay
            yield name, one.make(data_dir or Path(), arguments.seed), delay
        elif arguments.sets:
            raise ConfigError(f"{name}: needs {', '.join(one.files)} below --data-dir")


def _score(
    arguments: argparse.Namespace, responses: Sequence[Response], mode: str, delay: int
) -> Score:
    """Of all streams together."""
    judged: list[list[Judged]] = []
    limit = max(max(response.num_output_tokens for response in responses), 1)
    for name, of_stream in iter_streams(responses):
        if len(of_stream) <= arguments.warm_up:
            raise ConfigError(
                f"{len(of_stream)} requests {f'of {name!r} ' if name else ''}are too few: all are "
                "warm-up (--warm-up)"
            )
        if mode == TREES:
            of_trees = held_out_medians(
                [(response.prompt, response.num_prompt_tokens) for response in of_stream],
                [response.num_output_tokens for response in of_stream],
                coverage=arguments.coverage,
                seed=arguments.seed,
            )
            judged.append(of_trees[arguments.warm_up :])
            continue
        config = LengthConfig(mode=mode, coverage=arguments.coverage, hints=False)
        model = LengthModel(config)
        requests = (
            (_facts(i, response, limit), response.num_output_tokens)
            for i, response in enumerate(of_stream)
        )
        judged.append(stream(model, requests, delay=delay)[arguments.warm_up :])
    return score(judged, coverage=arguments.coverage, seed=arguments.seed)


def _facts(i: int, response: Response, limit: int) -> Facts:
    """The hint is the truth, which only the oracles look at."""
    return Facts(
        rid=f"{response.stream}-{i}",
        kind="",
        prompt=response.prompt,
        limit=limit,
        hint=response.num_output_tokens,
        num_prompt_tokens=response.num_prompt_tokens,
    )


def _row(found: Score) -> str:
    return (
        f"{found.constant:>9.1f}{found.error:>9.1f}{found.tau:>7.2f}{found.pinball:>9.1f}"
        f"{100 * found.coverage:>8.1f}%{found.allocated:>11.2f}"
        f"{found.later:>10.1f}{found.unasked:>9.1f}"
    )


_COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
"""Okabe and Ito's, as in the other pictures."""


def _plot(path: Path, scores: Mapping[str, Mapping[str, Score]]) -> None:
    """Error of the median as a share of the mean length, what is allocated, and coverage."""
    panels: tuple[tuple[str, Callable[[Score], float]], ...] = (
        ("error of the median / mean length", lambda one: one.error / one.mean),
        ("allocated / used", lambda one: one.allocated),
        ("covered [%]", lambda one: 100 * one.coverage),
    )
    figure = new_figure(width=11.0, height=0.42 * len(scores) + 1.6)
    modes = list(next(iter(scores.values())))
    places = np.arange(len(scores))[::-1]
    height = 0.8 / len(modes)
    axes_of = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, value_of) in zip(axes_of, panels, strict=True):
        tidy(axes, title=title)
        for i, mode in enumerate(modes):
            values = [value_of(by_mode[mode]) for by_mode in scores.values()]
            offset = (len(modes) / 2 - i - 0.5) * height
            axes.barh(places + offset, values, height, color=_COLOURS[i % 6], label=mode)
        axes.set_yticks(places, list(scores), fontsize=9)
    first = [by_mode[modes[0]] for by_mode in scores.values()]
    constants = [one.constant / one.mean for one in first]
    axes_of[0].scatter(constants, places, marker="|", s=220, color="black", label="best constant")
    axes_of[0].set_xlim(0, 1)
    axes_of[1].set_xlim(0, 5)
    axes_of[2].set_xlim(80, 100)
    handles, labels = axes_of[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, fontsize=8, ncols=len(labels), loc="outside lower center"
    )
    save(figure, path)


def _time(arguments: argparse.Namespace) -> dict[str, Any]:
    """CPU time of one estimate after a request's arrival, of one when its output has grown, and of
    one lesson: best, median, 99th percentile and longest. Each request is new, so nothing of it is
    in the processor's caches. Without Python's garbage collector: what it walks is the process."""
    gc.disable()
    rng = np.random.default_rng(arguments.seed)
    results: dict[str, dict[str, dict[str, float]]] = {}
    columns = "".join(
        f"{name:>10}{'median':>8}{'p99':>8}{'max':>8}" for name in ("estimate", "later", "lesson")
    )
    print(f"{'CPU time [us]':<14}{columns}")
    for mode in ("histogram", "learned"):
        model = LengthModel(LengthConfig(mode=mode))
        times: dict[str, list[float]] = {"estimate": [], "later": [], "lesson": []}
        for i in range(arguments.requests):
            ids = rng.zipf(1.3, size=int(rng.integers(20, 2000))) % 30_000
            facts = Facts(str(i), "", array("q", ids.tolist()), 4096)
            length = int(np.clip(rng.lognormal(5, 1), 1, 4000))
            started_s = time.thread_time()
            belief = model.belief(facts)
            belief.remaining(0)
            asked_s = time.thread_time()
            belief.remaining(LATER)
            later_s = time.thread_time()
            model.learn(belief, length)
            times["estimate"].append(asked_s - started_s)
            times["later"].append(later_s - asked_s)
            times["lesson"].append(time.thread_time() - later_s)
        results[mode] = {
            name: {
                "best_us": min(of) * 1e6,
                "median_us": float(np.median(of)) * 1e6,
                "p99_us": float(np.quantile(of, 0.99)) * 1e6,
                "max_us": max(of) * 1e6,
            }
            for name, of in times.items()
        }
        row = "".join(
            f"{one['best_us']:>10.1f}{one['median_us']:>8.1f}{one['p99_us']:>8.1f}"
            f"{one['max_us']:>8.1f}"
            for one in results[mode].values()
        )
        print(f"{mode:<14}{row}")
    gc.enable()
    return {"times": results}


if __name__ == "__main__":
    main()
