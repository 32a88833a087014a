"""Command line options that simulate and bench share."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from cosched.command_line import existing_file, number, whole
from cosched.config import parse_config
from cosched.core.request import Slo
from cosched.cost_models.registry import COST_MODELS
from cosched.cost_models.specs import GPUS, MODELS
from cosched.errors import ConfigError
from cosched.simulation.machine import Machine
from cosched.simulation.run import DEFAULT_SLO, CostSpec, RunSpec, WorkloadSpec
from cosched.simulation.scenario import Scenario

__all__ = [
    "DATA_ENV",
    "SEED",
    "add_config_options",
    "add_machine_options",
    "add_workload_options",
    "cost_of",
    "data_dir_of",
    "machine_of",
    "run_spec_of",
]

SEED = whole(at_least=0, at_most=2**32 - 1)

DATA_ENV = "COSCHED_DATA"
"""Environment variable that names the data folder when ``--data-dir`` does not."""


def add_workload_options(parser: argparse.ArgumentParser, *, slo_of_rows: str = "") -> None:
    """slo_of_rows: what the help adds to the default targets, of a command that has others too."""
    group = parser.add_argument_group("workload (names and formats: docs/workloads.md)")
    group.add_argument("--online", metavar="NAME|FILE", help="online workload; none without")
    group.add_argument(
        "--online-rate",
        type=number(above=0),
        metavar="REQ/S",
        help="mean rate of the online requests; of a workload in sessions: of their starts",
    )
    group.add_argument(
        "--online-sessions",
        type=whole(at_least=1),
        metavar="N",
        help="sessions under way at a time, of an online workload in sessions; a new one begins "
        "when one ends",
    )
    group.add_argument("--offline", metavar="NAME|FILE", help="offline workload; none without")
    group.add_argument(
        "--offline-requests", type=whole(at_least=1), metavar="N", help="size of the offline set"
    )
    group.add_argument(
        "--offline-wave",
        type=whole(at_least=1),
        metavar="N",
        help="offline requests sent at once, the next N when all of them have ended; default: the "
        "whole set at the start",
    )
    group.add_argument(
        "--duration",
        type=number(above=0),
        default=3600.0,
        metavar="S",
        help="length of the run; it also ends when the offline set is done "
        "(default: %(default)s s)",
    )
    group.add_argument(
        "--peak-window",
        type=number(above=0),
        metavar="S",
        help="run only the busiest stretch of this length of the online workload",
    )
    group.add_argument(
        "--slo-ttft",
        type=number(above=0),
        metavar="S",
        help=f"TTFT target of online requests (default: {DEFAULT_SLO.ttft_s} s{slo_of_rows})",
    )
    group.add_argument(
        "--slo-tpot",
        type=number(above=0),
        metavar="S",
        help=f"TPOT target of online requests (default: {DEFAULT_SLO.tpot_s} s{slo_of_rows})",
    )
    group.add_argument(
        "--clairvoyant",
        action="store_true",
        help="clients ask for as many tokens as the reply will have, so that every policy knows "
        "all lengths; default: for the most that the data set has (docs/workloads.md)",
    )
    group.add_argument("--seed", type=SEED, default=0, help="default: %(default)s")
    group.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help=f"folder with traces and kernel tables (default: ${DATA_ENV})",
    )


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    machine = Machine()
    group.add_argument(
        "--model",
        choices=sorted(MODELS),
        default=machine.model,
        help="the modelled one (default: %(default)s)",
    )
    group.add_argument(
        "--gpu",
        choices=sorted(GPUS),
        default=machine.gpu,
        help="the modelled one (default: %(default)s)",
    )
    group.add_argument(
        "--tp", type=whole(at_least=1), default=machine.tp, help="GPUs (default: %(default)s)"
    )
    group.add_argument(
        "--kv-tokens",
        type=whole(at_least=1),
        metavar="N",
        help="KV capacity; default: what the GPU has left",
    )
    group.add_argument(
        "--page-size",
        type=whole(at_least=1),
        default=machine.page_size,
        metavar="N",
        help="tokens of a KV page (default: %(default)s)",
    )
    group.add_argument(
        "--chunked-prefill-size",
        type=_chunk,
        metavar="N",
        help="token budget of an iteration; -1: prompts are never split; default: SGLang's for the "
        "GPU",
    )
    group.add_argument(
        "--max-running-requests",
        type=whole(at_least=1),
        default=machine.max_running_requests,
        metavar="N",
        help="default: %(default)s",
    )
    group.add_argument(
        "--schedule-policy",
        default=machine.schedule_policy,
        choices=["fcfs", "lpm", "dfs-weight"],
        help="of stock scheduling (default: %(default)s)",
    )
    group.add_argument(
        "--mixed-chunk",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="prefill and decode in one iteration; default: as the policy wants it",
    )
    group.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="SGLang's overlap scheduler (default: on)",
    )
    group.add_argument(
        "--host-kv-tokens",
        type=whole(at_least=0),
        default=machine.host_kv_tokens,
        metavar="N",
        help="KV that host memory holds beside the GPU's (HiCache); default: none",
    )
    group.add_argument(
        "--host-bandwidth",
        type=number(above=0),
        default=machine.host_bandwidth_gb_s,
        metavar="GB/S",
        help="of copies to host memory and back, of each GPU (default: %(default)s)",
    )
    group.add_argument(
        "--hicache-write-policy",
        choices=["write_back", "write_through", "write_through_selective"],
        help="what is copied to host memory; default: what cosched finds worth it, and where "
        "SGLang decides, its own default",
    )
    group.add_argument(
        "--cost-model",
        choices=sorted(COST_MODELS),
        help="the GPU's truth; default: kernel-table with a data folder, else roofline",
    )
    group.add_argument(
        "--profile",
        type=existing_file,
        metavar="FILE",
        help="measured profile for --cost-model profile",
    )
    group.add_argument(
        "--noise",
        type=number(at_least=0, at_most=1),
        default=0.0,
        metavar="SIGMA",
        help="standard deviation of the log of a random factor on each iteration's time",
    )

    cost = CostSpec()
    group.add_argument(
        "--mixed-decode-factor",
        type=number(at_least=1, at_most=10),
        default=cost.mixed_decode_factor,
        metavar="F",
        help="how many times longer the attention of a decode takes beside a prefill "
        "(docs/cost_models.md; default: %(default)s)",
    )
    group.add_argument(
        "--slower",
        type=number(at_least=0.1, at_most=10),
        default=cost.slower,
        metavar="F",
        help="the GPU takes so many times as long once it has worked for --slower-after "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--slower-after",
        type=number(at_least=0),
        default=cost.slower_after_s,
        metavar="S",
        help="default: %(default)s s",
    )


def _chunk(text: str) -> int:
    return -1 if text == "-1" else whole(at_least=1)(text)


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Of the simulated server's configuration, for policies that have more than a name."""
    group = parser.add_argument_group("policy")
    group.add_argument(
        "--latency-model",
        type=existing_file,
        metavar="FILE",
        help="profile of the simulated machine that `python -m cosched.profile measure --virtual` "
        "wrote, for policies that predict; without one they learn while they run",
    )
    group.add_argument(
        "--cosched-config",
        default="{}",
        metavar="JSON",
        help="more keys of COSCHED_CONFIG, e.g. '{\"latency_budget_ms\": 40}'",
    )


def config_pairs(arguments: argparse.Namespace) -> tuple[tuple[str, Any], ...]:
    """`RunSpec.config` as the options give it. ConfigError naming a key that is wrong."""
    text = arguments.cosched_config
    parse_config(text, source="--cosched-config")
    keys: dict[str, Any] = json.loads(text)
    for key, flag in (("policy", "--policy or --scenarios"), ("slo", "--slo-ttft and --slo-tpot")):
        if key in keys:
            raise ConfigError(f"--cosched-config: {key!r} is set by {flag}")
    if arguments.latency_model is not None:
        keys["latency_model"] = str(arguments.latency_model)
    return tuple(sorted(keys.items()))


def data_dir_of(arguments: argparse.Namespace) -> Path | None:
    """The data folder that the options or the environment name. ConfigError when it is none."""
    named = arguments.data_dir or os.environ.get(DATA_ENV)
    if named is None or named == "":
        return None
    if not Path(named).is_dir():
        raise ConfigError(f"--data-dir: no folder {str(named)!r}")
    return Path(named)


def run_spec_of(arguments: argparse.Namespace, scenario: Scenario) -> RunSpec:
    """The run that the options describe. ConfigError when they contradict each other."""
    if arguments.online is None and arguments.offline is None:
        raise ConfigError("nothing to run: name --online, --offline or both")
    data_dir = data_dir_of(arguments)
    return RunSpec(
        scenario=scenario,
        machine=machine_of(arguments),
        online=arguments.online
        and WorkloadSpec(
            name=arguments.online,
            rate=arguments.online_rate,
            num_sessions=arguments.online_sessions,
            peak_window_s=arguments.peak_window,
        ),
        offline=arguments.offline
        and WorkloadSpec(
            name=arguments.offline,
            num_requests=arguments.offline_requests,
            wave=arguments.offline_wave,
        ),
        cost=cost_of(arguments),
        slo=Slo(
            ttft_s=arguments.slo_ttft or DEFAULT_SLO.ttft_s,
            tpot_s=arguments.slo_tpot or DEFAULT_SLO.tpot_s,
        ),
        duration_s=arguments.duration,
        seed=arguments.seed,
        data_dir=str(data_dir) if data_dir else None,
        clairvoyant=arguments.clairvoyant,
        config=config_pairs(arguments),
    )


def machine_of(arguments: argparse.Namespace) -> Machine:
    return Machine(
        model=arguments.model,
        gpu=arguments.gpu,
        tp=arguments.tp,
        kv_tokens=arguments.kv_tokens,
        page_size=arguments.page_size,
        chunk_tokens=arguments.chunked_prefill_size,
        max_running_requests=arguments.max_running_requests,
        schedule_policy=arguments.schedule_policy,
        mixed_chunk=arguments.mixed_chunk,
        overlap=arguments.overlap,
        host_kv_tokens=arguments.host_kv_tokens,
        host_bandwidth_gb_s=arguments.host_bandwidth,
        host_write_policy=arguments.hicache_write_policy,
    )


def cost_of(arguments: argparse.Namespace) -> CostSpec:
    """The cost model, by default the best one that the data folder allows."""
    return CostSpec(
        name=arguments.cost_model or ("kernel-table" if data_dir_of(arguments) else "roofline"),
        noise_sigma=arguments.noise,
        mixed_decode_factor=arguments.mixed_decode_factor,
        slower=arguments.slower,
        slower_after_s=arguments.slower_after,
        profile=str(arguments.profile) if arguments.profile else None,
    )
