"""Fresh servers to measure: nothing in the cache or the predictor of one comes from an earlier
one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cosched.batch.jsonl.server import serving
from cosched.config import configured
from cosched.errors import CoschedError
from cosched.lab.benchmark.live import LiveTarget, measure_live
from cosched.lab.simulation.requests import load_requests
from cosched.lab.simulation.run import config_of
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec

_WARM_UP_REQUESTS = 8  # of each class
_WARM_UP_SEED = 1_000_000  # no prompt of the warm-up is measured
_WARM_UP_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServers:
    """How servers are started; policy and configuration are those of a run.

    flags  of SGLang and of `cosched serve`
    """

    model_path: str
    flags: Sequence[str] = ()

    @contextlib.asynccontextmanager
    async def started(self, spec: RunSpec, *, log_path: Path) -> AsyncIterator[LiveTarget]:
        """A server for the block, warmed up. Its output goes to `log_path`. CoschedError if it does
        not start, does not answer, or dies."""
        config = msgspec.structs.replace(config_of(spec), strict=False)
        flags = [*self.flags, "--cosched-policy", config.policy]
        with configured(config):
            server = serving(model_path=self.model_path, flags=flags, log_path=log_path)
            async with server as base_url:
                target = LiveTarget(base_url=base_url)
                await _warm_up(target, spec)
                yield target


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
