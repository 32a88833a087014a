"""The workloads of the simulation against a live server: stock SGLang or cosched.

Prompts are sent as token ids to ``/v1/completions``, so that prompts and shared prefixes are those
of a simulated run. Every request streams; times are the client's.

The server must not know the length of a reply: the client asks for the limit of the request with
``ignore_eos`` and stops the reply after the tokens of the trace (SGLang's ``/abort_request``, else
by closing the connection)."""

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
from cosched.errors import ConfigError, CoschedError
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.metrics.summary import Summary
from cosched.lab.simulation.arrivals import Arrival, Source
from cosched.lab.simulation.clients import online_client
from cosched.lab.simulation.requests import offline_client
from cosched.lab.simulation.run import summarize_run
from cosched.lab.simulation.run_spec import RunSpec
from cosched.wire import OFFLINE_PRIORITY
from cosched_traces.workload import TraceRequest

VOCAB_SIZE = 2000
"""Every model has token ids below it."""

_CONNECT_S = 10.0
_KEPT = 256
"""Connections that stay open between requests."""
_SHOW_EVERY_S = 0.25
_LATE_SHARE = 0.5


class ServerError(CoschedError):
    """The server is unreachable, or not OpenAI-compatible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTarget:
    """A server.

    vocab_size     prompts made from segments get token ids below it
    admin_api_key  of the operator
    """

    base_url: str
    vocab_size: int = VOCAB_SIZE
    api_key: str | None = None
    admin_api_key: str | None = None

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must begin with http:// or https://: {self.base_url!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgress:
    """Progress of a run. `now_s` is negative before the measured window."""

    now_s: float
    num_online_sent: int
    num_online_open: int
    num_offline_ended: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveResult:
    """Results of a client in ``[0, spec.duration_s)``."""

    spec: RunSpec
    summary: Summary
    records: Sequence[RequestRecord]

    @property
    def max_client_delay_s(self) -> float:
        """Maximum delay between arrival and sending of an online request [s]."""
        online = (r for r in self.records if r.request_class is RequestClass.ONLINE)
        return max((r.sent_s - r.arrival_s for r in online if r.sent_s is not None), default=0.0)

    @property
    def is_client_late(self) -> bool:
        """True if this client was ever late by more than half of the TTFT target, so that the
        results are not the server's."""
        ttft_s = self.spec.slo.ttft_s
        return ttft_s is not None and self.max_client_delay_s > _LATE_SHARE * ttft_s

    def notes(self) -> list[str]:
        """Remarks for the reader of the table."""
        name, online, lines = self.spec.setting.name, self.summary.online, []
        if self.is_client_late:
            lines.append(
                f"{name}: not to be trusted: this client itself sent requests up to "
                f"{self.max_client_delay_s:.1f} s late, as the machine was too busy; run it again "
                "when nothing else runs, or with a lower rate"
            )
        if missing := online.num_failed + online.num_unfinished:
            reason = self._first_error(RequestClass.ONLINE) or "not answered when the run ended"
            lines.append(
                f"{name}: {missing} of {online.num_requests} online requests have no whole answer; "
                f"the first: {reason}"
            )
        if num_failed := self.summary.offline.num_failed:
            lines.append(
                f"{name}: {num_failed} offline requests failed; the first: "
                f"{self._first_error(RequestClass.OFFLINE)}"
            )
        return lines

    def _first_error(self, request_class: RequestClass) -> str | None:
        failed = (r for r in self.records if r.request_class is request_class and not r.ok)
        return next((r.finish_reason for r in failed), None)


async def measure_live(
    target: LiveTarget,
    spec: RunSpec,
    online: Sequence[TraceRequest],
    offline: Sequence[TraceRequest],
    *,
    lead_s: float = 0.0,
    grace_s: float = 0.0,
    on_progress: Callable[[LiveProgress], None] = lambda progress: None,
) -> LiveResult:
    """Run the clients of the simulation against a server."""
    sources: list[Source] = [online_client(online, vocab_size=target.vocab_size)]
    if offline:
        sources.append(offline_client(spec, offline, vocab_size=target.vocab_size))
    records = await run_live(
        target,
        sources,
        duration_s=spec.end_s,
        lead_s=lead_s,
        grace_s=grace_s,
        on_progress=on_progress,
    )
    summary = summarize_run(spec, records, None, end_s=spec.end_s)
    return LiveResult(spec=spec, summary=summary, records=records)


async def run_live(
    target: LiveTarget,
    sources: Sequence[Source],
    *,
    duration_s: float,
    lead_s: float = 0.0,
    grace_s: float = 0.0,
    on_progress: Callable[[LiveProgress], None] = lambda progress: None,
) -> list[RequestRecord]:
    """Send the requests of the sources for `duration_s`, or until all are answered; then wait up to
    `grace_s` for the online requests of that time. The records of unanswered requests stay open.

    Times in the records count from `lead_s` after the start, so that offline work can fill the
    server before."""
    run = _LiveRun(target)
    async with contextlib.aclosing(run):
        await run.check()
        run.begin(lead_s)
        showing = asyncio.create_task(run.show_often(on_progress))
        try:
            await run.serve(sources, duration_s=duration_s, grace_s=grace_s)
        finally:
            showing.cancel()
    return with_misses(run.records)


def with_misses(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """SGLang reports cached tokens only if there are some: if one reply has them, complete replies
    without them had none."""
    if all(record.num_cached_tokens is None for record in records):
        return list(records)
    return [
        replace(record, num_cached_tokens=0)
        if record.num_cached_tokens is None and record.is_finished
        else record
        for record in records
    ]


class _LiveRun:
    def __init__(self, target: LiveTarget) -> None:
        self.records: list[RequestRecord] = []
        self._target = target
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self._client = httpx.AsyncClient(
            base_url=target.base_url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT),
            trust_env=False,  # proxies are for the way out, not for a server under test
        )
        self._began_s = 0.0
        self._num_sent = dict.fromkeys(RequestClass, 0)
        self._num_open = dict.fromkeys(RequestClass, 0)
        self._something_ended = asyncio.Event()

    async def aclose(self) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """ServerError unless the server answers."""
        try:
            response = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ServerError(f"no server at {self._target.base_url}: {error}") from None
        if response.status_code != 200:
            raise ServerError(
                f"{self._target.base_url}/v1/models answers {response.status_code}, not 200"
            )

    def begin(self, lead_s: float) -> None:
        self._began_s = time.monotonic() + lead_s

    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def show_often(self, on_progress: Callable[[LiveProgress], None]) -> None:
        online, offline = RequestClass.ONLINE, RequestClass.OFFLINE
        while True:
            on_progress(
                LiveProgress(
                    now_s=self.now_s(),
                    num_online_sent=self._num_sent[online],
                    num_online_open=self._num_open[online],
                    num_offline_ended=self._num_sent[offline] - self._num_open[offline],
                )
            )
            await asyncio.sleep(_SHOW_EVERY_S)

    async def serve(self, sources: Sequence[Source], *, duration_s: float, grace_s: float) -> None:
        online = RequestClass.ONLINE
        sent: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as sends:
            while True:
                self._something_ended.clear()
                now_s = self.now_s()
                for source in sources:
                    for arrival in source.due(now_s):
                        if arrival.request_class is online and arrival.arrival_s >= duration_s:
                            continue
                        self._num_sent[arrival.request_class] += 1
                        self._num_open[arrival.request_class] += 1
                        task = sends.create_task(self._send(arrival, sources))
                        sent.add(task)
                        task.add_done_callback(sent.discard)
                # After sending: requests that arrived in time count even if this client was late.
                is_closed = now_s >= duration_s
                if is_closed and (now_s >= duration_s + grace_s or not self._num_open[online]):
                    break
                times = [time_s for source in sources if (time_s := source.next_s()) is not None]
                if not times and not any(self._num_open.values()):
                    break
                next_s = min([*times, duration_s + grace_s if is_closed else duration_s])
                with contextlib.suppress(TimeoutError):
                    wait_s = max(next_s - self.now_s(), 0.0)
                    await asyncio.wait_for(self._something_ended.wait(), wait_s)
            await asyncio.sleep(0)  # a task that has not started would leave no record
            for task in sent:
                task.cancel()

    async def _send(self, arrival: Arrival, sources: Sequence[Source]) -> None:
        reply = _Reply(arrival.num_output_tokens, sent_s=self.now_s())
        problem: str | None = None
        is_cut_off = False
        try:
            async for chunk in self._stream(arrival):
                reply.take(chunk, now_s=self.now_s())
                if reply.is_to_stop and not await self._stop(chunk):
                    break
        except asyncio.CancelledError:
            is_cut_off = True
            raise
        except (httpx.HTTPError, ServerError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            finish_s = None if is_cut_off else self.now_s()
            record = reply.record(arrival, finish_s, problem)
            self.records.append(record)
        for source in sources:
            source.on_finish(record, reply.output_ids)
        self._num_open[arrival.request_class] -= 1
        self._something_ended.set()

    async def _stop(self, chunk: dict[str, Any]) -> bool:
        """Stop a reply. False if the server has no such endpoint."""
        response = await self._client.post("/abort_request", json={"rid": chunk["id"]})
        return response.status_code == 200

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
            "model": "default",  # any name: SGLang has one model
            "prompt": list(arrival.input_ids),
            "max_tokens": arrival.max_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }
        headers = {}
        if arrival.request_class is RequestClass.OFFLINE:
            headers["x-smg-priority"] = "bulk"
            body["priority"] = OFFLINE_PRIORITY
        elif arrival.priority:
            body["priority"] = arrival.priority
        if arrival.slo.ttft_s is not None:
            headers["x-slo-ttft-ms"] = f"{arrival.slo.ttft_s * 1e3:g}"
        if arrival.slo.tpot_s is not None:
            headers["x-slo-tpot-ms"] = f"{arrival.slo.tpot_s * 1e3:g}"
        return body, headers


class _Reply:
    """One reply so far. It is complete after `num_wanted` tokens; later tokens do not count."""

    def __init__(self, num_wanted: int, *, sent_s: float) -> None:
        self._num_wanted = num_wanted
        self._sent_s = sent_s
        self._times: array[float] = array("d")
        self._num_tokens = 0
        self._num_cached: int | None = None
        self._finish_reason: str | None = None
        self._whole_s: float | None = None
        self.output_ids: list[int] = []
        """If the server sends them: they are not part of the OpenAI protocol."""
        self.is_to_stop = False
        """It is complete, and the server must be stopped."""

    def take(self, chunk: dict[str, Any], *, now_s: float) -> None:
        usage = chunk.get("usage") or {}
        if usage:
            self._num_tokens = min(int(usage["completion_tokens"]), self._num_wanted)
            details = usage.get("prompt_tokens_details") or {}
            self._num_cached = details.get("cached_tokens", self._num_cached)
        self.is_to_stop = False
        if self._whole_s is not None:
            return
        for choice in chunk.get("choices") or []:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            self.output_ids += choice.get("token_ids") or ()
            if choice.get("text"):
                self._times.append(now_s)
        if max(self._num_tokens, len(self._times)) >= self._num_wanted:
            self._whole_s = now_s
            del self.output_ids[self._num_wanted :]
            self.is_to_stop = self._finish_reason is None
            self._finish_reason = self._finish_reason or "stop"

    def record(
        self, arrival: Arrival, finish_s: float | None, problem: str | None
    ) -> RequestRecord:
        num_tokens = max(self._num_tokens, len(self._times))
        if self._whole_s is not None:
            finish_s = self._whole_s
        is_ok = problem is None and self._finish_reason != "abort"
        return RequestRecord(
            rid=arrival.rid,
            request_class=arrival.request_class,
            arrival_s=arrival.arrival_s,
            sent_s=self._sent_s,
            num_prompt_tokens=len(arrival.input_ids),
            num_output_tokens=num_tokens if self._times else 0,
            first_token_s=self._times[0] if self._times else None,
            finish_s=finish_s,
            token_times=self._times,
            num_cached_tokens=self._num_cached,
            finish_reason=problem or self._finish_reason,
            ok=is_ok,
            slo=arrival.slo,
            priority=arrival.priority,
        )
