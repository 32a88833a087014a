#!/usr/bin/env python3
"""Does the scheduler keep its pace, and its memory, in an overload that lasts for hours?

    .venv/bin/python scripts/overload.py --duration 36000 --online multi-turn \\
        --online-sessions 60 --max-running-requests 16 --cost-model profile --profile cpu.json \\
        --slower 4 --slower-after 0 --slo-ttft 3 --slo-tpot 0.5

Runs a workload in virtual time, with the options of `cosched.simulate`, and looks at its process
every half hour of it. What the simulation keeps of requests and iterations that are over is thrown
away there, so what grows is the scheduler's. Ask for more sessions than the device can serve:
requests that come at a rate, whatever happens, wait in ever longer queues.

Prints a line for each half hour and, last, one JSON object.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import gc
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from measuring import resident_bytes

import cosched.simulation.virtual as virtual
from cosched.command_line import Parser
from cosched.config import Config
from cosched.core.request import RequestClass
from cosched.metrics.records import ColumnLog, IterationLog
from cosched.metrics.summary import summarize
from cosched.metrics.window import Window
from cosched.policy.registry import known_policy
from cosched.simulation.arrivals import Source
from cosched.simulation.options import add_run_options, run_spec_of
from cosched.simulation.run import RunSpec, execute
from cosched.simulation.scenario import Scenario

EVERY_S = 1800.0


class Watch:
    """One row for each half hour."""

    def __init__(self, spec: RunSpec) -> None:
        self.rows: list[dict[str, float | None]] = []
        self._spec = spec
        self._since_s = 0.0
        self._wall_s = time.perf_counter()

    def look(self, engine: virtual.VirtualEngine) -> None:
        now_s = engine.clock.now_s()
        if now_s < self._since_s + EVERY_S:
            return
        wall_s = time.perf_counter() - self._wall_s
        waiting = engine.open_records()
        part = summarize(
            [*engine.records, *waiting],
            engine.iterations,
            window=Window(start_s=self._since_s, end_s=now_s),
            default_slos={RequestClass.ONLINE: self._spec.slo},
        )
        num_iterations = len(engine.iterations)
        num_waiting = len(waiting)
        engine.records.clear()
        engine.iterations = IterationLog()
        engine.kv = ColumnLog(engine.kv.names)
        under_way = {record.rid for record in waiting}
        for rid in engine.local.replies.keys() - under_way:
            del engine.local.replies[rid]
        del waiting, under_way
        met = part.online.attainment
        row = {
            "hours": now_s / 3600,
            "resident_mb": resident_bytes() / 1e6,
            "objects": float(len(gc.get_objects())),
            "under_way": float(num_waiting),
            "ended": float(part.online.num_finished),
            "ttft_p50_s": part.online.ttft_s.p50,
            "ttft_met": met.ttft.ratio,
            "tpot_met": met.tpot.ratio,
            "online_output_tokens_per_s": part.online.output_tokens_per_s,
            "offline_tokens_per_s": part.offline.tokens_per_s,
            "iterations": float(num_iterations),
            "host_ms_per_iteration": 1e3 * wall_s / max(num_iterations, 1),
        }
        self.rows.append(row)
        shown = ((name, value) for name, value in row.items() if value is not None)
        print("  ".join(f"{name} {value:.4g}" for name, value in shown), flush=True)
        self._since_s, self._wall_s = now_s, time.perf_counter()


def watched(spec: RunSpec) -> list[dict[str, float | None]]:
    watch = Watch(spec)

    class Watched(virtual.VirtualEngine):
        def run(
            self, sources: Sequence[Source], *, until: Callable[[], bool] | None = None
        ) -> None:
            def asked() -> bool:
                watch.look(self)
                return until is not None and until()

            super().run(sources, until=asked)

    virtual.VirtualEngine = Watched  # type: ignore[misc]  # the one that `execute` makes
    execute(spec)
    return watch.rows


def main() -> None:
    parser = Parser(prog="scripts/overload.py", description=__doc__)
    parser.add_argument("--policy", type=known_policy, default=Config().policy, metavar="NAME")
    add_run_options(parser)
    arguments = parser.parse_args()
    name: str = arguments.policy
    spec = run_spec_of(arguments, Scenario(name=name, summary="", policy=name))
    result: dict[str, Any] = {"spec": spec.describe(), "rows": watched(spec)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
