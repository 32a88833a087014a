"""Measure what an offline job costs the online requests beside it, on a small model, by policy.

Each scenario gets a server of its own, freshly started: 'online-only' (policy sarathi, no offline
job), and policies, under which the offline job runs beside the online requests. Targets that are
not given follow from 'online-only', which is measured first. The output is a table, a picture, and
as the last line one JSON object with all numbers (docs/operate.md). Ctrl-C stops the servers too.

    cosched demo
    cosched demo --scenarios online-only sarathi cosched
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from cosched.cli import (
    Count,
    JsonOption,
    Port,
    Positive,
    Seed,
    each,
    new_app,
    output_folder,
    reader,
    run,
    run_async,
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
from cosched.lab.simulation.run import summarize_run
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec
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
    output_folder(str(Path(text).absolute().parent))
    if Path(text).is_dir() or Path(text).suffix != ".png":
        raise ValueError(f"{text!r} is no file that ends in .png")
    return Path(text)


def _expected_min(num_scenarios: int, seconds: float) -> float:
    return max(1.0, num_scenarios * (_START_S + seconds) / 60)


app = new_app(
    "demo",
    f"{__doc__}\nOn two CPU cores this takes about {_expected_min(len(_SCENARIOS), _SECONDS):.0f} "
    "minutes, and needs the machine for itself.",
)
main = partial(run, "demo")


@app.default
@dataclass(kw_only=True)
class Demo(JsonOption):
    scenarios: Annotated[
        tuple[str, ...],
        Parameter(
            converter=each(_scenario_name),
            consume_multiple=True,
            metavar="NAME",
            show_default=" ".join,
            help=f"{ONLINE_ONLY}, {', '.join(policy_names())}, or your own as module:Class",
        ),
    ] = _SCENARIOS
    seconds: Positive = _SECONDS
    """how long online requests arrive, per scenario"""
    rate: Positive = _RATE
    """mean online requests per second outside the two bursts, which have 3 times as many"""
    offline_prompts: Count = _JOB_REQUESTS
    """few-shot prompts of the offline job"""
    seed: Seed = 0
    """seed of arrivals and prompts"""
    size: Annotated[str, Parameter(choices=sorted(SIZES))] = "demo"
    """size of the model"""
    port: Port | None = None
    """port of the servers; default: a free one"""
    slo_ttft: Positive | None = None
    """TTFT target of the online requests [s]; default: from online-only; without it 0.3"""
    slo_tpot: Positive | None = None
    """TPOT target of the online requests [s]; default: from online-only; without it 0.02"""
    out: Annotated[Path, Parameter(converter=reader(_picture), metavar="PNG")] = Path(
        "out/demo.png"
    )
    """the picture; the servers' logs are written beside it"""

    def __call__(self) -> int:
        check_can_draw()
        names = self.scenarios
        if len(set(names)) != len(names):
            raise ConfigError(f"--scenarios names one twice: {' '.join(names)}")
        leave_a_core_free()
        self.out.parent.mkdir(parents=True, exist_ok=True)
        print(
            f"demo: {len(names)} scenarios of {self.seconds:g} s, each on a server of its own: "
            f"about {_expected_min(len(names), self.seconds):.0f} minutes",
            file=sys.stderr,
            flush=True,
        )
        # A stable sort: online-only first.
        specs = [self.spec(name) for name in sorted(names, key=lambda name: name != ONLINE_ONLY)]
        measured = run_async(self._measure_all(specs))
        base = next((m.result for m in measured if m.name == ONLINE_ONLY), None)
        print_live([m.result for m in measured], baseline=None if base is None else ONLINE_ONLY)
        slo = measured[0].result.spec.slo
        assert slo.ttft_s is not None and slo.tpot_s is not None
        print(f"targets: TTFT {1e3 * slo.ttft_s:.0f} ms, TPOT {1e3 * slo.tpot_s:.0f} ms")
        for line in (note for m in measured for note in m.notes()):
            print(line)
        self.save(self.out, lambda path: draw(measured, path))
        print(f"picture: {self.out}")
        return self.finish(
            {
                "program": "demo",
                "seed": self.seed,
                "spec": measured[0].result.spec.describe(),
                "size": self.size,
                "server_flags": _SERVER_FLAGS,
                "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
                "scenarios": {m.name: m.to_row(base) for m in measured},
            }
        )

    def spec(self, name: str) -> RunSpec:
        """The run of one scenario."""
        return RunSpec(
            setting=Setting(
                name=name,
                summary="",
                policy="sarathi" if name == ONLINE_ONLY else name,
                has_offline=name != ONLINE_ONLY,
                client=OfflineClient.CAP,
            ),
            online=WorkloadSpec(name="demo-chat", rate=DEMO_MEAN_RATE * self.rate),
            offline=WorkloadSpec(name="demo-job", num_requests=self.offline_prompts),
            slo=Slo(ttft_s=self.slo_ttft or _SLO.ttft_s, tpot_s=self.slo_tpot or _SLO.tpot_s),
            duration_s=self.seconds,
            seed=self.seed,
            cap=_CONCURRENCY,
            clairvoyant=True,
        )

    async def _measure_all(self, specs: Sequence[RunSpec]) -> Sequence[Measured]:
        servers = OwnServers(
            model_path=str(ensure_demo_model(size=self.size, dtype=_DTYPE)),
            flags=_SERVER_FLAGS,
            port=self.port,
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
        given = Slo(ttft_s=self.slo_ttft, tpot_s=self.slo_tpot)
        with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
            for spec in specs:
                name = spec.setting.name
                if measured and measured[0].name == ONLINE_ONLY:
                    spec = replace(spec, slo=measured[0].result.spec.slo)
                log_path = self.out.with_name(f"{self.out.stem}-{name}.server.log")
                show = progress_of(bars, name, total_s=spec.duration_s)
                run = Measured(run=await servers.run(spec, log_path=log_path, show=show))
                if name == ONLINE_ONLY:
                    run = _with_slo(run, targets_from(run.result, given))
                measured.append(run)
        return measured


def targets_from(alone: LiveResult, given: Slo) -> Slo:
    """The targets that follow from chat alone; those of `given` that are set hold. A machine that
    misses fixed targets even without offline work would say nothing of policies."""
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
    """`times` as long, in whole steps; None: no request was measured."""
    if seconds is None:
        return None
    return round(math.ceil(round(times * seconds / step_s, 6)) * step_s, 3)


def _with_slo(measured: Measured, slo: Slo) -> Measured:
    result = measured.result
    spec = replace(result.spec, slo=slo)
    summary = summarize_run(spec, result.records, None, end_s=spec.end_s)
    return Measured(run=replace(measured.run, result=replace(result, spec=spec, summary=summary)))


def progress_of(bars: Bars, name: str, *, total_s: float) -> Callable[[str, float], None]:
    """Shows the phase of a scenario and its elapsed time [s]: a bar on a terminal; in a log a line
    for each new phase, and one every 10 s."""
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
    sys.exit(main())
