"""`python -m cosched.demo`: what offline work costs online requests, under several policies.

docs/demo.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from cosched.command_line import PORT, Parser, add_version_option, checked, output_folder
from cosched.config import SloConfig
from cosched.demo.picture import draw
from cosched.demo.report import Result, json_entry, notes, result_of, results_table
from cosched.demo.scenario import (
    ONLINE_ONLY,
    Load,
    Measured,
    Progress,
    Scenario,
    ServerSpec,
    Show,
    leave_a_core_free,
    run_scenario,
)
from cosched.demo.workload import WorkloadSpec
from cosched.demo_model import SIZES, ensure_demo_model
from cosched.errors import ConfigError, CoschedError
from cosched.metrics.figure import check_can_draw
from cosched.policy.registry import known_policy, policy_names

__all__ = ["main"]

_DTYPE = "bfloat16"
_SERVER_FLAGS = (
    *("--dtype", _DTYPE),
    *("--chunked-prefill-size", "256"),
    *("--max-running-requests", "16"),
    *("--max-total-tokens", "32768"),
    *("--mem-fraction-static", "0.2"),  # a model this small needs no more where there is a GPU
)
_START_S = 45.0  # to start a server, to warm it up and to stop it, on two cores
_LOG_EVERY_S = 10.0
_TABLE_WIDTH = 112  # of a table that goes to a file
_EPILOG = """
Scenarios are 'online-only' (policy sarathi, no offline job) and the names of policies, under which
the offline job runs beside the online requests. Each gets a server of its own, freshly started.
The last line printed is one JSON object with all numbers. Ctrl-C stops the servers too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Everything the demo was told. `port` None: any that is free.

    slo_ttft_ms, slo_tpot_ms  for the policies that know targets: about twice what chat alone takes
                              on two CPU cores
    """

    workload: WorkloadSpec
    scenarios: tuple[str, ...] = (ONLINE_ONLY, "sglang", "priority", "sarathi", "hygen")
    size: str = "demo"
    concurrency: int = 64
    port: int | None = None
    out: Path = Path("out/demo.png")
    server_flags: tuple[str, ...] = _SERVER_FLAGS
    slo_ttft_ms: float = 300.0
    slo_tpot_ms: float = 20.0

    @property
    def slo(self) -> SloConfig:
        return SloConfig(ttft_ms=self.slo_ttft_ms, tpot_ms=self.slo_tpot_ms)

    def flags(self) -> tuple[str, ...]:
        """Of every scenario's server."""
        ttft = ("--cosched-slo-ttft-ms", f"{self.slo_ttft_ms:g}")
        return (*self.server_flags, *ttft, "--cosched-slo-tpot-ms", f"{self.slo_tpot_ms:g}")

    def __post_init__(self) -> None:
        if self.out.suffix != ".png":
            raise ConfigError(f"--out must end in .png, not {str(self.out)!r}")
        if len(set(self.scenarios)) != len(self.scenarios):
            raise ConfigError(f"--scenarios names one twice: {' '.join(self.scenarios)}")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 a server failed, 2 bad usage, 130 interrupted."""
    try:
        config = _parse(argv)
        check_can_draw()
    except ConfigError as error:
        return _fail(str(error), exit_code=2)
    leave_a_core_free()
    try:
        _run(config)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _fail("interrupted", exit_code=130)
    except CoschedError as error:
        return _fail(str(error), exit_code=1)
    return 0


def _parse(argv: Sequence[str] | None) -> DemoConfig:
    workload = WorkloadSpec()
    config = DemoConfig(workload=workload)
    parser = Parser(
        prog="python -m cosched.demo",
        description="Serve a small model and measure, policy by policy, what an offline job costs "
        "the online requests beside it: a table, a picture, and JSON.\nOn two CPU cores it takes "
        f"about {_expected_min(config):.0f} minutes, and wants the machine for itself.",
        epilog=_EPILOG,
    )
    add_version_option(parser)
    parser.add_argument(
        "--scenarios",
        nargs="+",
        type=checked(_scenario_name),
        default=list(config.scenarios),
        metavar="NAME",
        help=f"of {ONLINE_ONLY}, {', '.join(policy_names())}, or yours as module:Class "
        f"(default: {' '.join(config.scenarios)})",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=workload.seconds,
        metavar="S",
        help="how long online requests arrive, per scenario (default: %(default)g)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=workload.rate_per_s,
        metavar="R",
        help="mean online requests per second outside the two bursts, which have "
        f"{workload.burst_factor:g} times as many (default: %(default)g)",
    )
    parser.add_argument(
        "--offline-prompts",
        type=int,
        default=workload.num_offline,
        metavar="N",
        help="few-shot prompts of the offline job (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=workload.seed,
        metavar="N",
        help="of the arrivals and all prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--size",
        choices=sorted(SIZES),
        default=config.size,
        help="of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=PORT, metavar="N", help="of the servers (default: one that is free)"
    )
    parser.add_argument(
        "--out",
        type=_picture,
        default=config.out,
        metavar="PNG",
        help="the picture; servers' logs go beside it (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    return DemoConfig(
        workload=WorkloadSpec(
            seconds=options.seconds,
            rate_per_s=options.rate,
            num_offline=options.offline_prompts,
            seed=options.seed,
        ),
        scenarios=tuple(options.scenarios),
        size=options.size,
        port=options.port,
        out=options.out,
    )


def _expected_min(config: DemoConfig) -> float:
    per_scenario_s = _START_S + config.workload.seconds
    return max(1.0, len(config.scenarios) * per_scenario_s / 60)


def _scenario_name(name: str) -> str:
    return name if name == ONLINE_ONLY else known_policy(name)


def _picture(text: str) -> Path:
    path = output_folder(str(Path(text).absolute().parent)) / Path(text).name
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    return Path(text)


def _run(config: DemoConfig) -> None:
    try:
        config.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    load = Load.of(config.workload, concurrency=config.concurrency)
    server = ServerSpec(
        model_path=str(ensure_demo_model(size=config.size, dtype=_DTYPE)),
        flags=config.flags(),
        port=config.port,
    )
    print(
        f"demo: {len(config.scenarios)} scenarios of {config.workload.seconds:g} s, each on a "
        f"server of its own: about {_expected_min(config):.0f} minutes",
        file=sys.stderr,
        flush=True,
    )
    measured = asyncio.run(_measure_all(config, server, load))
    runs = [(found, result_of(found, load, config.slo)) for found in measured]
    results = [result for _, result in runs]
    caption = _caption(config, load)
    try:
        draw(runs, load=load, slo=config.slo, path=config.out, caption=caption)
    except OSError as error:  # the numbers are not lost with the picture
        print(f"demo: cannot write {config.out}: {error.strerror}", file=sys.stderr, flush=True)
    _print_results(config, results)


async def _measure_all(config: DemoConfig, server: ServerSpec, load: Load) -> list[Measured]:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    measured = []
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        for name in config.scenarios:
            found = await run_scenario(
                Scenario.named(name),
                server=server,
                load=load,
                log_path=config.out.with_name(f"{config.out.stem}-{name}.server.log"),
                show=_bar(bars, name),
            )
            measured.append(found)
    return measured


def _bar(bars: Bars, name: str) -> Show:
    """A bar on a terminal; in a log a line for each new phase, and one now and then."""
    task = bars.add_task(name, text="", total=None)
    is_log = not bars.console.is_terminal
    last_phase, next_s = "", 0.0

    def show(progress: Progress) -> None:
        nonlocal last_phase, next_s
        phase, now_s = progress.text.partition(":")[0], time.monotonic()
        if is_log and (phase != last_phase or now_s >= next_s):
            last_phase, next_s = phase, now_s + _LOG_EVERY_S
            done_s = min(max(0.0, progress.done_s), progress.total_s)
            print(
                f"demo: {name}: {progress.text} ({done_s:.0f}/{progress.total_s:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
        bars.update(
            task,
            total=progress.total_s,
            completed=min(max(0.0, progress.done_s), progress.total_s),
            text=progress.text,
        )

    return show


def _print_results(config: DemoConfig, results: Sequence[Result]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    console.print(results_table(results))
    for line in notes(results):
        console.print(line, highlight=False)
    console.print(f"picture: {config.out}", highlight=False)
    entry = json_entry(
        config=json.loads(json.dumps(asdict(config), default=str)),
        seed=config.workload.seed,
        results=results,
    )
    print(json.dumps(entry), flush=True)


def _caption(config: DemoConfig, load: Load) -> str:
    return (
        f"{config.size} model, {len(load.trace)} online requests in {config.workload.seconds:g} s, "
        f"job of {len(load.job)} offline requests, seed {config.workload.seed}"
    )


def _fail(message: str, *, exit_code: int) -> int:
    print(f"demo: {message}", file=sys.stderr, flush=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
