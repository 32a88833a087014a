"""One run in virtual time, and its result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from cosched.config import Config, SloConfig, configured, parse_config
from cosched.core.request import RequestClass, Slo
from cosched.engine.arguments import kv_arguments
from cosched.engine.support import EVICTION_FLAG, SLOW_WHERE_MIXED
from cosched.errors import ConfigError, CoschedError
from cosched.lab.cost_models.cost_model import OVERLAPPED, SYNCHRONOUS, CostModel, PrefixReads
from cosched.lab.cost_models.overheads import Launches
from cosched.lab.cost_models.registry import make_cost_model
from cosched.lab.cost_models.sglang_defaults import default_max_batch
from cosched.lab.cost_models.specs import gpu_spec
from cosched.lab.metrics.job import steady_window
from cosched.lab.metrics.records import ColumnLog, IterationLog, RequestRecord
from cosched.lab.metrics.stats import Window
from cosched.lab.metrics.summary import Summary, summarize
from cosched.lab.simulation.arrivals import Source
from cosched.lab.simulation.clients import online_client
from cosched.lab.simulation.drafts import Acceptance
from cosched.lab.simulation.feeder_client import FeederClient
from cosched.lab.simulation.host_time import host_time
from cosched.lab.simulation.ranks import forked
from cosched.lab.simulation.requests import is_missed, load_requests, offline_client
from cosched.lab.simulation.run_spec import RunSpec
from cosched.lab.simulation.work_bound import JobWork, job_work
from cosched.policies import policy_entry
from cosched.predict.profile_file import EngineIdentity, Profile
from cosched_traces.workload import TraceRequest

if TYPE_CHECKING:
    from cosched.lab.simulation.virtual import VirtualEngine

_ASKED_EVERY = 200
"""Iterations between two checks of the unfinished requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run.

    end_s       virtual time at which it ended: the duration, the end of the offline set, or when it
                gave up [s]
    wall_s      host time of the run, without building the engine [s]
    cosched     counters of the controller; None under stock scheduling
    kv          KV memory by use (`KvOccupancy`), one row per second; empty if SGLang evicts in its
                own order
    saturation  mean of `ChatState.saturation` over the run; None: it was not known
    """

    spec: RunSpec
    summary: Summary
    records: Sequence[RequestRecord]
    iterations: IterationLog
    kv: ColumnLog
    end_s: float
    wall_s: float
    cost_model: dict[str, object]
    cosched: dict[str, Any] | None
    saturation: float | None = None
    gave_up: bool = False

    def to_dict(self, *, with_host: bool = False) -> dict[str, Any]:
        """Plain data for JSON; without host times equal runs give equal bytes."""
        cosched = dict(self.cosched) if self.cosched else None
        if cosched and not with_host:
            cosched.pop("planning_us", None)
        result = {
            "spec": self.spec.describe(),
            "cost_model": self.cost_model,
            "end_s": self.end_s,
            "cosched": cosched,
            "saturation": self.saturation,
            "summary": self.summary.to_dict(with_host=with_host),
        }
        if with_host:
            result["wall_s"] = self.wall_s
        return result


def execute(
    spec: RunSpec,
    *,
    on_progress: Callable[[float], None] | None = None,
    decision_log: Path | None = None,
) -> RunResult:
    """Run it in this process, with one replica (several: `cosched.lab.simulation.fleet`). SGLang
    keeps process-wide state: one run at a time per process.

    `on_progress` gets the virtual time now and then [s]; `decision_log` is a file to write every
    decision to. ConfigError when the setting leaves its decisions to SGLang.
    """
    online, offline = load_requests(spec)
    return execute_requests(
        spec, online, offline, on_progress=on_progress, decision_log=decision_log
    )


def execute_requests(
    spec: RunSpec,
    online: Sequence[TraceRequest],
    offline: Sequence[TraceRequest],
    *,
    client: Source | None = None,
    is_done: Callable[[], bool] | None = None,
    on_progress: Callable[[float], None] | None = None,
    decision_log: Path | None = None,
) -> RunResult:
    """The same with these requests in place of the specification's workloads. client: of the
    offline requests, in place of the specification's. is_done: when the job is; default: when all
    of `offline` have ended."""
    config = config_of(spec, decision_log)
    identity = identity_of(spec)
    if config.latency_model is not None and policy_entry(config.policy).timed:
        Profile.of_engine(Path(config.latency_model), identity).predictor_named(config.predictor)
    cost_model = cost_model_of(spec)
    from cosched.engine.read_state import state_of
    from cosched.lab.simulation.virtual import VirtualEngine
    from cosched.lab.simulation.virtual_host import HostLink

    machine = spec.machine
    host_link = None
    if machine.host_kv_tokens:
        host_link = HostLink(
            s_per_token=machine.host_s_per_token,
            num_layers=machine.served.num_layers,
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(configured(config))
        flags = engine_flags(spec)
        ranks = stack.enter_context(forked(machine.dp_ranks))
        try:
            engine = VirtualEngine(
                flags=flags,
                cost_model=cost_model,
                identity=identity,
                host_link=host_link,
                prefix_reads=PrefixReads(spec.cost.prefix_reads),
                host=host_time(spec.host_time, policy_entry(spec.setting.policy)),
                launches=launches_of(spec),
                acceptance=Acceptance(machine.acceptance, machine.acceptance_spread),
                window=machine.window,
                ranks=ranks,
            )
        except CoschedError:
            raise
        except Exception as error:  # SGLang's own checks are assertions and errors of all kinds
            raise ConfigError(f"SGLang refuses to run with {' '.join(flags)}: {error}") from error
        stack.enter_context(engine)
        sources: list[Source] = [online_client(online)]
        if client is None and offline:
            client = offline_client(spec, offline)
        if isinstance(client, FeederClient):
            client.num_running = lambda: _num_running(engine)
            client.abort = engine.abort
        if client is not None:
            sources.append(client)
        num_offline = len(offline)
        has_given_up = _giving_up(spec, engine)
        reports = None if ranks.rank else on_progress
        gave_up = False

        def is_over() -> bool:
            nonlocal gave_up
            if reports is not None and len(engine.iterations) % _ASKED_EVERY == 0:
                reports(min(engine.clock.now_s(), spec.end_s))
            if engine.clock.now_s() >= spec.end_s:
                return True
            gave_up = has_given_up()
            if is_done is not None:
                return gave_up or is_done()
            return gave_up or (bool(num_offline) and engine.num_finished_offline == num_offline)

        started_s = time.perf_counter()
        engine.run(sources, until=is_over)
        wall_s = time.perf_counter() - started_s
        end_s = min(engine.clock.now_s(), spec.end_s)
        if client is None and not gave_up:
            end_s = spec.end_s
        records = [*engine.records, *engine.open_records()]
        iterations = ranks.merged(engine.iterations)
        ranks.end()
        controller = getattr(engine.scheduler, "cosched", None)
        return RunResult(
            spec=spec,
            summary=summarize_run(
                spec, records, iterations, end_s=end_s, work=work_of(spec, offline)
            ),
            records=records,
            iterations=iterations,
            kv=engine.kv,
            end_s=end_s,
            wall_s=wall_s,
            cost_model=cost_model.describe(),
            cosched=state_of(controller).to_dict() if controller is not None else None,
            saturation=round(fmean(engine.saturation), 4) if engine.saturation else None,
            gave_up=gave_up,
        )


def _num_running(engine: VirtualEngine) -> int | None:
    """Offline requests that have begun; None: the scheduler is not ours."""
    from cosched.engine.read_state import offline_progress

    controller = getattr(engine.scheduler, "cosched", None)
    return None if controller is None else len(offline_progress(controller).begun)


def _giving_up(spec: RunSpec, engine: VirtualEngine) -> Callable[[], bool]:
    """True once more than `most_misses` online requests have missed a target. Unfinished requests
    are checked every `_ASKED_EVERY` iterations."""
    if spec.most_misses is None:
        return lambda: False
    most = spec.most_misses
    num_seen = num_missed = 0

    def count(records: Sequence[RequestRecord]) -> int:
        return sum(
            record.request_class is RequestClass.ONLINE
            and is_missed(record, spec, now_s=engine.clock.now_s())
            for record in records
        )

    def has_given_up() -> bool:
        nonlocal num_seen, num_missed
        num_missed += count(engine.records[num_seen:])
        num_seen = len(engine.records)
        if len(engine.iterations) % _ASKED_EVERY == 0:
            return num_missed + count(engine.open_records()) > most
        return num_missed > most

    return has_given_up


def summarize_run(
    spec: RunSpec,
    records: Sequence[RequestRecord],
    iterations: IterationLog | None,
    *,
    end_s: float,
    work: JobWork | None = None,
) -> Summary:
    """Metrics of ``[0, end_s)``. work: of the offline requests; None: not known."""
    summary = summarize(
        records,
        iterations,
        window=Window(start_s=0.0, end_s=end_s),
        default_slos={RequestClass.ONLINE: spec.slo},
        jct_target=spec.jct,
        line_costs=None if work is None else work.costs,
    )
    window = steady_window(start_s=0.0, end_s=end_s)
    if work is None or window is None:
        return summary
    online = [record for record in records if record.request_class is RequestClass.ONLINE]
    job = replace(
        summary.job,
        work_s=work.total_s,
        bound_per_s=work.bound_per_s(online, window, tpot_s=spec.slo.tpot_s),
    )
    if job.makespan_s is not None:
        whole = Window(start_s=0.0, end_s=job.makespan_s)
        most_per_s = work.bound_per_s(online, whole, tpot_s=spec.slo.tpot_s)
        job = replace(job, least_makespan_s=work.total_s / most_per_s if most_per_s else None)
    return replace(summary, job=job)


def work_of(spec: RunSpec, offline: Sequence[TraceRequest]) -> JobWork | None:
    """Of the job, by the cost model without noise and at full speed."""
    if not offline:
        return None
    exact = replace(spec, cost=replace(spec.cost, noise_sigma=0.0, slower=1.0))
    return job_work(
        offline,
        cost_model_of(exact),
        kv_tokens=spec.machine.capacity(),
        max_running=spec.machine.slots(),
        num_ranks=spec.machine.dp_ranks * spec.fleet.replicas,
    )


def engine_flags(spec: RunSpec) -> list[str]:
    """SGLang's flags: the machine's, the setting's, and those the policy needs."""
    flags = spec.machine.flags()
    flags += spec.setting.flags
    mixes = spec.machine.mixed_chunk is None and spec.cost.device_overheads not in SLOW_WHERE_MIXED
    if spec.setting.schedule_policy is not None:
        flags += ["--schedule-policy", spec.setting.schedule_policy]
    for flag, argument in policy_entry(spec.setting.policy).arguments().items():
        if flag != "--enable-mixed-chunk" or mixes:
            flags += argument
    config = config_of(spec)
    if spec.setting.eviction is not None and policy_entry(spec.setting.policy).make is None:
        flags += [EVICTION_FLAG, spec.setting.eviction]
    return flags + kv_arguments(flags, config)


def config_of(spec: RunSpec, decision_log: Path | None = None) -> Config:
    """The configuration that the simulated server runs with. ConfigError when it is wrong."""
    given = dict(spec.config)
    if not policy_entry(spec.setting.policy).tolerates:
        given.pop("tolerance", None)  # of a baseline that has no tolerance mode
    keys = {
        "decision_log": decision_log and str(decision_log),
        "policy": spec.setting.policy,
        "strict": True,
        "slo": msgspec.to_builtins(_slo_config(spec.slo)),
        **given,
    }
    if spec.setting.predictor is not None:
        keys["predictor"] = spec.setting.predictor
    config = parse_config(msgspec.json.encode(keys).decode(), source="the run's configuration")
    if spec.setting.eviction is not None:
        kv = msgspec.structs.replace(config.kv, eviction=spec.setting.eviction)
        config = msgspec.structs.replace(config, kv=kv)
    return config


def identity_of(spec: RunSpec) -> EngineIdentity:
    """Of the simulated engine: that of the profile if a profile is its cost model."""
    machine, cost = spec.machine, spec.cost
    if cost.name == "profile" and cost.profile is not None:
        engine = Profile.load(Path(cost.profile)).engine
        if engine is not None:
            return engine
    model = machine.served
    return EngineIdentity(
        device=f"virtual {machine.gpu} ({cost.name})",
        num_cores=None,
        model=model.name,
        num_layers=model.num_layers,
        hidden_size=model.hidden,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab,
        dtype="bfloat16",
        quantization=None,
        tp=machine.tp,
        sglang=metadata.version("sglang"),
    )


def _is_synchronous(spec: RunSpec) -> bool:
    """Host time is part of the cost model's iterations."""
    return not spec.machine.overlap and spec.host_time == "none"


def launches_of(spec: RunSpec) -> Launches:
    """They take no time where the cost model's host time has it."""
    overheads = None if _is_synchronous(spec) else spec.cost.overheads(spec.machine.gpu)
    machine = spec.machine
    return Launches(
        overheads,
        num_layers=machine.served.num_layers,
        largest_graph=default_max_batch(gpu_spec(machine.gpu), machine.tp),
    )


def cost_model_of(spec: RunSpec) -> CostModel:
    """The simulated GPU. Without the overlap scheduler, host time is part of its iterations if the
    virtual clock leaves it out."""
    return make_cost_model(
        spec.cost.name,
        model=spec.machine.served,
        gpu=spec.machine.gpu,
        tp=spec.machine.tp,
        data_dir=Path(spec.data_dir) if spec.data_dir else None,
        profile=Path(spec.cost.profile) if spec.cost.profile else None,
        overhead=SYNCHRONOUS if _is_synchronous(spec) else OVERLAPPED,
        mixed_decode_factor=spec.cost.overheads(spec.machine.gpu).mixed_decode_factor,
        prefix_reads=spec.cost.prefix_reads,
        noise_sigma=spec.cost.noise_sigma,
        slower=spec.cost.slower,
        slower_after_s=spec.cost.slower_after_s,
        seed=spec.seed,
    )


def _slo_config(slo: Slo) -> SloConfig:
    defaults = SloConfig()
    return SloConfig(
        ttft_ms=slo.ttft_s * 1e3 if slo.ttft_s else defaults.ttft_ms,
        tpot_ms=slo.tpot_s * 1e3 if slo.tpot_s else defaults.tpot_ms,
    )
