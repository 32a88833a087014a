#!/usr/bin/env python3
"""The same requests on a live engine and in the simulator: how far are they apart?

    scripts/check_simulation.py [--model-path M] [--policy cosched] [--rate 0.4] [--write FILE]

1. `cosched profile measure` measures iterations of the model on this machine.
2. A server of this model serves chat beside a batch, with its decision log.
3. The simulator runs the same requests on a machine with this profile and the server's settings.

Without --model-path the model is the demo model on a CPU. The page has what requests felt, and the
iterations by kind. Prompts, lengths and arrivals are equal; replies end after the same tokens. The
simulator models the forward pass alone: tokenizer, HTTP and the client are in the live times only.
Run it when nothing else runs, with chat that the machine can serve within its targets: beyond, the
queue turns a small error into any. The defaults are for two cores. The last line is JSON.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cosched.core.request import Slo
from cosched.engine.log.read import read_log
from cosched.files import write_whole
from cosched.lab.benchmark.live import measure_live
from cosched.lab.benchmark.own_server import OwnServers
from cosched.lab.benchmark.trial_phases import DEMO_FLAGS
from cosched.lab.demo_model import ensure_demo_model
from cosched.lab.metrics.summary import Summary
from cosched.lab.metrics.table import markdown_rows
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.requests import load_requests
from cosched.lab.simulation.run import execute
from cosched.lab.simulation.run_spec import CostSpec, RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import OfflineClient, Setting
from cosched.versions import versions

_SIZES = dict(zip(DEMO_FLAGS[::2], DEMO_FLAGS[1::2], strict=True))
CHUNK = int(_SIZES["--chunked-prefill-size"])
RUNNING = int(_SIZES["--max-running-requests"])
KV_TOKENS = int(_SIZES["--max-total-tokens"])
KINDS = ("decodes alone", "prompts alone", "mixed")


class Step(NamedTuple):
    """An iteration. seconds: from its launch to its result."""

    num_prompt_tokens: int
    num_decodes: int
    seconds: float

    @property
    def kind(self) -> str:
        return KINDS[0 if not self.num_prompt_tokens else 1 if not self.num_decodes else 2]


COLUMNS: tuple[tuple[str, Callable[[Summary], float | None], float], ...] = (
    ("TTFT mean ms", lambda s: s.online.ttft_s.mean, 1e3),
    ("TTFT p50 ms", lambda s: s.online.ttft_s.p50, 1e3),
    ("TTFT p90 ms", lambda s: s.online.ttft_s.p90, 1e3),
    ("TPOT mean ms", lambda s: s.online.tpot_s.mean, 1e3),
    ("TPOT p90 ms", lambda s: s.online.tpot_s.p90, 1e3),
    ("both targets met %", lambda s: s.online.attainment.joint.ratio, 100),
    ("offline requests done", lambda s: float(s.offline.num_finished), 1),
    ("offline tokens/s", lambda s: s.offline.tokens_per_s, 1),
)


def spec_of(args: argparse.Namespace) -> RunSpec:
    setting = Setting(
        name=args.policy, summary="", policy=args.policy, has_offline=True, client=OfflineClient.CAP
    )
    return RunSpec(
        setting=setting,
        online=WorkloadSpec(name=args.online, rate=args.rate),
        offline=WorkloadSpec(name=args.offline, num_requests=args.offline_requests),
        slo=Slo(ttft_s=args.ttft, tpot_s=args.tpot),
        duration_s=args.seconds,
        seed=args.seed,
        clairvoyant=True,
    )


def measure_profile(model: str, path: Path, *, num_batches: int, seed: int) -> None:
    """By the command of users, in a process of its own."""
    words = [sys.executable, "-m", "cosched.profile", "measure", "--model-path", model, *DEMO_FLAGS]
    words += ["--batches", str(num_batches), "--seed", str(seed), "--write", str(path)]
    subprocess.run(words, check=True, stdout=sys.stderr)


async def run_server(spec: RunSpec, model: str, folder: Path) -> tuple[Summary, list[Step]]:
    log = folder / "decisions.jsonl"
    flags = [*DEMO_FLAGS, "--cosched-decision-log", str(log)]
    servers = OwnServers(model_path=model, flags=flags)
    async with servers.started(spec, log_path=folder / "server.log") as target:
        num_before = sum(1 for _ in read_log(log, report=print))
        live = await measure_live(target, spec, *load_requests(spec), grace_s=10.0)
    steps = [
        Step(sum(made.plan.prefill.values()), made.num_decodes, made.measured_s)
        for made in (entry.decision for entry in read_log(log, report=print))
        if made.iteration >= num_before and made.measured_s
    ]
    return live.summary, steps


def simulate(spec: RunSpec, profile: Path) -> tuple[Summary, list[Step]]:
    machine = Machine(
        chunk_tokens=CHUNK, max_running_requests=RUNNING, kv_tokens=KV_TOKENS, overlap=False
    )
    cost = CostSpec(name="profile", profile=str(profile))
    result = execute(replace(spec, machine=machine, cost=cost))
    steps = [
        Step(
            i.num_online_prefill_tokens + i.num_offline_prefill_tokens,
            i.num_online_decodes + i.num_offline_decodes,
            i.duration_s,
        )
        for i in result.iterations
    ]
    return result.summary, steps


def error(live: float | None, simulated: float | None) -> str:
    return f"{100 * (simulated / live - 1):+.1f} %" if live and simulated is not None else ""


def felt(live: Summary, simulated: Summary) -> list[list[str]]:
    rows = []
    for name, of, scale in COLUMNS:
        one, other = of(live), of(simulated)
        shown = ["" if value is None else f"{scale * value:,.1f}" for value in (one, other)]
        rows.append([name, *shown, error(one, other)])
    return rows


def by_kind(live: Sequence[Step], simulated: Sequence[Step]) -> list[list[str]]:
    rows = []
    for kind in KINDS:
        both = [[step for step in steps if step.kind == kind] for steps in (live, simulated)]
        if not all(both):
            continue
        for name, of in (
            ("number", len),
            ("mean ms", lambda steps: 1e3 * float(np.mean(times(steps)))),
            ("p90 ms", lambda steps: 1e3 * float(np.quantile(times(steps), 0.9))),
        ):
            one, other = (float(of(steps)) for steps in both)
            rows.append([f"{kind}: {name}", f"{one:,.1f}", f"{other:,.1f}", error(one, other)])
    return rows


def times(steps: Iterable[Step]) -> list[float]:
    return [step.seconds for step in steps]


def page(args: argparse.Namespace, rows: list[list[str]], steps: list[list[str]]) -> str:
    known = versions()
    command = " ".join(["scripts/check_simulation.py", *sys.argv[1:]])
    model = Path(args.model_path).name if args.model_path else "the demo model"
    head = ["", "live", "simulated", "error"]
    return "\n".join(
        [
            "# The simulator against a live engine\n",
            f"The same requests: `{args.online}` at {args.rate:g} req/s beside `{args.offline}` "
            f"for {args.seconds:g} s, policy `{args.policy}`, targets TTFT {args.ttft:g} s and "
            f"TPOT {args.tpot:g} s; {model}, chunks of {CHUNK}, {RUNNING} running, "
            f"{KV_TOKENS:,} KV tokens. The simulated machine has the profile of this engine. "
            "Only the forward pass is modelled: live times hold tokenizer and HTTP too.\n",
            f"```bash\n{command}\n```\n",
            markdown_rows(head, rows),
            "Iterations:\n",
            markdown_rows(head, steps),
            f"Commit {known['commit']}, SGLang {known['sglang']}, torch {known['torch']}, seed "
            f"{args.seed}.\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", help="default: the demo model")
    parser.add_argument("--policy", default="cosched")
    parser.add_argument("--online", default="demo-chat")
    parser.add_argument("--rate", type=float, default=0.4, help="of chat [requests/s]")
    parser.add_argument("--offline", default="demo-job")
    parser.add_argument("--offline-requests", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--ttft", type=float, default=2.0, help="target [s]")
    parser.add_argument("--tpot", type=float, default=0.1, help="target [s]")
    parser.add_argument("--batches", type=int, default=300, help="of the profile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="the page")
    args = parser.parse_args()
    model = args.model_path or str(ensure_demo_model(dtype="bfloat16"))
    spec = spec_of(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "profile.json"
        measure_profile(model, profile, num_batches=args.batches, seed=args.seed)
        live, live_steps = asyncio.run(run_server(spec, model, folder))
        simulated, simulated_steps = simulate(spec, profile)
    rows, steps = felt(live, simulated), by_kind(live_steps, simulated_steps)
    text = page(args, rows, steps)
    if args.write is not None:
        write_whole(args.write, text)
    print(text)
    print(json.dumps({"requests": rows, "iterations": steps, "versions": versions()}))


if __name__ == "__main__":
    main()
