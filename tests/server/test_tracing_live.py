"""Spans of a real server, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.batch.api import Api, until
from tests.request_lines import chat
from tests.serving import start_server

OTLP_ENV = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "100",
}


def traces_to(url):
    """Flags of a server."""
    return ("--enable-trace", "--otlp-traces-endpoint", url)


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it is sent over OTLP/HTTP."""

    def __init__(self):
        self.spans = []
        super().__init__(("127.0.0.1", 0), _Receive)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        super().__exit__(*error)


class _Receive(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += [(scope.scope.name, span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def attributes_of(span):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.mark.server
@pytest.mark.long  # a server of its own; tests/batch/test_tracing.py has the spans
def test_the_spans_of_sglang_are_below_those_of_lines(tiny_model, forks, tmp_path):
    with Collector() as collector:
        flags = (*traces_to(collector.url), "--cosched-batches", str(tmp_path))
        with start_server(tiny_model, *flags, forks=forks, env=OTLP_ENV) as server:
            api = Api(server.url)
            batch = api.create([chat("a"), chat("b")], endpoint="/v1/chat/completions")
            assert api.wait(batch).status == "completed"

            def below(span):
                return [one for _, one in collector.spans if one.parent_span_id == span.span_id]

            def lines():
                found = [s for scope, s in collector.spans if scope == "cosched" and s.links]
                return found if all(map(below, found)) else []

            until(lambda: len(lines()) == 2 and any(s.name == "batch" for _, s in collector.spans))
            log = server.log()
    [created] = [span for _, span in collector.spans if span.name == "create batch"]
    [ended] = below(created)
    assert attributes_of(ended)["cosched.batch.completed"] == 2
    for span in lines():
        assert span.name.startswith("chat ")
        told = attributes_of(span)
        assert told["cosched.device_seconds"] > 0 and told["gen_ai.usage.input_tokens"] > 0
        assert span.links[0].span_id == created.span_id
        [request] = below(span)
        assert request.name.strip().startswith("Req ") and below(request)
        assert request.trace_id == span.trace_id
    assert "No matching with the SLICE_START" not in log
