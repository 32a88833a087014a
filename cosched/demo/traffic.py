"""The demo's client: online requests at their times, offline ones as fast as they are answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Any

import httpx

from cosched.demo.records import OfflineRecord, OnlineRecord
from cosched.demo.workload import ChatRequest, OfflinePrompt
from cosched.jobs.client import Client
from cosched.jobs.lines import RequestLine
from cosched.jobs.records import Answer, Outcome

__all__ = ["OfflineJob", "OnlineTraffic", "Window"]

_CHAT_URL = "/v1/chat/completions"
_COMPLETIONS_URL = "/v1/completions"


class Window:
    """The time in which online traffic runs. Its clock reads seconds since it opens."""

    def __init__(self, *, opens_in_s: float) -> None:
        self._opens_at_s = time.monotonic() + opens_in_s

    def now_s(self) -> float:
        return time.monotonic() - self._opens_at_s

    async def until(self, when_s: float) -> None:
        await asyncio.sleep(max(0.0, when_s - self.now_s()))


class OnlineTraffic:
    """Sends chat requests, streaming, each at its time whatever became of the ones before."""

    def __init__(self, *, base_url: str, window: Window, model: str) -> None:
        self.records: list[OnlineRecord] = []
        self.num_sent = 0
        self._window = window
        self._model = model
        self._client = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # proxies are for the way out, not for the server beside us
        )

    async def __aenter__(self) -> OnlineTraffic:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def replay(self, trace: Iterable[ChatRequest], *, give_up_s: float) -> None:
        """Send every request of the trace; return when all are answered.

        What is not answered at `give_up_s` is given up and recorded as an error.
        """
        async with asyncio.TaskGroup() as sends:
            for request in trace:
                await self._window.until(request.arrival_s)
                sends.create_task(self._send(request, give_up_s=give_up_s))

    async def _send(self, request: ChatRequest, *, give_up_s: float) -> None:
        self.num_sent += 1
        sent_s = self._window.now_s()
        chunks_s: list[float] = []
        num_tokens = 0
        error = None
        try:
            async with asyncio.timeout(max(0.0, give_up_s - sent_s)):
                async for data in self._stream(request):
                    now_s = self._window.now_s()
                    if _has_text(data):
                        chunks_s.append(now_s)
                    if usage := data.get("usage"):
                        num_tokens = int(usage["completion_tokens"])
        except TimeoutError:
            error = "not answered when the run ended"
        except (httpx.HTTPError, _BadStreamError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        if error is None and (not chunks_s or num_tokens == 0):
            error = "an answer without text"
        self.records.append(
            OnlineRecord(
                arrival_s=request.arrival_s,
                sent_s=sent_s,
                chunks_s=tuple(chunks_s),
                num_output_tokens=num_tokens,
                error=error,
            )
        )

    async def _stream(self, request: ChatRequest) -> AsyncIterator[dict[str, Any]]:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._client.stream("POST", _CHAT_URL, json=body) as response:
            if not response.is_success:
                text = (await response.aread()).decode(errors="replace")
                raise _BadStreamError(f"HTTP {response.status_code}: {text[:200]}")
            async for line in response.aiter_lines():
                payload = line.removeprefix("data: ")
                if payload == line or payload == "[DONE]":
                    continue
                data = json.loads(payload)
                if "error" in data:
                    raise _BadStreamError(str(data["error"]))
                yield data


class OfflineJob:
    """Keeps some number of offline requests at the server until all are answered."""

    def __init__(
        self, *, client: Client, window: Window, prompts: Sequence[OfflinePrompt], model: str
    ) -> None:
        self.records: list[OfflineRecord] = []
        self._client = client
        self._window = window
        self._lines = enumerate(prompts, start=1)
        self._model = model

    async def run(self, *, concurrency: int) -> None:
        """Return when every prompt has its record. Cancelling it gives up what is in flight."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(self._work())

    async def _work(self) -> None:
        for number, prompt in self._lines:
            outcome = await self._client.send(self._line(number, prompt))
            self.records.append(_record(outcome, finished_s=self._window.now_s()))

    def _line(self, number: int, prompt: OfflinePrompt) -> RequestLine:
        body = {
            "model": self._model,
            "prompt": prompt.prompt,
            "max_tokens": prompt.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "service_tier": "flex",
        }
        return RequestLine(
            number=number,
            custom_id=f"offline-{number}",
            url=_COMPLETIONS_URL,
            body=json.dumps(body).encode(),
        )


def _record(outcome: Outcome, *, finished_s: float) -> OfflineRecord:
    if isinstance(outcome, Answer):
        return OfflineRecord(
            finished_s=finished_s,
            num_prompt_tokens=outcome.prompt_tokens,
            num_output_tokens=outcome.completion_tokens,
        )
    return OfflineRecord(
        finished_s=finished_s, num_prompt_tokens=0, num_output_tokens=0, error=outcome.message
    )


class _BadStreamError(Exception):
    """The server answered, but not with a whole stream."""


def _has_text(data: dict[str, Any]) -> bool:
    choices: list[dict[str, Any]] = data.get("choices") or []
    return any(choice.get("delta", {}).get("content") for choice in choices)
