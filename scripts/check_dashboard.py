#!/usr/bin/env python3
"""Each query of docs/grafana.json and each alert of docs/operate.md, asked of a real Prometheus.

    .venv/bin/python scripts/check_dashboard.py [--prometheus PROGRAM] [--seconds 90]

A server with the tiny demo model and the Batch API answers chats and a batch, and a Prometheus (of
Debian's package, for one) scrapes both of its places. Prints a table and, last, one JSON object;
ends with 1 when a query is refused, or finds nothing although the server has what it asks for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx

from cosched.batch.jsonl.server import free_port
from cosched.lab.demo_model import ensure_demo_model
from tests.batch.api import Api
from tests.batch.replicas import Chats
from tests.request_lines import completion
from tests.serving import ROOT, start_server

INTERVAL = "30s"
"""What Grafana would put for $__rate_interval at this rate of scraping, and somewhat more."""
KEY = "secret"
NEEDS_WORK = {
    "cosched:late_total": "no chat was late",
    "cosched:kv_missed_tokens_total": "nothing was evicted that somebody may come for",
    "cosched:beside_seconds_total": "no tolerance",
    "cosched:alone_seconds_total": "no tolerance",
    "cosched:beside_p99_seconds": "no tolerance",
    "cosched:alone_p99_seconds": "no tolerance",
    "cosched:tolerance_room_ratio": "no tolerance",
    "cosched:offline_max_running": "the operator has set no limit",
    "sglang:inter_token_latency_seconds_bucket": "no reply was streamed",
}
"""What is rightly without a value where nothing of it has happened."""
COLONS = {
    "source_labels": ["__name__"],
    "regex": "(sglang|cosched)_(.+)",
    "replacement": "$1:$2",
    "target_label": "__name__",
}
"""prometheus_client writes `sglang_...` for `sglang:...` where Prometheus asks for OpenMetrics
(prometheus/client_python#1177)."""


def queries() -> Iterator[tuple[str, str]]:
    """(Title, expression) of panels and alerts."""
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", INTERVAL)
    page = (ROOT / "docs" / "operate.md").read_text()
    table = page.split("## Alerts worth having", 1)[1].split("\n## ", 1)[0]
    for title, expression in re.findall(r"^\| ([^|]+) \| `(.+)` \|$", table, re.MULTILINE):
        yield f"alert: {title[:40]}", expression


@contextlib.contextmanager
def prometheus(program: str, url: str, folder: Path) -> Iterator[str]:
    """The address of one that scrapes the server at `url`."""
    target = url.removeprefix("http://")
    scrape = [
        {"job_name": "sglang", "static_configs": [{"targets": [target]}]},
        {
            "job_name": "cosched-batches",
            "metrics_path": "/cosched/metrics",
            "static_configs": [{"targets": [target]}],
        },
    ]
    more = {"authorization": {"credentials": KEY}, "metric_relabel_configs": [COLONS]}
    jobs = [{**job, **more} for job in scrape]
    every = {"scrape_interval": "5s", "scrape_timeout": "5s"}
    config = {"global": every, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_scraped(at: str, *, timeout_s: float = 300.0) -> None:
    """RuntimeError says why Prometheus cannot read a place of the server."""
    deadline_s = time.monotonic() + timeout_s
    wrong = "it does not answer"
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            targets = httpx.get(f"{at}/api/v1/targets", timeout=10).json()["data"]["activeTargets"]
            if len(targets) == 2 and all(target["health"] == "up" for target in targets):
                return
            wrong = str([(target["scrapeUrl"], target["lastError"]) for target in targets])
        time.sleep(1)
    raise RuntimeError(f"Prometheus: {wrong}")


def asked(at: str, expression: str, *, seconds: float) -> tuple[str | None, int, int]:
    """(What is wrong, series, values that are numbers)."""
    now_s = time.time()
    form: dict[str, Any] = {"query": expression, "start": now_s - seconds, "end": now_s, "step": 1}
    reply = httpx.post(f"{at}/api/v1/query_range", data=form, timeout=60).json()
    if reply["status"] != "success":
        return reply["error"], 0, 0
    found = reply["data"]["result"]
    values = [value for series in found for _, value in series["values"]]
    return None, len(found), sum(value not in ("NaN", "+Inf", "-Inf") for value in values)


def run(program: str, *, seconds: float) -> tuple[list[tuple[str, str, str]], dict[str, Any]]:
    """(Title, expression, what was found) of each query, and the sum of it."""
    rows, wrong, empty = [], 0, 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cosched-prom-")))
        model = ensure_demo_model(size="tiny", dtype="float32")
        flags = ("--cosched-policy", "cosched", "--cosched-batches", str(folder / "batches"))
        more = ("--enable-metrics", "--api-key", KEY)
        server = stack.enter_context(start_server(model, *flags, *more, ready_timeout_s=1200.0))
        at = stack.enter_context(prometheus(program, server.url, folder))
        wait_until_scraped(at)
        stack.enter_context(Chats(server.url, 2, key=KEY))
        api = Api(server.url, key=KEY)
        lines = [completion(str(n), prompt=f"line {n} of many", max_tokens=24) for n in range(3000)]
        api.create(lines)
        time.sleep(seconds)
        for title, expression in queries():
            error, num_series, num_values = asked(at, expression, seconds=seconds)
            is_alert = title.startswith("alert")
            names = re.findall(r"(?:cosched|sglang):\w+", expression)
            excused = next((NEEDS_WORK[name] for name in names if name in NEEDS_WORK), None)
            if error is not None:
                found = f"REFUSED: {error}"
                wrong += 1
            elif is_alert or num_values:
                found = f"{num_series} series, {num_values} values"
            elif excused is not None:
                found = f"nothing: {excused}"
            else:
                found = "NOTHING"
                empty += 1
            rows.append((title, expression, found))
        version = httpx.get(f"{at}/api/v1/status/buildinfo").json()["data"]["version"]
    told = {"queries": len(rows), "refused": wrong, "empty": empty, "prometheus": version}
    return rows, told


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), metavar="PROGRAM")
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    if options.prometheus is None:
        parser.error("no prometheus on PATH (apt-get install prometheus)")
    rows, told = run(options.prometheus, seconds=options.seconds)
    for title, expression, found in rows:
        print(f"{title:45} {found}\n    {expression}")
    print(json.dumps({"program": "check_dashboard", **told}))
    return 1 if told["refused"] or told["empty"] else 0


if __name__ == "__main__":
    sys.exit(main())
