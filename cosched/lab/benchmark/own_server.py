"""Live runs of a specification, each on a fresh server: nothing in its cache or its predictor
comes from an earlier run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cosched.batch.jsonl.server import serving
from cosched.cli import run_async
from cosched.config import configured
from cosched.errors import CoschedError
from cosched.lab.benchmark.live import (
    VOCAB_SIZE,
    LiveProgress,
    LiveResult,
    LiveTarget,
    measure_live,
)
from cosched.lab.simulation.requests import load_requests
from cosched.lab.simulation.run import config_of
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec

_WARM_UP_REQUESTS = 8  # of each class
_WARM_UP_SEED = 1_000_000  # no prompt of the warm-up is measured
_WARM_UP_S = 120.0
_LEAD_S = 3.0  # by which offline work is ahead of the window, which then sees it under way

Show = Callable[[str, float], None]
"""Gets the phase of a run, and the time of it that has passed [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun:
    """load_average: of the machine before the load began."""

    result: LiveResult
    server_start_s: float
    load_average: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServers:
    """How the server of each run is started; policy and configuration are those of the run.

    flags    of SGLang and of `cosched.launch_server`
    port     None: a free one
    grace_s  how long unanswered online requests are followed after the end of the run
    """

    model_path: str
    flags: Sequence[str] = ()
    port: int | None = None
    grace_s: float = 0.0
    vocab_size: int = VOCAB_SIZE

    async def run(
        self, spec: RunSpec, *, log_path: Path, show: Show = lambda text, done_s: None
    ) -> OwnRun:
        """Start a server, warm it up, run the load, stop the server. Its output goes to `log_path`.
        CoschedError if it does not start, does not answer, or dies."""
        config = msgspec.structs.replace(config_of(spec), strict=False)
        began_s = time.monotonic()
        show("server starts", 0.0)
        flags = [*self.flags, "--cosched-policy", config.policy]
        with configured(config):
            server = serving(
                model_path=self.model_path, flags=flags, log_path=log_path, port=self.port
            )
            async with server as base_url:
                server_start_s = time.monotonic() - began_s
                show("warm-up", 0.0)
                target = LiveTarget(base_url=base_url, vocab_size=self.vocab_size)
                await _warm_up(target, spec)
                load_average = os.getloadavg()[0]
                result = await self._measure(target, spec, show)
        return OwnRun(result=result, server_start_s=server_start_s, load_average=load_average)

    def run_all(
        self, specs: Sequence[RunSpec], *, log_path: Path, show: Show = lambda text, done_s: None
    ) -> Iterator[tuple[int, LiveResult]]:
        """One after the other; yields (index, result), as `execute_all` does."""
        for index, spec in enumerate(specs):
            run = run_async(self.run(spec, log_path=log_path, show=show))
            yield index, run.result

    async def _measure(self, target: LiveTarget, spec: RunSpec, show: Show) -> LiveResult:
        online, offline = load_requests(spec)

        def on_progress(progress: LiveProgress) -> None:
            text = (
                f"online: {progress.num_online_sent}/{len(online)} sent, "
                f"{progress.num_online_open} in flight"
            )
            if offline:
                text += f"; offline: {progress.num_offline_ended}/{len(offline)} done"
            show(text, progress.now_s)

        return await measure_live(
            target,
            spec,
            online,
            offline,
            lead_s=_LEAD_S,
            grace_s=self.grace_s,
            on_progress=on_progress,
        )


async def _warm_up(target: LiveTarget, spec: RunSpec) -> None:
    """Requests of both classes that share no prefix with the measured ones."""
    warm_up = RunSpec(
        setting=replace(spec.setting, has_online=True, has_offline=True),
        online=WorkloadSpec(name="demo-chat", rate=10.0, num_requests=_WARM_UP_REQUESTS),
        offline=WorkloadSpec(name="demo-job", num_requests=_WARM_UP_REQUESTS),
        duration_s=_WARM_UP_S,
        seed=_WARM_UP_SEED + spec.seed,
        clairvoyant=True,
    )
    result = await measure_live(target, warm_up, *load_requests(warm_up))
    bad = next((r for r in result.records if not r.is_finished or not r.num_output_tokens), None)
    if bad is not None:
        reason = bad.finish_reason or f"no answer in {_WARM_UP_S:g} s"
        raise CoschedError(f"the server does not answer as it should: {reason}")


def leave_a_core_free() -> None:
    """Leave a core for tokenizer, detokenizer and client: with a compute thread on every core each
    barrier waits for one that cannot run, and a token took 100 times as long on two cores."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
