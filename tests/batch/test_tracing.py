"""Spans of batches and lines, by OpenTelemetry's SDK and its exporter to memory."""

from __future__ import annotations

from collections import defaultdict

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_trace_id

from cosched.batch.config import BatchesConfig
from cosched.batch.tracing import BatchTracer
from tests.batch.api import Api, line, serving, until
from tests.batch.stand_in import StandIn

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """A server whose spans are kept."""

    def __init__(self, folder):
        self.is_on = True
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        tracer = BatchTracer(lambda: self.is_on, provider)
        self.stand_in = StandIn(BatchesConfig(folder=str(folder)), tracer=tracer)

    def spans(self, number):
        """By name, once there are so many."""
        until(lambda: len(self.exporter.get_finished_spans()) >= number)
        found = defaultdict(list)
        for span in self.exporter.get_finished_spans():
            found[span.name].append(span)
        assert sum(map(len, found.values())) == number
        return found


@pytest.fixture
def traced(folder):
    return Traced(folder)


def test_a_line_is_a_trace_with_a_link_to_its_batch(traced):
    traced.stand_in.usage = {**traced.stand_in.usage, "device_seconds": 0.25}
    with serving(traced.stand_in) as url:
        api = Api(url)
        batch = api.create(
            [line("busy"), line("refuse")],
            metadata={"tenant": "t"},
            extra_headers={"traceparent": CLIENT},
        )
        api.wait(batch)
        spans = traced.spans(4)
    [created], [ended] = spans["create batch"], spans["batch"]
    assert f"{created.parent.span_id:016x}" in CLIENT
    assert format_trace_id(created.context.trace_id) in CLIENT
    assert (ended.context.trace_id, ended.parent.span_id) == (
        created.context.trace_id,
        created.context.span_id,
    )
    told = {"cosched.batch.completed": 1, "cosched.batch.failed": 1, "cosched.tenant": "t"}
    told |= {"gen_ai.usage.input_tokens": 3, "cosched.device_seconds": 0.25}
    told |= {"cosched.batch.status": "completed", "cosched.batch.id": batch.id}
    assert told.items() <= ended.attributes.items() and ended.status.is_ok
    found = {span.attributes["cosched.custom_id"]: span for span in spans["text_completion"]}
    assert found.keys() == {"busy", "refuse"}
    for prompt, span in found.items():
        assert span.parent is None
        [link] = span.links
        assert link.context.span_id == created.context.span_id
        assert span.context.trace_id != created.context.trace_id
        # The engine's spans are below it.
        context = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-"
        assert traced.stand_in.traceparents[prompt].startswith(context)
    answered = {"gen_ai.usage.output_tokens": 2, "cosched.device_seconds": 0.25}
    answered |= {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "sglang"}
    answered |= {"http.response.status_code": 200, "cosched.attempts": 2, "cosched.line": 1}
    assert answered.items() <= found["busy"].attributes.items()
    assert [event.name for event in found["busy"].events] == ["retry"]
    refused = {"http.response.status_code": 400, "error.type": "http_400", "cosched.attempts": 1}
    assert refused.items() <= found["refuse"].attributes.items()
    assert found["refuse"].status.status_code is StatusCode.ERROR


def test_the_lines_under_way_of_a_cancelled_batch(traced):
    traced.stand_in.is_held = True
    with serving(traced.stand_in) as url:
        api = Api(url)
        batch = api.create([line("a")])
        until(lambda: traced.stand_in.asked["a"])
        api.batches.cancel(batch.id)
        api.wait(batch)
        spans = traced.spans(3)
    assert spans["batch"][0].attributes["cosched.batch.status"] == "cancelled"
    [span] = spans["text_completion"]
    assert span.attributes["error.type"] == "CancelledError"


def test_an_input_file_with_faults_ends_its_batch_with_a_span(traced):
    with serving(traced.stand_in) as url:
        api = Api(url)
        api.wait(api.create(["{}"]))
        [span] = traced.spans(2)["batch"]
    assert span.attributes["cosched.batch.status"] == "failed" and not span.status.is_ok


def test_nothing_is_made_or_sent_while_tracing_is_off(traced):
    traced.is_on = False
    with serving(traced.stand_in) as url:
        api = Api(url)
        api.wait(api.create([line("a")], extra_headers={"traceparent": CLIENT}))
    assert not traced.exporter.get_finished_spans()
    assert traced.stand_in.traceparents == {"a": None}
