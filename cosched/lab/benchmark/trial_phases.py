"""The phases of a trial: chat alone and beside a batch, on servers that are started for them or on
one that runs. Each finished phase is kept in a folder, and not repeated by the next run."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.progress import Progress

from cosched.core.request import RequestClass, Slo
from cosched.errors import ConfigError
from cosched.files import write_whole
from cosched.lab.benchmark.admin_client import metrics_of, post
from cosched.lab.benchmark.live import (
    VOCAB_SIZE,
    LiveProgress,
    LiveResult,
    LiveTarget,
    ServerError,
    measure_live,
    run_live,
)
from cosched.lab.benchmark.own_server import OwnServers
from cosched.lab.benchmark.progress import live_bars, phase_bar
from cosched.lab.demo_model import ensure_demo_model
from cosched.lab.metrics.records import read_records, write_records
from cosched.lab.metrics.stats import ratio
from cosched.lab.simulation.clients import ClosedLoopClient
from cosched.lab.simulation.requests import load_requests
from cosched.lab.simulation.run import summarize_run
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import OfflineClient, Setting
from cosched.lab.trial_page import PhaseFacts, PhaseResult
from cosched_traces.catalogue import WORKLOADS, load_workload
from cosched_traces.files import first_line
from cosched_traces.transform import period_s
from cosched_traces.workload import Workload

LOAD = 0.3
"""Chat as a share of what stock SGLang bears, where nothing is said."""
_LEAD_S = 3.0  # by which the batch is ahead of a phase, which then sees it under way
_STOP_S = 5.0  # to stop a server
_SETTLE_S = 30.0  # at most, until a server has ended what the client left
_GRACE_S = 10.0  # how long unanswered chats of a phase are followed
_CAPACITY_SHARE, _MOST_CAPACITY_S = 0.04, 20.0  # of the whole time
LEAST_PHASE_S = 10.0
_USUAL_START_S = 60.0  # for the bar
_MOST_TRIED = 4096
"""Chats that stock SGLang gets at most when it is asked what it bears."""
_DEMO_DTYPE = "bfloat16"
DEMO_FLAGS = (
    *("--dtype", _DEMO_DTYPE),
    *("--chunked-prefill-size", "256"),
    *("--max-running-requests", "16"),
    *("--max-total-tokens", "32768"),
    *("--mem-fraction-static", "0.2"),  # a model this small needs no more where there is a GPU
)
KEPT = "kept.json"
"""The file of `Kept` in the folder of a trial."""


class Phase(NamedTuple):
    """title: its row of the table. policy: of its server."""

    name: str
    title: str
    policy: str
    has_batch: bool


_OWN = (
    Phase("stock-alone", "stock SGLang, chat alone", "sglang", False),
    Phase("stock-batch", "stock SGLang", "sglang", True),
    Phase("priority-batch", "stock with priorities", "priority", True),
    Phase("cosched-alone", "cosched, chat alone", "cosched", False),
    Phase("cosched-batch", "cosched", "cosched", True),
)
_RUNNING = (
    Phase("paused", "offline work paused", "cosched", False),
    Phase("resumed", "beside offline work", "cosched", True),
)


class Kept(msgspec.Struct, kw_only=True):
    """What an interrupted trial continues with.

    asked      the options that it was begun with
    capacity   chats that stock SGLang bears [requests/s]; None: not measured
    rate       of chat [requests/s]
    window_s   length of a phase [s]; 0: it has not been chosen
    phases     those that are finished
    wall_s     time that was spent so far [s]
    """

    asked: dict[str, Any]
    ttft_ms: float
    tpot_ms: float
    capacity: float | None = None
    rate: float = 0.0
    window_s: float = 0.0
    phases: dict[str, PhaseFacts] = msgspec.field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def slo(self) -> Slo:
        return Slo(ttft_s=self.ttft_ms / 1e3, tpot_s=self.tpot_ms / 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLoad:
    """What is replayed, and how long all may take.

    chat, batch  workloads or files; batch None: the offline work of the server itself
    rate         of chat [requests/s]; None: the trace's own, or `load`
    load         share of what stock SGLang bears; None: `LOAD`, unless the chat is a trace
    concurrency  requests of the batch in flight
    out          folder for what is kept
    """

    chat: str
    batch: str | None
    batch_requests: int | None
    concurrency: int
    rate: float | None
    load: float | None
    minutes: float
    seed: int
    data_dir: Path | None
    out: Path


class TrialRun(ABC):
    """A trial on some servers. Everything that is measured is in the folder and in `kept`."""

    phases: Sequence[Phase]

    def __init__(self, load: TrialLoad, kept: Kept) -> None:
        """WorkloadError if the chat or the batch cannot be read."""
        self.load = load
        self.kept = kept
        self._began_s = time.monotonic() - kept.wall_s
        self._chat = self._chat_of(load.seed)
        if load.batch is not None:
            offline = RequestClass.OFFLINE
            load_workload(load.batch, seed=0, request_class=offline, data_dir=load.data_dir)

    @abstractmethod
    async def measure(self) -> None:
        """Measure the phases that are not kept."""

    @abstractmethod
    def command(self) -> str | None:
        """To deploy; None: the server runs already."""

    @abstractmethod
    def _where(self) -> str:
        """The model, and on what it runs."""

    def results(self) -> dict[str, PhaseResult]:
        """Of all phases."""
        found = {}
        for phase in self.phases:
            spec = self._spec(phase)
            records = list(read_records(self._records_path(phase)))
            summary = summarize_run(spec, records, None, end_s=spec.end_s)
            result = LiveResult(spec=spec, summary=summary, records=records)
            facts = self.kept.phases[phase.name]
            found[phase.name] = PhaseResult(title=phase.title, result=result, facts=facts)
        return found

    def about(self) -> str:
        """What was measured, in Markdown."""
        kept, load = self.kept, self.load
        share = ""
        if kept.capacity is not None:
            share = f" ({100 * kept.rate / kept.capacity:.0f} % of what stock SGLang bears)"
        batch = "the server's own offline work"
        if load.batch is not None:
            facts = self.kept.phases[self.phases[-1].name]
            batch = (
                f"`{Path(load.batch).name}`, {facts.job_requests:,} requests of "
                f"{facts.job_tokens:,} tokens, {load.concurrency} in flight"
            )
        return (
            f"{self._where()}. Chat: `{Path(load.chat).name}`, {kept.rate:.2g} requests/s{share}, "
            f"{kept.window_s:.0f} s in each row. Batch: {batch}. Targets: TTFT {kept.ttft_ms:g} "
            f"ms, TPOT {kept.tpot_ms:g} ms."
        )

    @property
    def spent_s(self) -> float:
        """In this run and on what is kept of earlier ones [s]."""
        return time.monotonic() - self._began_s

    def keep(self) -> None:
        self.kept.wall_s = self.spent_s
        write_json(self.load.out / KEPT, self.kept)

    def _records_path(self, phase: Phase) -> Path:
        return self.load.out / f"{phase.name}.jsonl"

    def _todo(self, phases: Sequence[Phase]) -> list[Phase]:
        return [phase for phase in phases if phase.name not in self.kept.phases]

    def _chat_of(self, seed: int) -> Workload:
        """At the rate of the trace or the default of the workload, for as long as that is."""
        load = self.load
        return load_workload(
            load.chat, seed=seed, request_class=RequestClass.ONLINE, data_dir=load.data_dir
        )

    @cached_property
    def _own_rate(self) -> float:
        """Requests/s of the chat as it was loaded."""
        return len(self._chat.requests) / period_s(self._chat)

    def _online(self) -> WorkloadSpec:
        rate = self.kept.rate or self._own_rate
        if not self._chat.has_sessions:
            return WorkloadSpec(name=self.load.chat, faster=rate / self._own_rate)
        num_sessions = sum(request.after is None for request in self._chat.requests)
        turns = len(self._chat.requests) / num_sessions
        return WorkloadSpec(name=self.load.chat, rate=rate / turns)

    def _spec(self, phase: Phase, *, window_s: float | None = None) -> RunSpec:
        load = self.load
        batch = None
        if load.batch is not None:
            batch = WorkloadSpec(name=load.batch, num_requests=load.batch_requests)
        return RunSpec(
            setting=Setting(
                name=phase.title,
                summary="",
                policy=phase.policy,
                has_offline=phase.has_batch,
                client=OfflineClient.CAP,
            ),
            online=self._online(),
            offline=batch,
            slo=self.kept.slo,
            duration_s=window_s or self.kept.window_s,
            seed=load.seed,
            data_dir=None if load.data_dir is None else str(load.data_dir),
            cap=load.concurrency,
            clairvoyant=True,
        )

    def _set_window(self, rest_s: float, why: str = "") -> None:
        """Divide the time that is left for the phases. ConfigError where it is too little."""
        num, minutes = len(self.phases), self.load.minutes
        other_s = _LEAD_S + _GRACE_S
        window_s = rest_s / num - other_s
        if window_s < LEAST_PHASE_S:
            lacks_s = num * (LEAST_PHASE_S - window_s)
            raise ConfigError(
                f"--minutes {minutes:g} leaves {max(window_s, 0.0):.0f} s for each of {num} phases"
                f"{why}: give it at least {math.ceil(minutes + lacks_s / 60.0)}"
            )
        self.kept.window_s = float(math.floor(window_s))
        self.keep()

    async def _run(self, target: LiveTarget, phase: Phase, bars: Progress, **known: float) -> None:
        """Measure a phase, and keep it."""
        spec = self._spec(phase)
        online, offline = load_requests(spec)
        show = phase_bar(bars, phase.title, total_s=spec.end_s)

        def on_progress(progress: LiveProgress) -> None:
            text = (
                f"chat: {progress.num_online_sent}/{len(online)} sent, "
                f"{progress.num_online_open} in flight"
            )
            if offline:
                text += f"; batch: {progress.num_offline_ended}/{len(offline)} done"
            show(text, progress.now_s)

        load_average = os.getloadavg()[0] / (os.cpu_count() or 1)
        before, began_s = await metrics_of(target), time.monotonic()
        result = await measure_live(
            target,
            spec,
            online,
            offline,
            lead_s=_LEAD_S if offline else 0.0,
            grace_s=_GRACE_S,
            on_progress=on_progress,
        )
        seconds, after = time.monotonic() - began_s, await metrics_of(target)
        write_records(result.records, self._records_path(phase))
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        idle_s = grown.get("sglang:scheduler_idle_seconds_total")
        self.kept.phases[phase.name] = PhaseFacts(
            **known,
            load_average=load_average,
            job_requests=len(offline),
            job_tokens=sum(r.num_prompt_tokens + r.num_output_tokens for r in offline),
            idle_share=None if idle_s is None else min(idle_s / seconds, 1.0),
            prediction_error=ratio(
                grown.get("cosched:prediction_error_ratio_sum"),
                grown.get("cosched:prediction_error_ratio_count"),
            ),
        )
        self.keep()


class OwnTrial(TrialRun):
    """On servers of its own, one after the other."""

    phases = _OWN

    def __init__(
        self, load: TrialLoad, kept: Kept, *, model_path: str | None, flags: Sequence[str]
    ) -> None:
        """model_path: None: the demo model. flags: of `cosched serve`."""
        super().__init__(load, kept)
        self._model_path = model_path
        self._flags = (*(DEMO_FLAGS if model_path is None else ()), *flags)

    async def measure(self) -> None:
        model = self._model_path or str(ensure_demo_model(dtype=_DEMO_DTYPE))
        with live_bars() as bars:
            for policy, phases in itertools.groupby(self.phases, key=lambda phase: phase.policy):
                if todo := self._todo([*phases]):
                    flags = self._flags if policy == "cosched" else stock_flags(self._flags)
                    servers = OwnServers(model_path=model, flags=[*flags, "--enable-metrics"])
                    await self._on_server(servers, policy, todo, bars)

    async def _on_server(
        self, servers: OwnServers, policy: str, todo: Sequence[Phase], bars: Progress
    ) -> None:
        began_s = time.monotonic()
        show = phase_bar(bars, f"{policy} server", total_s=_USUAL_START_S)
        show("starts", 0.0)
        spec = self._spec(todo[0], window_s=1.0)
        async with servers.started(spec, log_path=self.load.out / f"{policy}.log") as target:
            start_s = time.monotonic() - began_s
            show(f"ready after {start_s:.0f} s", _USUAL_START_S)
            if not self.kept.window_s:
                await self._choose(target, start_s)
            for phase in todo:
                await post(target, f"/flush_cache?timeout={_SETTLE_S:g}")
                await self._run(target, phase, bars, server_start_s=start_s)

    async def _choose(self, target: LiveTarget, start_s: float) -> None:
        """The rate of chat and the length of a phase. ConfigError if there is no time for them."""
        load, total_s = self.load, 60.0 * self.load.minutes
        tried_s = min(_CAPACITY_SHARE * total_s, _MOST_CAPACITY_S)
        if load.rate is None and (load.load or not self._has_own_rate):
            self.kept.capacity = await self._capacity(target, tried_s)
            self.kept.rate = (load.load or LOAD) * self.kept.capacity
        else:
            self.kept.rate = load.rate or self._own_rate
        rest_s = total_s - self.spent_s - 3 * _STOP_S - 2 * start_s
        self._set_window(rest_s, f", as a server starts in {start_s:.0f} s")

    @property
    def _has_own_rate(self) -> bool:
        """The chat is a trace."""
        path = Path(self.load.chat)
        is_file = self.load.chat not in WORKLOADS and path.is_file()
        return is_file and '"custom_id"' not in first_line(path)

    async def _capacity(self, target: LiveTarget, seconds: float) -> float:
        """Chats per second that the server answers where as many as of the batch are in flight."""
        chat = self._chat_of(self.load.seed + 1).requests[:_MOST_TRIED]
        asked = [
            replace(r, after=None, session=None, max_new_tokens=r.num_output_tokens) for r in chat
        ]
        client = ClosedLoopClient(
            asked, concurrency=self.load.concurrency, vocab_size=target.vocab_size
        )
        records = await run_live(target, [client], duration_s=seconds)
        each = sum(r.num_output_tokens for r in asked) / len(asked)
        capacity = sum(r.num_output_tokens for r in records if r.ok) / each / seconds
        if not capacity:
            raise ServerError(f"the server answered no chat in {seconds:.0f} s")
        return capacity

    def command(self) -> str:
        model = shlex.quote(self._model_path or "")
        if self._model_path is None:
            model = f'"$(cosched demo-model --dtype {_DEMO_DTYPE})"'
        slo = (("ttft", self.kept.ttft_ms), ("tpot", self.kept.tpot_ms))
        targets = [f"--cosched-slo-{name}-ms={ms:g}" for name, ms in slo]
        return f"cosched serve --model-path {model} {shlex.join([*self._flags, *targets])}"

    def _where(self) -> str:
        name = Path(self._model_path).name if self._model_path else "The demo model"
        return f"{name} on {_device()}"


class RunningTrial(TrialRun):
    """On a server that runs. Its limits of offline work are as before at the end."""

    phases = _RUNNING

    def __init__(
        self, load: TrialLoad, kept: Kept, target: LiveTarget, state: dict[str, Any]
    ) -> None:
        """state: of `GET /cosched`; `running_state` asks for it."""
        super().__init__(load, kept)
        self._target = target
        self._state = state

    async def measure(self) -> None:
        kept, load = self.kept, self.load
        kept.rate = load.rate or self._own_rate
        if not kept.window_s:
            self._set_window(60.0 * load.minutes)
        limits = self._state["replicas"][0]["offline_limits"]
        allowed = {"max_running": limits["max_running"]}
        stopped = {"paused": True, "stop_running": True}
        try:
            with live_bars() as bars:
                for phase in self._todo(self.phases):
                    await post(
                        self._target, "/cosched/offline", allowed if phase.has_batch else stopped
                    )
                    # Other prompts in each phase: the cache has the last phase's.
                    vocab_size = VOCAB_SIZE - self.phases.index(phase)
                    await self._run(replace(self._target, vocab_size=vocab_size), phase, bars)
        finally:
            await post(self._target, "/cosched/offline", limits)

    def command(self) -> None:
        return None

    def _where(self) -> str:
        return f"{self._state['model']} at {self._target.base_url}"


def write_json(path: Path, value: object) -> None:
    """For people to read; whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=1).decode()
    write_whole(path, text + "\n")


def stock_flags(flags: Sequence[str]) -> list[str]:
    """Without cosched's own flags and their values."""
    found, is_ours = [], False
    for word in flags:
        if word.startswith("--"):
            is_ours = word.startswith("--cosched-")
        if not is_ours:
            found.append(word)
    return found


def _device() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return f"{os.cpu_count()} CPU cores"
    return found.partition("\n")[0]
