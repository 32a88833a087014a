"""When would a file of requests be finished, beside a day of chat? Answered by simulation.

    python -m cosched.lab.estimate jobs.jsonl --trace day.csv --window 6h --gpu A100-80

The file is one for run_batch or POST /v1/batches. It is sent as the server's own feeder sends it
(in prefix order, --concurrency lines at a time) to the simulated scheduler, while the chats of the
trace arrive. With --starts N it is submitted at N moments of the trace, evenly over its length: the
chance to miss is the share of those in which the window ends first. The last line of the output is
one JSON object. docs/api.md says what is assumed, docs/simulation.md what is simulated.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.console import Console
from rich.table import Table

from cosched.batch.api import window_seconds
from cosched.batch.config import BatchesConfig
from cosched.command_line import (
    Count,
    JsonOption,
    Kind,
    Parser,
    Seconds,
    add_field_option,
    add_options,
    checked,
    existing_file,
    run_command,
    virtual_time_bar,
)
from cosched.config import Config
from cosched.core.request import RequestClass, Slo
from cosched.errors import ConfigError
from cosched.lab.simulation.arrivals import VOCAB_SIZE
from cosched.lab.simulation.options import (
    SEED,
    add_config_options,
    add_machine_options,
    config_pairs,
    cost_of,
    data_dir_of,
    machine_of,
)
from cosched.lab.simulation.run import DEFAULT_SLO, RunResult, RunSpec, execute_requests
from cosched.lab.simulation.setting import OfflineClient, Setting
from cosched.policies import known_policy, policy_names
from cosched_traces.catalogue import load_workload
from cosched_traces.mmlu import BYTES_PER_TOKEN
from cosched_traces.openai_batch import read_openai_batch
from cosched_traces.transform import slice_time
from cosched_traces.workload import TraceRequest

_POLICIES = f"who schedules: {', '.join(policy_names())}, or one of yours (default: %(default)s)"

_FIRST_ID = 10
"""Below it are the special tokens of a vocabulary."""


class Submission(msgspec.Struct):
    """
    trace         the chats beside it: a trace or a workload (docs/workloads.md)
    rate          mean rate of the chats, of a trace at most its own (default: the trace's)
    window        completion window
    starts        moments of the trace at which it is submitted, the first at its beginning
    reply_tokens  length of a reply, within its limit (default: its limit, or 256 without one)
    concurrency   lines at the scheduler at a time
    slo_ttft      TTFT target of the chats
    slo_tpot      TPOT target of the chats
    """

    trace: Annotated[str, Kind(None, "NAME|FILE")]
    rate: Annotated[float, Kind(None, "REQ/S")] | None = None
    window: Annotated[str, Kind(None, "W")] = "24h"
    starts: Count = 1
    reply_tokens: Count | None = None
    concurrency: Count = BatchesConfig().high_watermark
    policy: Annotated[
        str, Kind(checked(known_policy), "NAME", "--policy", "--cosched-policy", help=_POLICIES)
    ] = Config().policy
    slo_ttft: Seconds | None = DEFAULT_SLO.ttft_s
    slo_tpot: Seconds | None = DEFAULT_SLO.tpot_s


class Output(JsonOption):
    """
    quiet  no progress bar
    """

    quiet: bool = False


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m cosched.lab.estimate", description=__doc__)
    parser.add_argument("file", type=existing_file, metavar="FILE", help="requests (JSONL)")
    add_options(parser, Submission)
    add_field_option(parser, RunSpec, "seed", type=SEED)
    add_field_option(parser, RunSpec, "data_dir", type=Path, metavar="DIR")
    add_machine_options(parser)
    add_config_options(parser)
    add_options(parser, Output)
    parser.set_defaults(execute=_execute)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments are wrong."""
    run_command(build_parser().parse_args(argv))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One submission. Times in seconds.

    start_s   of the trace, when it is submitted
    finish_s  after that until its last line is finished; None: not within the window
    """

    start_s: float
    num_finished: int
    finish_s: float | None
    chat_attainment: float | None


def _execute(arguments: argparse.Namespace) -> dict[str, Any]:
    window_s = float(window_seconds(arguments.window))
    offline = read_lines(arguments.file, reply_tokens=arguments.reply_tokens)
    data_dir = data_dir_of(arguments)
    spec = RunSpec(
        setting=Setting(
            name=arguments.policy, summary="", policy=arguments.policy, client=OfflineClient.CAP
        ),
        machine=machine_of(arguments),
        cost=cost_of(arguments),
        slo=Slo(ttft_s=arguments.slo_ttft, tpot_s=arguments.slo_tpot),
        duration_s=window_s,
        seed=arguments.seed,
        data_dir=str(data_dir) if data_dir else None,
        cap=arguments.concurrency,
        config=config_pairs(arguments),
    )
    trace_s = _chats(arguments, spec, None).requests[-1].arrival_s
    runs = []
    for index in range(arguments.starts):
        start_s = index * trace_s / arguments.starts
        chats = _chats(arguments, spec, start_s + window_s)
        chats = slice_time(chats, start_s, start_s + window_s)
        runs.append(_submit(arguments, spec, chats.requests, offline, start_s=start_s))
    num_missed = sum(run.finish_s is None for run in runs)
    finished = sorted(run.finish_s for run in runs if run.finish_s is not None)
    _print_table(runs, num_lines=len(offline))
    return {
        "program": "estimate",
        "lines": len(offline),
        "prompt_tokens": sum(request.num_prompt_tokens for request in offline),
        "output_tokens": sum(request.num_output_tokens for request in offline),
        "window_s": window_s,
        "miss_chance": num_missed / len(runs),
        "earliest_finish_s": finished[0] if finished else None,
        "latest_finish_s": finished[-1] if finished and not num_missed else None,
        "spec": spec.describe(),
        "starts": [
            {
                "start_s": run.start_s,
                "finished": run.num_finished,
                "finish_s": run.finish_s,
                "chat_attainment": run.chat_attainment,
            }
            for run in runs
        ],
    }


def read_lines(path: Path, *, reply_tokens: int | None = None) -> list[TraceRequest]:
    """The lines of a file in prefix order, as requests. ConfigError names the line that is wrong.

    reply_tokens  length of each reply, if its limit allows it [tokens]
    """
    workload = read_openai_batch(path, _tokens, default_max_tokens=reply_tokens or 256)
    requests = sorted(workload.requests, key=lambda request: tuple(request.token_ids))
    if not requests:
        raise ConfigError(f"{path}: the file has no lines")
    if reply_tokens is None:
        return requests
    return [
        replace(request, num_output_tokens=min(reply_tokens, request.num_output_tokens))
        for request in requests
    ]


def _tokens(text: str) -> list[int]:
    """A token for each `BYTES_PER_TOKEN` bytes; equal texts begin with equal tokens."""
    data = text.encode()
    return [
        _FIRST_ID + zlib.crc32(data[at : at + BYTES_PER_TOKEN]) % (VOCAB_SIZE - _FIRST_ID)
        for at in range(0, len(data), BYTES_PER_TOKEN)
    ]


def _chats(arguments: argparse.Namespace, spec: RunSpec, duration_s: float | None) -> Any:
    return load_workload(
        arguments.trace,
        seed=spec.seed,
        request_class=RequestClass.ONLINE,
        data_dir=Path(spec.data_dir) if spec.data_dir else None,
        rate=arguments.rate,
        duration_s=duration_s,
    )


def _submit(
    arguments: argparse.Namespace,
    spec: RunSpec,
    chats: Sequence[TraceRequest],
    offline: Sequence[TraceRequest],
    *,
    start_s: float,
) -> _Run:
    with virtual_time_bar(is_quiet=arguments.quiet) as bar:
        task = bar.add_task(f"submitted at {start_s:.0f} s", total=spec.duration_s)
        result: RunResult = execute_requests(
            spec, chats, offline, on_progress=lambda now_s: bar.update(task, completed=now_s)
        )
    ends = [
        record.finish_s
        for record in result.records
        if record.request_class is RequestClass.OFFLINE and record.finish_s is not None
    ]
    summary = result.summary.to_dict()
    return _Run(
        start_s=start_s,
        num_finished=len(ends),
        finish_s=max(ends) if len(ends) == len(offline) else None,
        chat_attainment=summary["online"]["attainment"]["joint"]["ratio"],
    )


def _print_table(runs: Sequence[_Run], *, num_lines: int) -> None:
    table = Table("submitted at", "finished lines", "finished after", "chats within their targets")
    for run in runs:
        table.add_row(
            f"{run.start_s:,.0f} s",
            f"{run.num_finished:,} of {num_lines:,}",
            "not within the window" if run.finish_s is None else f"{run.finish_s:,.0f} s",
            "none" if run.chat_attainment is None else f"{run.chat_attainment:.1%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
