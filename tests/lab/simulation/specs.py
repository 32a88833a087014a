"""Runs of a small machine, for the tests of the simulator."""

from __future__ import annotations

import json
from dataclasses import replace

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import RequestClass
from cosched.lab.metrics.records import record_line
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run_spec import CostSpec, RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of

SMALL = Machine(kv_tokens=20_000, chunk_tokens=512, max_running_requests=32)
ROOFLINE = CostSpec(name="roofline")


def make_spec(name, *, machine=None, **changes):
    """Four seconds of chat beside 60 offline requests; `machine`: changes of SMALL."""
    fields = {
        "setting": setting_of(name),
        "machine": replace(SMALL, **(machine or {})),
        "online": WorkloadSpec(name="alpaca", rate=8.0),
        "offline": WorkloadSpec(name="bros-offline", num_requests=60),
        "cost": ROOFLINE,
        "duration_s": 4.0,
    }
    return RunSpec(**{**fields, **changes})


def bytes_of(result):
    """All that a run says, without its host time."""
    lines = [record_line(record) for record in result.records]
    return json.dumps(result.to_dict(), sort_keys=True) + "".join(lines)


def of_class(result, request_class):
    return [r for r in result.records if r.request_class is request_class]


def online(result):
    return of_class(result, RequestClass.ONLINE)


def offline(result):
    return of_class(result, RequestClass.OFFLINE)


def requests_file(path, rows):
    """Requests of (prompt tokens, reply tokens), or with an arrival [s] before them."""
    columns = ["arrived_at", "num_prefill_tokens", "num_decode_tokens"][3 - len(rows[0]) :]
    lines = [",".join(map(str, row)) for row in [columns, *rows]]
    path.write_text("\n".join(lines) + "\n")
    return WorkloadSpec(name=str(path))


def lengths(path, num_output_tokens):
    """Offline requests of 400 tokens: their replies, and a last one that has 900 in any case."""
    return requests_file(path, [(i, 400, n) for i, n in enumerate([*num_output_tokens, 900])])
