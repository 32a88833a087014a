"""OpenTelemetry: spans of batches and of their lines, above the spans of the engine.

A line is a trace of its own, with a link to its batch. With SGLang's spans a line has about ten: as
one trace a batch of 50,000 would have half a million, which no backend shows. And samplers decide
by trace, so they keep a share of the lines instead of all or none.

A batch may outlive its server, so its trace has two spans: one for the request that creates it,
below the client's span, whose context the store keeps, and one when the batch has ended, from its
creation on. Names of attributes are those of the semantic conventions for generative AI.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    StatusCode,
    TracerProvider,
    get_current_span,
    get_tracer,
)
from opentelemetry.trace import set_span_in_context as context_of
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cosched.batch.batch_records import Batch, Status
from cosched.batch.jsonl.line_results import Failure, Outcome
from cosched.batch.jsonl.lines import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    RequestLine,
)

_W3C = TraceContextTextMapPropagator()
_PARENT = "traceparent"
_OPERATIONS = {
    CHAT: "chat",
    COMPLETIONS: "text_completion",
    EMBEDDINGS: "embeddings",
    MESSAGES: "chat",
    RESPONSES: "chat",
}
"""Url -> ``gen_ai.operation.name``; for others the last part of the url."""
_MAX_CHARS = 256
"""Of what clients choose."""

_USAGE = {
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
    "device_s": "cosched.device_seconds",
}
"""Field of a batch, or of the usage of a line -> attribute."""


class _Named(msgspec.Struct):
    model: Any = None


class Creation:
    """The span of a request that creates a batch."""

    def __init__(self, span: Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, context_of(span))
        self.traceparent = carrier.get(_PARENT)

    def made(self, batch: Batch) -> None:
        self._span.set_attributes(_of_batch(batch))
        self._span.end()


class BatchTracer:
    """Of one process.

    is_on     asked for each span
    provider  None: that of the process, which may be set later
    """

    def __init__(
        self, is_on: Callable[[], bool] = lambda: True, provider: TracerProvider | None = None
    ) -> None:
        self._tracer = get_tracer("cosched", tracer_provider=provider)
        self._is_on = is_on

    def creation(self, headers: Mapping[str, str]) -> Creation | None:
        """headers: of the request, by lower-case name; they may name the client's span."""
        if not self._is_on():
            return None
        parent = _W3C.extract(headers, Context())
        return Creation(self._tracer.start_span("create batch", parent, kind=SpanKind.PRODUCER))

    def ended(self, batch: Batch) -> None:
        """For any thread."""
        if batch.traceparent is None or not self._is_on():
            return
        start = batch.created_at * 1_000_000_000
        parent = _W3C.extract({_PARENT: batch.traceparent}, Context())
        attributes = {
            **_of_batch(batch),
            "cosched.batch.status": batch.status.value,
            "cosched.batch.completed": batch.completed,
            "cosched.batch.failed": batch.failed,
            **{name: getattr(batch, field) for field, name in _USAGE.items()},
        }
        span = self._tracer.start_span("batch", parent, start_time=start, attributes=attributes)
        if batch.status is not Status.COMPLETED:
            span.set_status(StatusCode.ERROR, batch.status.value)
        span.end()

    async def traced(
        self, batch: Batch, line: RequestLine, send: Callable[..., Awaitable[Outcome]]
    ) -> Outcome:
        """`send` within the span of a line. It is called with `headers` that name the span, and
        with `on_retry`, which it calls with the reason of each further attempt."""
        if not self._is_on():
            return await send()
        span = self._span_of(batch, line)
        num_attempts = 1

        def retried(reason: str) -> None:
            nonlocal num_attempts
            num_attempts += 1
            span.add_event("retry", {"reason": reason[:_MAX_CHARS]})

        headers: dict[str, str] = {}
        _W3C.inject(headers, context_of(span))
        try:
            outcome = await send(headers=headers, on_retry=retried)
            _note(span, outcome)
            return outcome
        except BaseException as error:  # cancelled: the batch or the server ends
            _fail(span, type(error).__qualname__)
            raise
        finally:
            span.set_attribute("cosched.attempts", num_attempts)
            span.end()

    def _span_of(self, batch: Batch, line: RequestLine) -> Span:
        named = msgspec.json.decode(line.body, type=_Named).model
        model = named[:_MAX_CHARS] if isinstance(named, str) else batch.model
        operation = _OPERATIONS.get(line.url, line.url.rpartition("/")[2])
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "sglang",
            "gen_ai.request.model": model or "",
            "cosched.batch.id": batch.id,
            "cosched.tenant": batch.tenant[:_MAX_CHARS],
            "cosched.line": line.number,
            "cosched.custom_id": line.custom_id[:_MAX_CHARS],
        }
        links = []
        if batch.traceparent is not None:
            made = _W3C.extract({_PARENT: batch.traceparent}, Context())
            links.append(Link(get_current_span(made).get_span_context()))
        name = f"{operation} {model or ''}".rstrip()
        return self._tracer.start_span(name, Context(), attributes=attributes, links=links)


def _of_batch(batch: Batch) -> dict[str, Any]:
    return {
        "gen_ai.request.model": batch.model or "",
        "cosched.batch.id": batch.id,
        "cosched.batch.endpoint": batch.endpoint,
        "cosched.tenant": batch.tenant[:_MAX_CHARS],
    }


def _note(span: Span, outcome: Outcome) -> None:
    if outcome.status is not None:
        span.set_attribute("http.response.status_code", outcome.status)
    if isinstance(outcome, Failure):
        _fail(span, outcome.code, outcome.message)
        return
    usage = outcome.usage()
    span.set_attributes({name: usage[field] for field, name in _USAGE.items() if usage[field]})


def _fail(span: Span, code: str, message: str | None = None) -> None:
    span.set_attribute("error.type", code)
    span.set_status(StatusCode.ERROR, (message or code)[:_MAX_CHARS])
