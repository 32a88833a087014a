"""Estimate by simulation when a file of requests would finish beside a day of chat.

The file is one for `cosched batch` or POST /v1/batches. Its lines are sent to the simulated
scheduler as the server's own feeder sends them (in prefix order, --concurrency lines at a time),
while the chats of the trace arrive. With --starts N the file is submitted at N times, spread
evenly over the trace; the chance to miss is the share of those in which the window ends first. With
--replicas N it is one of N servers that share chats and file: the one with the most tokens. The
last line of the output is one JSON object. docs/api.md lists the assumptions, docs/simulation.md
what is simulated.

    cosched estimate jobs.jsonl --trace day.csv --window 6h --gpu A100-80
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from cosched.batch.api import window_seconds
from cosched.batch.config import BatchesConfig
from cosched.cli import Count, JsonOption, OldFile, Positive, Seed, new_app, run
from cosched.config import Config
from cosched.core.request import RequestClass, Slo
from cosched.errors import ConfigError
from cosched.lab.benchmark.progress import virtual_time_bar
from cosched.lab.simulation.options import (
    DataDir,
    MachineAndPolicy,
    PolicyName,
    config_pairs,
    cost_of,
    data_dir_of,
    machine_of,
)
from cosched.lab.simulation.run import RunResult, execute_requests
from cosched.lab.simulation.run_spec import DEFAULT_SLO, RunSpec
from cosched.lab.simulation.setting import OfflineClient, Setting
from cosched_traces.catalogue import load_workload
from cosched_traces.openai_batch import estimated_tokens, read_openai_batch
from cosched_traces.transform import slice_time
from cosched_traces.workload import TraceRequest, Workload

app = new_app("estimate", __doc__)
main = partial(run, "estimate")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submission:
    """
    saturation  what the chats need of a replica, in the mean (`cosched:saturation`)
    start_s   time of the trace at which the file is submitted [s]
    finished  lines finished within the window
    finish_s  from then until the last line is finished [s]; None: not within the window
    """

    start_s: float
    finished: int
    finish_s: float | None
    chat_attainment: float | None
    saturation: float | None


@app.default
@dataclass(kw_only=True)
class Estimate(JsonOption):
    file: Annotated[OldFile, Parameter(metavar="FILE")] = field(kw_only=False)
    """requests (JSONL)"""
    trace: Annotated[str, Parameter(metavar="NAME|FILE")]
    """the chats beside it: a trace or a workload (docs/simulation.md)"""
    rate: Positive | None = None
    """mean rate of the chats [requests/s], for a trace at most its own; default: the trace's"""
    window: str = "24h"
    """completion window"""
    starts: Count = 1
    """number of times at which the file is submitted, the first at the beginning of the trace"""
    replicas: Count = 1
    """servers that share the chats, by conversation, and the file"""
    reply_tokens: Count | None = None
    """length of a reply, within its limit; default: its limit, or 256 without one"""
    concurrency: Count = BatchesConfig().high_watermark
    """lines at the scheduler at a time"""
    policy: PolicyName = Config().policy
    slo_ttft: Positive | None = DEFAULT_SLO.ttft_s
    """TTFT target of the chats [s]"""
    slo_tpot: Positive | None = DEFAULT_SLO.tpot_s
    """TPOT target of the chats [s]"""
    seed: Seed = 0
    """seed of everything that is random"""
    data_dir: DataDir = None
    """folder with traces and kernel tables; default: $COSCHED_DATA"""
    quiet: bool = False
    """no progress bar"""
    options: Annotated[MachineAndPolicy, Parameter(name="*")] = field(
        default_factory=MachineAndPolicy
    )

    def __call__(self) -> int:
        window_s = float(window_seconds(self.window))
        lines = read_lines(self.file, reply_tokens=self.reply_tokens)
        offline = part_of_lines(lines, self.replicas)
        data_dir = data_dir_of(self.data_dir)
        spec = RunSpec(
            setting=Setting(
                name=self.policy, summary="", policy=self.policy, client=OfflineClient.CAP
            ),
            machine=machine_of(self.options.machine),
            cost=cost_of(self.options.cost, data_dir),
            slo=Slo(ttft_s=self.slo_ttft, tpot_s=self.slo_tpot),
            duration_s=window_s,
            seed=self.seed,
            data_dir=str(data_dir) if data_dir else None,
            cap=self.concurrency,
            config=config_pairs(self.options.policy),
        )
        trace_s = self._chats(spec, None).requests[-1].arrival_s
        runs = []
        for index in range(self.starts):
            start_s = index * trace_s / self.starts
            chats = self._chats(spec, start_s + window_s)
            chats = slice_time(chats, start_s, start_s + window_s)
            mine = part_of_chats(chats.requests, self.replicas)
            runs.append(self._submit(spec, mine, offline, start_s=start_s))
        num_missed = sum(run.finish_s is None for run in runs)
        finished = sorted(run.finish_s for run in runs if run.finish_s is not None)
        _print_table(runs, num_lines=len(offline))
        return self.finish(
            {
                "program": "estimate",
                "lines": len(lines),
                "replicas": self.replicas,
                "prompt_tokens": sum(request.num_prompt_tokens for request in lines),
                "output_tokens": sum(request.num_output_tokens for request in lines),
                "window_s": window_s,
                "miss_chance": num_missed / len(runs),
                "earliest_finish_s": finished[0] if finished else None,
                "latest_finish_s": finished[-1] if finished and not num_missed else None,
                "spec": spec.describe(),
                "starts": [asdict(run) for run in runs],
            }
        )

    def _chats(self, spec: RunSpec, duration_s: float | None) -> Workload:
        return load_workload(
            self.trace,
            seed=spec.seed,
            request_class=RequestClass.ONLINE,
            data_dir=Path(spec.data_dir) if spec.data_dir else None,
            rate=self.rate,
            duration_s=duration_s,
        )

    def _submit(
        self,
        spec: RunSpec,
        chats: Sequence[TraceRequest],
        offline: Sequence[TraceRequest],
        *,
        start_s: float,
    ) -> _Submission:
        with virtual_time_bar(quiet=self.quiet) as bar:
            task = bar.add_task(f"submitted at {start_s:.0f} s", total=spec.duration_s)
            result: RunResult = execute_requests(
                spec, chats, offline, on_progress=lambda now_s: bar.update(task, completed=now_s)
            )
        ends = [
            record.finish_s
            for record in result.records
            if record.request_class is RequestClass.OFFLINE and record.finish_s is not None
        ]
        return _Submission(
            start_s=start_s,
            finished=len(ends),
            finish_s=max(ends) if len(ends) == len(offline) else None,
            chat_attainment=result.summary.online.attainment.joint.ratio,
            saturation=result.saturation,
        )


def part_of_chats(chats: Sequence[TraceRequest], replicas: int) -> list[TraceRequest]:
    """The requests of one replica: the turns of a conversation go to the same one."""
    return [
        chat for chat in chats if zlib.crc32((chat.session or chat.rid).encode()) % replicas == 0
    ]


def part_of_lines(lines: Sequence[TraceRequest], replicas: int) -> Sequence[TraceRequest]:
    """The lines of the replica with the most tokens, where servers divide a batch between documents
    into consecutive parts."""
    size = math.ceil(len(lines) / replicas)
    parts = [lines[start : start + size] for start in range(0, len(lines), size)]
    return max(
        parts, key=lambda part: sum(one.num_prompt_tokens + one.num_output_tokens for one in part)
    )


def read_lines(path: Path, *, reply_tokens: int | None = None) -> list[TraceRequest]:
    """The lines of a file in prefix order, as requests. ConfigError names the line that is wrong.

    reply_tokens  length of each reply, if its limit allows it [tokens]
    """
    workload = read_openai_batch(path, estimated_tokens, default_max_tokens=reply_tokens or 256)
    requests = sorted(workload.requests, key=lambda request: tuple(request.token_ids))
    if not requests:
        raise ConfigError(f"{path}: the file has no lines")
    if reply_tokens is None:
        return requests
    return [
        replace(request, num_output_tokens=min(reply_tokens, request.num_output_tokens))
        for request in requests
    ]


def _print_table(runs: Sequence[_Submission], *, num_lines: int) -> None:
    table = Table(
        "submitted at", "finished lines", "finished after", "chats within targets", "saturation"
    )
    for one in runs:
        table.add_row(
            f"{one.start_s:,.0f} s",
            f"{one.finished:,} of {num_lines:,}",
            "not within the window" if one.finish_s is None else f"{one.finish_s:,.0f} s",
            "none" if one.chat_attainment is None else f"{one.chat_attainment:.1%}",
            "not known" if one.saturation is None else f"{one.saturation:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
