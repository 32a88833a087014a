"""One scenario: a fresh server with one policy, warmed up, loaded, measured and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cosched.demo.records import OfflineRecord, OnlineRecord
from cosched.demo.traffic import OfflineJob, OnlineTraffic, Window
from cosched.demo.workload import (
    ChatRequest,
    OfflinePrompt,
    WorkloadSpec,
    chat_prompts,
    make_chat_trace,
    make_offline_job,
)
from cosched.errors import CoschedError
from cosched.jobs.client import Client, RetryRules
from cosched.jobs.server import OwnServer, free_port, own_base_url, server_command

__all__ = [
    "MODEL",
    "ONLINE_ONLY",
    "Load",
    "Measured",
    "Progress",
    "Scenario",
    "ServerSpec",
    "Show",
    "leave_a_core_free",
    "run_scenario",
    "serving",
]

ONLINE_ONLY = "online-only"
MODEL = "demo"

_LEAD_S = 3.0  # by which the offline job is ahead of the window, which then sees it under way
_PATIENCE_S = 60.0  # for online requests that are unanswered when the window closes
_WARM_UP_REQUESTS = 8  # of each class
_START_TIMEOUT_S = 300.0
_SHOW_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A policy, and whether the offline job runs beside the online requests."""

    name: str
    policy: str
    has_offline: bool

    @classmethod
    def named(cls, name: str) -> Scenario:
        """`online-only`, or a policy's name."""
        if name == ONLINE_ONLY:
            return cls(name=name, policy="sarathi", has_offline=False)
        return cls(name=name, policy=name, has_offline=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """How every scenario's server is started; only the policy differs. `port` None: a free one."""

    model_path: str
    flags: tuple[str, ...]
    port: int | None = None

    def command(self, policy: str, *, port: int) -> list[str]:
        flags = [*self.flags, "--served-model-name", MODEL, "--cosched-policy", policy]
        return server_command(model_path=self.model_path, port=port, flags=flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a scenario. Every scenario gets the same."""

    spec: WorkloadSpec
    trace: tuple[ChatRequest, ...]
    job: tuple[OfflinePrompt, ...]
    concurrency: int

    @classmethod
    def of(cls, spec: WorkloadSpec, *, concurrency: int) -> Load:
        trace, job = make_chat_trace(spec), make_offline_job(spec)
        return cls(spec=spec, trace=trace, job=job, concurrency=concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a scenario stands, for the display. `done_s` of `total_s` seconds of load are over."""

    text: str
    done_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the client saw in one scenario, and how busy the machine was before its load began."""

    scenario: Scenario
    online: tuple[OnlineRecord, ...]
    offline: tuple[OfflineRecord, ...]
    server_start_s: float
    load_average: float


Show = Callable[[Progress], None]


def leave_a_core_free() -> None:
    """One core is for the tokenizer, the detokenizer and this client.

    With a compute thread on every core each of its barriers waits for a thread that they keep from
    running: on two busy cores a token took a hundred times as long.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))


async def run_scenario(
    scenario: Scenario, *, server: ServerSpec, load: Load, log_path: Path, show: Show
) -> Measured:
    """Start the server, warm it up, run the load, stop the server, whatever happens.

    Raises CoschedError when the server does not start, or dies.
    """
    show(Progress(text="server starts", done_s=0.0, total_s=load.spec.seconds))
    port = server.port or free_port()
    command = server.command(scenario.policy, port=port)
    began_s = time.monotonic()
    async with serving(command, port=port, log_path=log_path, concurrency=load.concurrency) as up:
        server_start_s = time.monotonic() - began_s
        show(Progress(text="warm-up", done_s=0.0, total_s=load.spec.seconds))
        await _warm_up(up, load.spec)
        load_average = os.getloadavg()[0]
        online, offline = await _run_load(up, scenario, load, show)
    return Measured(
        scenario=scenario,
        online=online,
        offline=offline,
        server_start_s=server_start_s,
        load_average=load_average,
    )


@contextlib.asynccontextmanager
async def serving(
    command: Sequence[str], *, port: int, log_path: Path, concurrency: int
) -> AsyncIterator[Client]:
    """A server of our own within the block, and a client of it.

    Raises ServerGoneError when the server does not become ready, and in the midst of the block when
    it dies.
    """
    client = Client(
        base_url=own_base_url(port),
        concurrency=concurrency,
        rules=RetryRules(max_wait_s=30.0),
        rng=random.Random(0),
        clock=time.monotonic,
    )
    server = OwnServer(
        client=client, command=command, log_path=str(log_path), start_timeout_s=_START_TIMEOUT_S
    )
    try:
        async with client:
            await server.ready()
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(server.watch())
                yield client
                watch.cancel()
    except BaseExceptionGroup as errors:
        raise _cause(errors) from errors
    finally:
        await asyncio.to_thread(server.stop)


async def _warm_up(client: Client, spec: WorkloadSpec) -> None:
    """Some requests of both classes that share no prefix with those to be measured."""
    size = replace(spec, seed=-1 - spec.seed, num_offline=_WARM_UP_REQUESTS)
    prompts = chat_prompts(size, seed=size.seed)
    trace = [
        ChatRequest(arrival_s=0.1 * index, prompt=next(prompts), num_output_tokens=16)
        for index in range(_WARM_UP_REQUESTS)
    ]
    window = Window(opens_in_s=0.5)
    job = OfflineJob(client=client, window=window, prompts=make_offline_job(size), model=MODEL)
    async with OnlineTraffic(base_url=client.base_url, window=window, model=MODEL) as traffic:
        async with asyncio.TaskGroup() as group:
            group.create_task(job.run(concurrency=_WARM_UP_REQUESTS))
            group.create_task(traffic.replay(trace, give_up_s=_PATIENCE_S))
    errors = [record.error for record in traffic.records]
    errors += [record.error for record in job.records]
    if error := next(filter(None, errors), None):
        raise CoschedError(f"the server does not answer as it should: {error}")


async def _run_load(
    client: Client, scenario: Scenario, load: Load, show: Show
) -> tuple[tuple[OnlineRecord, ...], tuple[OfflineRecord, ...]]:
    """The measured part: the trace, with the offline job around it where the scenario has one."""
    window = Window(opens_in_s=_LEAD_S)
    prompts = load.job if scenario.has_offline else ()
    job = OfflineJob(client=client, window=window, prompts=prompts, model=MODEL)
    seconds = load.spec.seconds
    async with OnlineTraffic(base_url=client.base_url, window=window, model=MODEL) as traffic:

        async def show_often() -> None:
            while True:
                text = (
                    f"online: {traffic.num_sent}/{len(load.trace)} sent, "
                    f"{traffic.num_sent - len(traffic.records)} in flight"
                )
                if prompts:
                    text += f"; offline: {len(job.records)}/{len(prompts)} done"
                show(Progress(text=text, done_s=window.now_s(), total_s=seconds))
                await asyncio.sleep(_SHOW_EVERY_S)

        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(job.run(concurrency=load.concurrency)),
                group.create_task(show_often()),
            ]
            await traffic.replay(load.trace, give_up_s=seconds + _PATIENCE_S)
            await window.until(seconds)
            for task in beside:
                task.cancel()
    return tuple(traffic.records), tuple(job.records)


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error a user can act on: when a server goes, all that waits for it fails at once."""
    found = group.subgroup(CoschedError)
    error: BaseException = found or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
