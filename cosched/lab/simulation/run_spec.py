"""The specification of a run: everything that determines its result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cosched.core.request import Slo
from cosched.lab.cost_models.cost_model import PrefixReads
from cosched.lab.cost_models.overheads import DeviceOverheads, overheads_named
from cosched.lab.cost_models.specs import gpu_spec
from cosched.lab.metrics.slo import JctTarget
from cosched.lab.simulation.fleet_spec import FleetSpec
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.setting import OfflineClient, Setting
from cosched.policies import policy_entry

DEFAULT_SLO = Slo(ttft_s=1.0, tpot_s=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A workload of the catalogue and its parameters (`cosched_traces.catalogue.load_workload`).

    name           a workload of the catalogue, or a file
    rate           mean rate of the requests, or of the starts of sessions [1/s]
    num_sessions   concurrent sessions, of a workload in sessions; a new one begins when one ends
    num_requests   size of the offline set
    peak_window_s  run only the busiest stretch of the online workload of this length [s]
    client         of the offline requests: the server's own feeder (feeder), ``cosched batch --via
                   lines`` (lines), or the whole set at the start (all); default: feeder, with stock
                   scheduling all
    num_batches    batches of the feeder: they get the lines of the set in turn
    wave           offline requests sent at once, in place of the client; the next follow when all
                   of them have ended
    refill         offline requests kept at the server, in place of the client: when one ends, the
                   next of the set is sent
    tiers          tiers of the online requests: PRIORITY:PART:TTFT_MS:TPOT_MS of each, separated by
                   spaces; every session or request is of one, drawn by their parts. Without targets
                   (PRIORITY:PART) the server's hold
    faster         factor on the speed of the online workload, bursts kept; its rate is after that
    """

    name: str
    rate: float | None = None
    num_sessions: int | None = None
    num_requests: int | None = None
    peak_window_s: float | None = None
    client: str | None = None
    num_batches: int = 1
    wave: int | None = None
    refill: int | None = None
    faster: float = 1.0
    tiers: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSpec:
    """Iteration times of the simulated GPU.

    name                 the cost model that gives iteration times; default: kernel-table with a
                         data folder, else roofline
    noise_sigma          standard deviation of the log of a random factor on each iteration's time
    profile              measured profile, for the cost model ``profile``
    device_overheads     what launches add to the time of their kernels, by attention backend
                         (docs/simulation.md); auto: SGLang's default backend for the GPU. The
                         next five replace single values
    launch_ms            host time from a launch to its first kernel [ms]
    eager_layer_ms       host time to launch a layer of an iteration with a prefill [ms]
    no_graph_layer_ms    the same for decodes alone, more than the largest CUDA graph takes [ms]
    prefill_sync_ms      idle time before an iteration with a prefill, if it waits for that [ms]
    fence_ms             delay of the iteration after a mixed one [ms]
    mixed_decode_factor  factor on the attention time of a decode beside a prefill
    prefix_reads         how decodes read a common prefix: each its whole context (each), from the
                         L2 cache (cached), or once by cosched_shared_prefix (once)
    slower               factor on iteration times after --slower-after
    slower_after_s       working time after which the GPU is slower [s]
    """

    name: str = "kernel-table"
    noise_sigma: float = 0.0
    profile: str | None = None
    device_overheads: str = "none"
    launch_ms: float | None = None
    eager_layer_ms: float | None = None
    no_graph_layer_ms: float | None = None
    prefill_sync_ms: float | None = None
    fence_ms: float | None = None
    mixed_decode_factor: float | None = None
    prefix_reads: str = PrefixReads.EACH.value
    slower: float = 1.0
    slower_after_s: float = 60.0

    def overheads(self, gpu: str) -> DeviceOverheads:
        """What these options say of a GPU. ConfigError when a value is none."""
        named = overheads_named(self.device_overheads, gpu_spec(gpu))
        given = {key: getattr(self, key) for key in asdict(named)}
        return replace(named, **{key: ms for key, ms in given.items() if ms is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything that determines the result of a run, unless host time is measured.

    duration_s      length of the run [s]; the run also ends when the offline set is done
    seed            seed of everything that is random
    data_dir        folder with traces and kernel tables (default: $COSCHED_DATA)
    cap             offline requests in flight, if the setting has a static cap
    max_concurrency maximum number of offline requests in flight, if it has an AIMD gateway
    clairvoyant     max_tokens of each request is the length of its reply, so that every policy
                    knows all lengths; else it is the maximum of the data set (docs/simulation.md)
    most_misses     the run stops once more online requests than this have missed a target; None:
                    never
    jct             deadline of online requests by their length (EcoServe §4)
    host_time       host time in virtual time: none, measured (the wall time of this run, without
                    the simulation's own work), or a factor on a model of it (docs/simulation.md)
    config          keys of `Config` and their values beside policy and slo, sorted
    """

    setting: Setting
    machine: Machine = field(default_factory=Machine)
    fleet: FleetSpec = field(default_factory=FleetSpec)
    online: WorkloadSpec | None = None
    offline: WorkloadSpec | None = None
    cost: CostSpec = field(default_factory=CostSpec)
    slo: Slo = DEFAULT_SLO
    duration_s: float = 3600.0
    seed: int = 0
    data_dir: str | None = None
    cap: int = 16
    max_concurrency: int = 256
    clairvoyant: bool = False
    most_misses: int | None = None
    jct: JctTarget | None = None
    host_time: str = "none"
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def end_s(self) -> float:
        """When the run ends at the latest [s]."""
        peak_s = self.online.peak_window_s if self.online is not None else None
        return self.duration_s if peak_s is None else min(peak_s, self.duration_s)

    def configured(self, **keys: Any) -> RunSpec:
        """With these keys of `config`."""
        return replace(self, config=tuple(sorted((dict(self.config) | keys).items())))

    def describe(self) -> dict[str, Any]:
        """For JSON: without paths, so that it is the same on every machine."""
        described = asdict(self)
        del described["data_dir"]
        del described["setting"]
        described["scenario"] = self.setting.name
        if self.offline is not None:
            described["offline"]["client"] = offline_client_of(self).value
        described["machine"] = self.machine.describe()
        described["cost"] |= asdict(self.cost.overheads(self.machine.gpu))
        described["cost"]["profile"] = self.cost.profile and Path(self.cost.profile).name
        described["config"] = {
            key: Path(value).name if key == "latency_model" else value for key, value in self.config
        }
        return described


def offline_client_of(spec: RunSpec) -> OfflineClient:
    """The kind of client of the offline requests of a run. Stock scheduling has no batches."""
    if spec.setting.client is not None:
        return spec.setting.client
    if spec.offline is not None and spec.offline.client is not None:
        return OfflineClient(spec.offline.client)
    is_stock = policy_entry(spec.setting.policy).make is None
    return OfflineClient.ALL if is_stock else OfflineClient.FEEDER
