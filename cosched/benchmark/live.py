"""The same scenarios against a live server: stock SGLang, cosched, vLLM.

Prompts go as token ids through ``/v1/completions``, so a live run sees exactly the prompts, and the
sharing between them, that a simulated one sees. Every request streams; times are the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from cosched.core.request import RequestClass
from cosched.core.wire import OFFLINE_PRIORITY
from cosched.errors import ConfigError, CoschedError
from cosched.metrics.records import RequestRecord
from cosched.simulation.arrivals import Arrival, Source
from cosched.simulation.clients import ClosedLoopClient, online_client
from cosched_traces.workload import TraceRequest

__all__ = ["LiveTarget", "ServerError", "run_live", "with_misses"]

_CONNECT_S = 10.0


class ServerError(CoschedError):
    """The server is not there, or does not answer as an OpenAI-compatible one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTarget:
    """Where to send.

    vocab_size     prompts made from segments get token ids below it
    send_priority  also send ``priority`` (stock SGLang with priority scheduling, vLLM)
    """

    base_url: str
    model: str = "default"
    vocab_size: int = 2000
    send_priority: bool = True
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must begin with http:// or https://: {self.base_url!r}")


async def run_live(
    target: LiveTarget,
    *,
    online: Sequence[TraceRequest],
    offline: Sequence[TraceRequest],
    offline_concurrency: int,
    duration_s: float,
    on_progress: Callable[[float], None] = lambda now_s: None,
) -> list[RequestRecord]:
    """Online requests open-loop at their times, or in sessions whose next turn is sent when the
    answer before it, which it holds, has come and been thought about; offline ones with so many in
    flight, for `duration_s`. The clients are those of the simulation. What is unanswered then is
    cut off and its record left open.

    Times in the records are seconds since the run began.
    """
    run = _LiveRun(target, num_connections=offline_concurrency)
    async with contextlib.aclosing(run):
        await run.check()
        run.begin()
        clients: list[Source] = [
            online_client(online, vocab_size=target.vocab_size),
            ClosedLoopClient(
                offline, concurrency=offline_concurrency, vocab_size=target.vocab_size
            ),
        ]
        serving = asyncio.create_task(run.serve(clients))
        while run.now_s() < duration_s and not serving.done():
            on_progress(run.now_s())
            await asyncio.wait([serving], timeout=min(0.2, max(duration_s - run.now_s(), 0.0)))
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    return with_misses(run.records)


def with_misses(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """A server that reports cache hits leaves the field out where there was none (SGLang does):
    once one reply had it, a complete reply without it found nothing in the cache."""
    if all(record.num_cached_tokens is None for record in records):
        return list(records)
    return [
        replace(record, num_cached_tokens=0)
        if record.num_cached_tokens is None and record.is_finished
        else record
        for record in records
    ]


class _LiveRun:
    def __init__(self, target: LiveTarget, *, num_connections: int) -> None:
        self.records: list[RequestRecord] = []
        self._target = target
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self._client = httpx.AsyncClient(
            base_url=target.base_url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=num_connections),
            trust_env=False,  # proxies are for the way out, not for a server under test
        )
        self._began_s = 0.0
        self._num_open = 0
        self._something_ended = asyncio.Event()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """ServerError unless the server is there."""
        try:
            response = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ServerError(f"no server at {self._target.base_url}: {error}") from None
        if response.status_code != 200:
            raise ServerError(
                f"{self._target.base_url}/v1/models answers {response.status_code}, not 200"
            )

    def begin(self) -> None:
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def serve(self, clients: Sequence[Source]) -> None:
        """Send what the clients have due, until they have nothing more and all is answered."""
        async with asyncio.TaskGroup() as sends:
            while True:
                self._something_ended.clear()
                for client in clients:
                    for arrival in client.due(self.now_s()):
                        self._num_open += 1
                        sends.create_task(self._send(arrival, clients))
                times = [time_s for client in clients if (time_s := client.next_s()) is not None]
                if not times and not self._num_open:
                    return
                wait_s = max(min(times) - self.now_s(), 0.0) if times else None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._something_ended.wait(), wait_s)

    async def _send(self, arrival: Arrival, clients: Sequence[Source]) -> None:
        reply = _Reply()
        problem: str | None = None
        is_cut_off = False
        try:
            async for chunk in self._stream(arrival):
                reply.take(chunk, now_s=self.now_s())
        except asyncio.CancelledError:
            is_cut_off = True
            raise
        except (httpx.HTTPError, ServerError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            finish_s = None if is_cut_off else self.now_s()
            record = reply.record(arrival, finish_s, problem)
            self.records.append(record)
        for client in clients:
            client.on_finish(record, reply.output_ids)
        self._num_open -= 1
        self._something_ended.set()

    async def _stream(self, arrival: Arrival) -> AsyncIterator[dict[str, Any]]:
        body, headers = self._message(arrival)
        async with self._client.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise ServerError(f"HTTP {response.status_code}: {text[:200]}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(str(chunk["error"]))
                yield chunk

    def _message(self, arrival: Arrival) -> tuple[dict[str, Any], dict[str, str]]:
        body: dict[str, Any] = {
            "model": self._target.model,
            "prompt": list(arrival.input_ids),
            "max_tokens": arrival.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        headers = {}
        if arrival.request_class is RequestClass.OFFLINE:
            headers["x-smg-priority"] = "bulk"
            if self._target.send_priority:
                body["priority"] = OFFLINE_PRIORITY
        if arrival.slo.ttft_s is not None:
            headers["x-slo-ttft-ms"] = f"{arrival.slo.ttft_s * 1e3:g}"
        if arrival.slo.tpot_s is not None:
            headers["x-slo-tpot-ms"] = f"{arrival.slo.tpot_s * 1e3:g}"
        return body, headers


class _Reply:
    """What has come of one reply."""

    def __init__(self) -> None:
        self._times: array[float] = array("d")
        self._num_tokens = 0
        self._num_cached: int | None = None
        self._finish_reason: str | None = None
        self.output_ids: list[int] = []
        """As far as the server tells them: they are no part of the OpenAI protocol."""

    def take(self, chunk: dict[str, Any], *, now_s: float) -> None:
        for choice in chunk.get("choices") or []:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            self.output_ids += choice.get("token_ids") or ()
            if choice.get("text"):
                self._times.append(now_s)
        usage = chunk.get("usage")
        if usage:
            self._num_tokens = int(usage["completion_tokens"])
            details = usage.get("prompt_tokens_details") or {}
            self._num_cached = details.get("cached_tokens")

    def record(
        self, arrival: Arrival, finish_s: float | None, problem: str | None
    ) -> RequestRecord:
        num_tokens = max(self._num_tokens, len(self._times))
        is_ok = problem is None and self._finish_reason != "abort"
        return RequestRecord(
            rid=arrival.rid,
            request_class=arrival.request_class,
            arrival_s=arrival.arrival_s,
            num_prompt_tokens=len(arrival.input_ids),
            num_output_tokens=num_tokens if self._times else 0,
            first_token_s=self._times[0] if self._times else None,
            finish_s=finish_s,
            token_times=self._times,
            num_cached_tokens=self._num_cached,
            finish_reason=problem or self._finish_reason,
            ok=is_ok,
            slo=arrival.slo,
        )
