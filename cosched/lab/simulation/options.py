"""Command line options that simulate, bench, tune, profile and suites share."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from cosched.cli import (
    Count,
    NotNegative,
    OldFile,
    OnOff,
    Positive,
    Seed,
    explained_by,
    number,
    reader,
    section,
    whole,
)
from cosched.config import parse_config
from cosched.core.request import Slo
from cosched.errors import ConfigError
from cosched.lab.cost_models.cost_model import PrefixReads
from cosched.lab.cost_models.model_config import read_model_config
from cosched.lab.cost_models.overheads import SETTINGS
from cosched.lab.cost_models.registry import COST_MODELS
from cosched.lab.cost_models.specs import GPUS, MODELS, ModelSpec
from cosched.lab.simulation.fleet_spec import FleetSpec
from cosched.lab.simulation.host_time import read_host_time
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.requests import checked_tiers
from cosched.lab.simulation.run_spec import DEFAULT_SLO, CostSpec, RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import Setting
from cosched.policies import known_policy, policy_names
from cosched.predict.tolerance import (
    TOLERANCE_HELP,
    TOLERANCE_METAVAR,
    ToleranceConfig,
    parse_tolerance,
)

PolicyName = Annotated[
    str,
    Parameter(
        name=("--policy", "--cosched-policy"),
        converter=reader(known_policy),
        metavar="NAME",
        help=f"the scheduling policy: {', '.join(policy_names())}, or your own as module:Class; "
        "sglang and priority are stock scheduling",
    ),
]

DATA_ENV = "COSCHED_DATA"
"""Environment variable that names the data folder when ``--data-dir`` does not."""

_MACHINE, _COST = Machine(), CostSpec()

_WORKLOAD_SECTION = section("Workload (docs/simulation.md)")
_RUN_SECTION = section("Run")
_MACHINE_SECTION = section("Simulated machine")
_FLEET_SECTION = section("Fleet of such machines")
_COST_SECTION = section("Iteration times of the simulated machine")
_POLICY_SECTION = section("Policy")

DataDir = Annotated[Path | None, Parameter(metavar="DIR")]
Factor = Annotated[float, number(gte=1, lte=10)]
Milliseconds = Annotated[float, number(gte=0, lte=1000)]


def _chunk(text: str) -> int:
    if text == "-1" or (text.isdecimal() and int(text) >= 1):
        return int(text)
    raise ValueError(f"{text!r} is not a whole number of at least 1, or -1")


@explained_by(WorkloadSpec)
@dataclass(kw_only=True)
class OnlineOptions:
    name: Annotated[str | None, Parameter(name="--online", metavar="NAME|FILE")] = None
    rate: Annotated[Positive | None, Parameter(name="--online-rate")] = None
    num_sessions: Annotated[Count | None, Parameter(name="--online-sessions")] = None
    peak_window_s: Annotated[Positive | None, Parameter(name="--peak-window")] = None
    faster: Annotated[Positive, Parameter(name="--online-faster")] = 1.0
    tiers: Annotated[
        str, Parameter(name="--online-tiers", metavar="TIERS", converter=reader(checked_tiers))
    ] = ""


@explained_by(WorkloadSpec)
@dataclass(kw_only=True)
class OfflineOptions:
    name: Annotated[str | None, Parameter(name="--offline", metavar="NAME|FILE")] = None
    num_requests: Annotated[Count | None, Parameter(name="--offline-requests")] = None
    client: Annotated[
        Literal["feeder", "lines", "all"] | None, Parameter(name="--offline-client")
    ] = None
    num_batches: Annotated[Count, Parameter(name="--offline-batches")] = 1
    wave: Annotated[Count | None, Parameter(name="--offline-wave")] = None
    refill: Annotated[Count | None, Parameter(name="--offline-refill")] = None


@dataclass(kw_only=True)
class SloOptions:
    slo_ttft: Positive = DEFAULT_SLO.ttft_s or 0.0
    """TTFT target of online requests [s]"""
    slo_tpot: Positive = DEFAULT_SLO.tpot_s or 0.0
    """TPOT target of online requests [s]"""


@explained_by(RunSpec)
@dataclass(kw_only=True)
class LengthOptions:
    duration_s: Annotated[Positive, Parameter(name="--duration")] = 3600.0
    clairvoyant: bool = False
    seed: Seed = 0
    data_dir: DataDir = None
    host_time: Annotated[
        str, Parameter(converter=reader(read_host_time), metavar="none|measured|FACTOR")
    ] = "none"


@explained_by(Machine)
@dataclass(kw_only=True)
class MachineOptions:
    model: Annotated[str, Parameter(choices=sorted(MODELS))] = _MACHINE.model
    model_config: Annotated[
        ModelSpec | None,
        Parameter(
            converter=reader(read_model_config), metavar="FILE", accepts_keys=False, n_tokens=1
        ),
    ] = None
    gpu: Annotated[str, Parameter(choices=sorted(GPUS))] = _MACHINE.gpu
    tp: Count = 1
    dp_ranks: Count = 1
    kv_tokens: Count | None = None
    page_size: Count = 1
    chunk_tokens: Annotated[
        int | None, Parameter(name="--chunked-prefill-size", converter=reader(_chunk))
    ] = None
    max_running_requests: Count | None = _MACHINE.max_running_requests
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight"] = "fcfs"
    mixed_chunk: OnOff | None = None
    overlap: OnOff = True
    radix_cache: OnOff = True
    host_kv_tokens: Annotated[int, whole(0)] = 0
    host_bandwidth_gb_s: Annotated[Positive, Parameter(name="--host-bandwidth")] = (
        _MACHINE.host_bandwidth_gb_s
    )
    host_write_policy: Annotated[
        Literal["write_back", "write_through", "write_through_selective"] | None,
        Parameter(name="--hicache-write-policy"),
    ] = None
    drafts: Annotated[int, whole(0)] = 0
    state_slots: Annotated[int, whole(0)] = 0
    acceptance: Annotated[float, number(gte=0, lte=1)] = _MACHINE.acceptance
    acceptance_spread: Annotated[float, number(gte=0, lte=1)] = 0.0
    window_tokens: Annotated[int, whole(0)] = 0
    window_kv_tokens: Count | None = None


@explained_by(FleetSpec)
@dataclass(kw_only=True)
class FleetOptions:
    replicas: Count = 1
    absent: Annotated[str, Parameter(metavar="ABSENCES")] = ""
    notice_s: Annotated[NotNegative, Parameter(name="--notice")] = 0.0


@explained_by(CostSpec)
@dataclass(kw_only=True)
class CostOptions:
    name: Annotated[str | None, Parameter(name="--cost-model", choices=sorted(COST_MODELS))] = None
    profile: OldFile | None = None
    noise_sigma: Annotated[float, number(gte=0, lte=1), Parameter(name="--noise")] = 0.0
    device_overheads: Annotated[str, Parameter(choices=SETTINGS)] = _COST.device_overheads
    launch_ms: Milliseconds | None = None
    eager_layer_ms: Milliseconds | None = None
    no_graph_layer_ms: Milliseconds | None = None
    prefill_sync_ms: Milliseconds | None = None
    fence_ms: Milliseconds | None = None
    mixed_decode_factor: Factor | None = None
    prefix_reads: Annotated[str, Parameter(choices=[way.value for way in PrefixReads])] = (
        _COST.prefix_reads
    )
    slower: Annotated[float, number(gte=0.1, lte=10)] = 1.0
    slower_after_s: Annotated[NotNegative, Parameter(name="--slower-after")] = _COST.slower_after_s


@dataclass(kw_only=True)
class PolicyOptions:
    """The simulated server's configuration, for policies that have more than a name."""

    latency_model: OldFile | None = None
    """profile of the simulated machine, made by `cosched profile measure --virtual`, for policies
    that predict; without one they learn during the run"""
    cosched_tolerance: Annotated[
        ToleranceConfig | None,
        Parameter(
            converter=reader(parse_tolerance),
            metavar=TOLERANCE_METAVAR,
            help=TOLERANCE_HELP,
            accepts_keys=False,
        ),
    ] = None
    cosched_config: Annotated[str, Parameter(metavar="JSON")] = "{}"
    """more keys of COSCHED_CONFIG, such as '{"latency_budget_ms": 40}'"""


@dataclass(kw_only=True)
class MachineAndPolicy:
    machine: Annotated[MachineOptions, _MACHINE_SECTION] = field(default_factory=MachineOptions)
    cost: Annotated[CostOptions, _COST_SECTION] = field(default_factory=CostOptions)
    policy: Annotated[PolicyOptions, _POLICY_SECTION] = field(default_factory=PolicyOptions)


@dataclass(kw_only=True)
class RunOptions(MachineAndPolicy):
    """All options of a run."""

    online: Annotated[OnlineOptions, _WORKLOAD_SECTION] = field(default_factory=OnlineOptions)
    offline: Annotated[OfflineOptions, _WORKLOAD_SECTION] = field(default_factory=OfflineOptions)
    slo: Annotated[SloOptions, _WORKLOAD_SECTION] = field(default_factory=SloOptions)
    length: Annotated[LengthOptions, _RUN_SECTION] = field(default_factory=LengthOptions)
    fleet: Annotated[FleetOptions, _FLEET_SECTION] = field(default_factory=FleetOptions)


def config_pairs(options: PolicyOptions) -> tuple[tuple[str, Any], ...]:
    """`RunSpec.config` as the options give it. ConfigError naming a key that is wrong."""
    parse_config(options.cosched_config, source="--cosched-config")
    keys: dict[str, Any] = json.loads(options.cosched_config)
    for key, flag in (("policy", "--policy or --settings"), ("slo", "--slo-ttft and --slo-tpot")):
        if key in keys:
            raise ConfigError(f"--cosched-config: {key!r} is set by {flag}")
    if options.cosched_tolerance is not None:
        keys["tolerance"] = msgspec.to_builtins(options.cosched_tolerance)
    if options.latency_model is not None:
        keys["latency_model"] = str(options.latency_model)
    return tuple(sorted(keys.items()))


def data_dir_of(given: Path | None) -> Path | None:
    """The data folder that --data-dir or the environment names. ConfigError if there is none."""
    named = given or os.environ.get(DATA_ENV)
    if named is None or named == "":
        return None
    if not Path(named).is_dir():
        raise ConfigError(f"--data-dir: no folder {str(named)!r}")
    return Path(named)


def run_spec_of(options: RunOptions, setting: Setting) -> RunSpec:
    """The run that the options describe. ConfigError when they contradict each other."""
    online, offline = (
        WorkloadSpec(**asdict(given)) if given.name else None
        for given in (options.online, options.offline)
    )
    if online is None and offline is None:
        raise ConfigError("nothing to run: name --online, --offline or both")
    data_dir = data_dir_of(options.length.data_dir)
    return RunSpec(
        setting=setting,
        machine=machine_of(options.machine),
        fleet=FleetSpec(**vars(options.fleet)),
        online=online,
        offline=offline,
        cost=cost_of(options.cost, data_dir),
        slo=Slo(ttft_s=options.slo.slo_ttft, tpot_s=options.slo.slo_tpot),
        config=config_pairs(options.policy),
        **asdict(options.length) | {"data_dir": str(data_dir) if data_dir else None},
    )


def machine_of(options: MachineOptions) -> Machine:
    return Machine(**vars(options))


def cost_of(options: CostOptions, data_dir: Path | None) -> CostSpec:
    """The cost model, by default the best one that the data folder allows."""
    given = asdict(options) | {"profile": str(options.profile) if options.profile else None}
    given["name"] = options.name or ("kernel-table" if data_dir else "roofline")
    return CostSpec(**given)
