"""What traces cost: CPU time per line of a batch with spans and without, in turn.

    python -m tests.server.trace_cost [--lines 1000] [--rounds 3] [--stand-in]

A server with the tiny model sends its spans to a collector in this process; SGLang's route
``/set_trace_level`` turns all spans off and on between the batches. ``--stand-in``: no engine, so
cosched's own spans alone. Prints a JSON line per batch, and at last one with the medians [ms].
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import uvicorn
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from cosched.batch.config import BatchesConfig
from cosched.batch.jsonl.server import free_port
from cosched.batch.tracing import BatchTracer
from cosched.lab.demo_model import ensure_demo_model
from tests.batch.api import Api, until
from tests.batch.stand_in import StandIn
from tests.request_lines import completion
from tests.server.test_tracing_live import OTLP_ENV, Collector, traces_to
from tests.serving import start_server

LEVEL = 3  # SGLang's default
POLL_S = 0.5


@contextlib.contextmanager
def real_server(folder, collector_url):
    """Its URL, the id of its first process, and what turns spans on and off."""
    flags = (*traces_to(collector_url), "--cosched-batches", str(folder))
    model = ensure_demo_model(size="tiny", dtype="float32")
    with start_server(model, *flags, env=OTLP_ENV) as server:

        def switch(is_on):
            params = {"level": LEVEL if is_on else 0}
            httpx.get(f"{server.url}/set_trace_level", params=params).raise_for_status()

        yield server.url, server.process.pid, switch


@contextlib.contextmanager
def stand_in_server(folder, collector_url):
    """As `real_server`."""
    fork = multiprocessing.get_context("fork")
    is_on, port = fork.Value("b", True), free_port()

    def serve():
        provider = TracerProvider()
        exporter = OTLPSpanExporter(endpoint=collector_url)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=100))
        tracer = BatchTracer(lambda: bool(is_on.value), provider)
        app = StandIn(BatchesConfig(folder=str(folder)), tracer=tracer).app
        uvicorn.run(app, port=port, log_level="error")

    def switch(now):
        is_on.value = now

    process = fork.Process(target=serve)
    process.start()
    url = f"http://127.0.0.1:{port}"

    def is_ready():
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").is_success

    try:
        until(is_ready)
        yield url, process.pid, switch
    finally:
        process.kill()
        process.join()


def cpu_s(pid):
    """Process -> CPU time so far [s]."""
    root, found = psutil.Process(pid), Counter()
    for process in [root, *root.children(recursive=True)]:
        words = " ".join(process.cmdline())
        name = next((one for one in ("scheduler", "detokenizer") if one in words), "http")
        found[name] += sum(process.cpu_times()[:2])
    return found


def measure(api, pid, lines):
    """Process -> CPU time per line [ms], the export of the spans included."""
    before = cpu_s(pid)
    batch = api.create(lines)
    while (now := api.batches.retrieve(batch.id)).status != "completed":
        assert now.status in ("validating", "in_progress", "finalizing"), now
        time.sleep(POLL_S)
    time.sleep(1.0)
    used = cpu_s(pid)
    return {name: round(1e3 * (used[name] - before[name]) / len(lines), 3) for name in used}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stand-in", action="store_true", help="no engine")
    args = parser.parse_args()
    lines = [completion(f"c{n}", max_tokens=4) for n in range(args.lines)]
    of_kind = {True: [], False: []}
    started = stand_in_server if args.stand_in else real_server
    with (
        tempfile.TemporaryDirectory() as folder,
        Collector() as collector,
        started(Path(folder, "batches"), collector.url) as (url, pid, switch),
    ):
        api = Api(url)
        measure(api, pid, lines)  # what the first batch alone does
        for _ in range(args.rounds):
            for is_on in of_kind:
                switch(is_on)
                num_before = len(collector.spans)
                used = measure(api, pid, lines)
                num_spans = (len(collector.spans) - num_before) / args.lines
                of_kind[is_on].append(used)
                print(json.dumps({"traced": is_on, "ms": used, "spans": round(num_spans, 2)}))
    medians = {
        "with" if is_on else "without": {
            name: statistics.median(one[name] for one in seen) for name in seen[0]
        }
        for is_on, seen in of_kind.items()
    }
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
