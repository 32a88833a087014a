"""Command line options that simulate and bench share."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cosched.command_line import (
    add_field_option,
    checked,
    existing_file,
    fields_given,
    number,
    whole,
)
from cosched.config import parse_config
from cosched.core.request import Slo
from cosched.errors import ConfigError
from cosched.lab.cost_models.base import PrefixReads
from cosched.lab.cost_models.registry import COST_MODELS
from cosched.lab.cost_models.specs import GPUS, MODELS
from cosched.lab.simulation.host_time import read_host_time
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import DEFAULT_SLO, CostSpec, RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import Setting
from cosched.predict.tolerance import TOLERANCE_HELP, TOLERANCE_METAVAR, parse_tolerance

SEED = whole(at_least=0, at_most=2**32 - 1)

DATA_ENV = "COSCHED_DATA"
"""Environment variable that names the data folder when ``--data-dir`` does not."""


def add_run_options(parser: argparse.ArgumentParser, *, slo_of_rows: str = "") -> None:
    """All of `run_spec_of`. slo_of_rows: what the help adds to the default targets, of a command
    that has others too."""
    _add_workload_options(parser, slo_of_rows)
    add_machine_options(parser)
    add_config_options(parser)


def _add_workload_options(parser: argparse.ArgumentParser, slo_of_rows: str) -> None:
    group = parser.add_argument_group("workload (names and formats: docs/workloads.md)")
    add = partial(add_field_option, group, WorkloadSpec, default=None)
    add("name", "--online", dest="online", metavar="NAME|FILE")
    add("rate", "--online-rate", dest="online_rate", metavar="REQ/S")
    add("num_sessions", "--online-sessions", dest="online_sessions", metavar="N")
    add("name", "--offline", dest="offline", metavar="NAME|FILE")
    add("num_requests", "--offline-requests", dest="offline_requests", metavar="N")
    add("wave", "--offline-wave", dest="offline_wave", metavar="N")
    add("refill", "--offline-refill", dest="offline_refill", metavar="N")
    add("peak_window_s", "--peak-window", metavar="S")
    add("faster", "--online-faster", dest="online_faster", metavar="F", type=number(above=0))
    for kind, default_s in (("ttft", DEFAULT_SLO.ttft_s), ("tpot", DEFAULT_SLO.tpot_s)):
        group.add_argument(
            f"--slo-{kind}",
            type=number(above=0),
            metavar="S",
            help=f"{kind.upper()} target of online requests (default: {default_s} s{slo_of_rows})",
        )
    add = partial(add_field_option, group, RunSpec)
    add("duration_s", "--duration", metavar="S")
    add("clairvoyant", action="store_true")
    add("seed", type=SEED)
    add("data_dir", type=Path, metavar="DIR")
    add("host_time", type=checked(read_host_time), metavar="none|measured|FACTOR")


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    add = partial(add_field_option, group, Machine)
    add("model", choices=sorted(MODELS))
    add("gpu", choices=sorted(GPUS))
    add("tp")
    add("kv_tokens", metavar="N")
    add("page_size", metavar="N")
    add("chunk_tokens", "--chunked-prefill-size", type=_chunk, metavar="N")
    add("max_running_requests", metavar="N")
    add("schedule_policy", choices=["fcfs", "lpm", "dfs-weight"])
    add("mixed_chunk")
    add("overlap")
    add("radix_cache")
    add("host_kv_tokens", type=whole(at_least=0), metavar="N")
    add("host_bandwidth_gb_s", "--host-bandwidth", metavar="GB/S")
    writes = ["write_back", "write_through", "write_through_selective"]
    add("host_write_policy", "--hicache-write-policy", choices=writes)
    add = partial(add_field_option, group, CostSpec)
    add("name", "--cost-model", dest="cost_model", default=None, choices=sorted(COST_MODELS))
    add("profile", type=existing_file, metavar="FILE")
    add("noise_sigma", "--noise", type=number(at_least=0, at_most=1), metavar="SIGMA")
    add("mixed_decode_factor", type=number(at_least=1, at_most=10), metavar="F")
    add("prefix_reads", choices=[way.value for way in PrefixReads])
    add("slower", type=number(at_least=0.1, at_most=10), metavar="F")
    add("slower_after_s", "--slower-after", type=number(at_least=0), metavar="S")


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
        "--cosched-tolerance",
        type=checked(parse_tolerance),
        metavar=TOLERANCE_METAVAR,
        help=TOLERANCE_HELP,
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
    if arguments.cosched_tolerance is not None:
        keys["tolerance"] = msgspec.to_builtins(arguments.cosched_tolerance)
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


def run_spec_of(arguments: argparse.Namespace, setting: Setting) -> RunSpec:
    """The run that the options describe. ConfigError when they contradict each other."""
    if arguments.online is None and arguments.offline is None:
        raise ConfigError("nothing to run: name --online, --offline or both")
    data_dir = data_dir_of(arguments)
    return RunSpec(
        setting=setting,
        machine=machine_of(arguments),
        online=arguments.online
        and WorkloadSpec(
            name=arguments.online,
            rate=arguments.online_rate,
            num_sessions=arguments.online_sessions,
            peak_window_s=arguments.peak_window_s,
            faster=1.0 if arguments.online_faster is None else arguments.online_faster,
        ),
        offline=arguments.offline
        and WorkloadSpec(
            name=arguments.offline,
            num_requests=arguments.offline_requests,
            wave=arguments.offline_wave,
            refill=arguments.offline_refill,
        ),
        cost=cost_of(arguments),
        slo=Slo(
            ttft_s=arguments.slo_ttft or DEFAULT_SLO.ttft_s,
            tpot_s=arguments.slo_tpot or DEFAULT_SLO.tpot_s,
        ),
        duration_s=arguments.duration_s,
        seed=arguments.seed,
        data_dir=str(data_dir) if data_dir else None,
        clairvoyant=arguments.clairvoyant,
        host_time=arguments.host_time,
        config=config_pairs(arguments),
    )


def machine_of(arguments: argparse.Namespace) -> Machine:
    return fields_given(Machine, arguments)


def cost_of(arguments: argparse.Namespace) -> CostSpec:
    """The cost model, by default the best one that the data folder allows."""
    return replace(
        fields_given(CostSpec, arguments),
        name=arguments.cost_model or ("kernel-table" if data_dir_of(arguments) else "roofline"),
        profile=str(arguments.profile) if arguments.profile else None,
    )
