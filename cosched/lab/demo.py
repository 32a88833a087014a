"""What an offline job costs the online requests beside it, on a small model, policy by policy.

    python -m cosched.lab.demo
    python -m cosched.lab.demo --scenarios online-only sarathi cosched

Each scenario gets a server of its own, freshly started: 'online-only' (policy sarathi, no offline
job), and policies, under which the offline job runs beside the online requests. Targets that are
not given follow from 'online-only', which comes first for that. A table, a picture, and as the last
line one JSON object with all numbers (docs/operate.md). Ctrl-C stops the servers too.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from cosched.command_line import (
    PORT,
    Count,
    JsonOption,
    Kind,
    Parser,
    Seconds,
    add_options,
    checked,
    output_folder,
    run_async,
    run_command,
    save_output,
)
from cosched.core.request import RequestClass, Slo
from cosched.errors import ConfigError
from cosched.lab.benchmark.live import LiveResult, print_live
from cosched.lab.benchmark.own_server import OwnRun, OwnServers, leave_a_core_free
from cosched.lab.demo_model import SIZES, ensure_demo_model
from cosched.lab.metrics.figure import check_can_draw
from cosched.lab.metrics.plots import Run, plot_overview
from cosched.lab.metrics.stats import Window, to_dict
from cosched.lab.metrics.summary import compare
from cosched.lab.simulation.options import SEED
from cosched.lab.simulation.run import RunSpec, WorkloadSpec, summarize_run
from cosched.lab.simulation.setting import OfflineClient, Setting
from cosched.policies import known_policy, policy_names
from cosched_traces.builders import DEMO_BURSTS, DEMO_MEAN_RATE

ONLINE_ONLY = "online-only"

_SCENARIOS = (ONLINE_ONLY, "sglang", "priority", "sarathi", "hygen", "cosched")
_SLO = Slo(ttft_s=0.3, tpot_s=0.02)  # about twice what chat alone takes on two fast CPU cores
_TTFT_OVER_ALONE, _TPOT_OVER_ALONE = 2.5, 1.25  # targets, by the 95th percentiles of chat alone
_TTFT_STEP_S, _TPOT_STEP_S = 0.05, 0.005  # to which they are rounded up
_DTYPE = "bfloat16"
_SERVER_FLAGS = (
    *("--dtype", _DTYPE),
    *("--chunked-prefill-size", "256"),
    *("--max-running-requests", "16"),
    *("--max-total-tokens", "32768"),
    *("--mem-fraction-static", "0.2"),  # a model this small needs no more where there is a GPU
)
_SECONDS, _RATE, _JOB_REQUESTS, _CONCURRENCY = 40.0, 2.0, 800, 64
_PATIENCE_S = 60.0  # for online requests that are unanswered when the window closes
_START_S = 45.0  # to start a server, to warm it up and to stop it, on two cores
_LOG_EVERY_S = 10.0
_BUSY_LOAD = 1.5  # load average per core; the server that was just started makes some of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One scenario."""

    run: OwnRun

    @property
    def result(self) -> LiveResult:
        return self.run.result

    @property
    def name(self) -> str:
        return self.result.spec.setting.name

    def job(self) -> dict[str, Any] | None:
        """How far the offline job came within the window; None where there was none.

        ended_s  when all of it was done: from then on the online requests were alone
        """
        spec = self.result.spec
        if not spec.setting.has_offline or spec.offline is None:
            return None
        ended = [
            r
            for r in self.result.records
            if r.request_class is RequestClass.OFFLINE
            and r.finish_s is not None
            and r.finish_s < spec.end_s
        ]
        num = spec.offline.num_requests
        return {
            "num_requests": num,
            "num_done": sum(r.ok for r in ended),
            "ended_s": max(r.finish_s or 0.0 for r in ended) if len(ended) == num else None,
        }

    def notes(self) -> list[str]:
        lines, job = [], self.job()
        load, num_cores = self.run.load_average, os.cpu_count() or 1
        if load > _BUSY_LOAD * num_cores:
            lines.append(
                f"{self.name}: others used the machine too (load average {load:.1f} on "
                f"{num_cores} cores before the window)"
            )
        if job is not None:
            lines.append(f"{self.name}: {job['num_done']} of {job['num_requests']} of the job done")
        if job is not None and job["ended_s"] is not None:
            lines.append(
                f"{self.name}: the job was done {job['ended_s']:.0f} s into the window, so the "
                "rate is less than could be; give more --offline-prompts"
            )
        return lines

    def to_row(self, base: LiveResult | None) -> dict[str, Any]:
        """Its part of the last line. base: of online-only, where that was measured."""
        summary = self.result.summary
        return {
            **self.result.to_row(),
            "policy": self.result.spec.setting.policy,
            "job": self.job(),
            "server_start_s": round(self.run.server_start_s, 1),
            "load_average": round(self.run.load_average, 2),
            "comparison": None if base is None else to_dict(compare(summary, base.summary)),
        }


def _scenario_name(name: str) -> str:
    return name if name == ONLINE_ONLY else known_policy(name)


def _picture(text: str) -> Path:
    path = output_folder(str(Path(text).absolute().parent)) / Path(text).name
    if path.is_dir() or path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} is no file that ends in .png")
    return Path(text)


_NAMES = (
    f"of {ONLINE_ONLY}, {', '.join(policy_names())}, or yours as module:Class "
    f"(default: {' '.join(_SCENARIOS)})"
)


class Options(JsonOption):
    """
    seconds          how long online requests arrive, per scenario
    rate             mean online requests per second outside the two bursts, which have 3 times as
                     many
    offline_prompts  few-shot prompts of the offline job
    seed             of arrivals and prompts
    size             of the model
    port             of the servers (default: one that is free)
    slo_ttft         TTFT target of the online requests (default: by online-only; without it 0.3)
    slo_tpot         TPOT target of the online requests (default: by online-only; without it 0.02)
    out              the picture; servers' logs go beside it
    """

    scenarios: Annotated[
        Sequence[str], Kind(checked(_scenario_name), "NAME", nargs="+", help=_NAMES)
    ] = _SCENARIOS
    seconds: Seconds = _SECONDS
    rate: Annotated[float, Kind(None, "R")] = _RATE
    offline_prompts: Count = _JOB_REQUESTS
    seed: Annotated[int, Kind(SEED)] = 0
    size: Annotated[str, Kind(choices=sorted(SIZES))] = "demo"
    port: Annotated[int, Kind(PORT, "N")] | None = None
    slo_ttft: Seconds | None = None
    slo_tpot: Seconds | None = None
    out: Annotated[Path, Kind(_picture, "PNG")] = Path("out/demo.png")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cosched.lab.demo",
        description=f"{__doc__}\nOn two CPU cores it takes about "
        f"{_expected_min(len(_SCENARIOS), _SECONDS):.0f} minutes, and wants the machine for "
        "itself.",
    )
    add_options(parser, Options)
    parser.set_defaults(execute=_run)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 1 when a server failed, 2 when the arguments are wrong, 130 when interrupted."""
    run_command(build_parser().parse_args(argv))


def _expected_min(num_scenarios: int, seconds: float) -> float:
    return max(1.0, num_scenarios * (_START_S + seconds) / 60)


def _spec(name: str, arguments: argparse.Namespace) -> RunSpec:
    return RunSpec(
        setting=Setting(
            name=name,
            summary="",
            policy="sarathi" if name == ONLINE_ONLY else name,
            has_offline=name != ONLINE_ONLY,
            client=OfflineClient.CAP,
        ),
        online=WorkloadSpec(name="demo-chat", rate=DEMO_MEAN_RATE * arguments.rate),
        offline=WorkloadSpec(name="demo-job", num_requests=arguments.offline_prompts),
        slo=Slo(ttft_s=arguments.slo_ttft or _SLO.ttft_s, tpot_s=arguments.slo_tpot or _SLO.tpot_s),
        duration_s=arguments.seconds,
        seed=arguments.seed,
        cap=_CONCURRENCY,
        clairvoyant=True,
    )


def targets_from(alone: LiveResult, given: Slo) -> Slo:
    """The targets for a machine on which chat alone is as here; those of `given` that are set
    hold. So slow a machine as to miss fixed ones without offline work says nothing of policies."""
    online = alone.summary.online
    return Slo(
        ttft_s=given.ttft_s
        or _rounded_up(online.ttft_s.p95, _TTFT_OVER_ALONE, _TTFT_STEP_S)
        or _SLO.ttft_s,
        tpot_s=given.tpot_s
        or _rounded_up(online.tpot_s.p95, _TPOT_OVER_ALONE, _TPOT_STEP_S)
        or _SLO.tpot_s,
    )


def _rounded_up(seconds: float | None, times: float, step_s: float) -> float | None:
    """So many times as long, in whole steps; None: there was nobody to measure."""
    if seconds is None:
        return None
    return round(math.ceil(round(times * seconds / step_s, 6)) * step_s, 3)


def _with_slo(measured: Measured, slo: Slo) -> Measured:
    result = measured.result
    spec = replace(result.spec, slo=slo)
    summary = summarize_run(spec, result.records, None, end_s=spec.end_s)
    return Measured(run=replace(measured.run, result=replace(result, spec=spec, summary=summary)))


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    check_can_draw()
    names = arguments.scenarios
    if len(set(names)) != len(names):
        raise ConfigError(f"--scenarios names one twice: {' '.join(names)}")
    leave_a_core_free()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"demo: {len(names)} scenarios of {arguments.seconds:g} s, each on a server of its own: "
        f"about {_expected_min(len(names), arguments.seconds):.0f} minutes",
        file=sys.stderr,
        flush=True,
    )
    # A stable sort: online-only first.
    specs = [_spec(name, arguments) for name in sorted(names, key=lambda n: n != ONLINE_ONLY)]
    measured = run_async(_measure_all(specs, arguments))
    base = next((m.result for m in measured if m.name == ONLINE_ONLY), None)
    print_live([m.result for m in measured], baseline=None if base is None else ONLINE_ONLY)
    slo = measured[0].result.spec.slo
    assert slo.ttft_s is not None and slo.tpot_s is not None
    print(f"targets: TTFT {1e3 * slo.ttft_s:.0f} ms, TPOT {1e3 * slo.tpot_s:.0f} ms")
    for line in (note for m in measured for note in m.notes()):
        print(line)
    save_output(arguments, arguments.out, lambda path: draw(measured, path))
    print(f"picture: {arguments.out}")
    return {
        "program": "demo",
        "seed": arguments.seed,
        "spec": measured[0].result.spec.describe(),
        "size": arguments.size,
        "server_flags": _SERVER_FLAGS,
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "scenarios": {m.name: m.to_row(base) for m in measured},
    }


async def _measure_all(
    specs: Sequence[RunSpec], arguments: argparse.Namespace
) -> Sequence[Measured]:
    servers = OwnServers(
        model_path=str(ensure_demo_model(size=arguments.size, dtype=_DTYPE)),
        flags=_SERVER_FLAGS,
        port=arguments.port,
        grace_s=_PATIENCE_S,
    )
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    console = Console(stderr=True)
    measured: list[Measured] = []
    given = Slo(ttft_s=arguments.slo_ttft, tpot_s=arguments.slo_tpot)
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        for spec in specs:
            name = spec.setting.name
            if measured and measured[0].name == ONLINE_ONLY:
                spec = replace(spec, slo=measured[0].result.spec.slo)
            log_path = arguments.out.with_name(f"{arguments.out.stem}-{name}.server.log")
            show = progress_of(bars, name, total_s=spec.duration_s)
            run = Measured(run=await servers.run(spec, log_path=log_path, show=show))
            if name == ONLINE_ONLY:
                run = _with_slo(run, targets_from(run.result, given))
            measured.append(run)
    return measured


def progress_of(bars: Bars, name: str, *, total_s: float) -> Callable[[str, float], None]:
    """Shows what a scenario is at, and how much of its time is over [s]: a bar on a terminal; in a
    log a line for each new phase, and one now and then."""
    task = bars.add_task(name, text="", total=total_s)
    is_log = not bars.console.is_terminal
    last_phase, next_s = "", 0.0

    def show(text: str, done_s: float) -> None:
        nonlocal last_phase, next_s
        phase, now_s = text.partition(":")[0], time.monotonic()
        done_s = min(max(0.0, done_s), total_s)
        if is_log and (phase != last_phase or now_s >= next_s):
            last_phase, next_s = phase, now_s + _LOG_EVERY_S
            where = f"{text} ({done_s:.0f}/{total_s:.0f} s)"
            print(f"demo: {name}: {where}", file=sys.stderr, flush=True)
        bars.update(task, completed=done_s, text=text)

    return show


def draw(measured: Sequence[Measured], path: Path) -> None:
    """Write the picture."""
    spec = measured[0].result.spec
    window = Window(start_s=0.0, end_s=spec.end_s)
    marked = {m.name for m in measured if m.result.is_client_late}
    runs = {
        m.name: Run(records=m.result.records, window=window, default_slo=spec.slo) for m in measured
    }
    num_online = measured[0].result.summary.online.num_requests
    caption = f"{num_online} online requests in {spec.end_s:g} s, seed {spec.seed}; grey: bursts"
    if marked:
        caption += "\n(!) not to be trusted: the client itself was late, the machine too busy"
    plot_overview(
        runs,
        {m.name: m.result.summary for m in measured},
        path,
        shaded=[(a * spec.end_s, b * spec.end_s) for a, b in DEMO_BURSTS],
        marked=marked,
        caption=caption,
    )


if __name__ == "__main__":
    main()
