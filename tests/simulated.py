"""Simulated runs, for all tests: specifications of small ones, where they run, and their plans."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import ENV_VAR
from cosched.core.plan import Plan
from cosched.core.request import RequestClass, Slo
from cosched.core.view import View
from cosched.engine.guard import Guard
from cosched.lab.metrics.records import record_line
from cosched.lab.simulation import parallel
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import execute
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


def busy_spec(policy, *, overlap):
    """Chat and documents on a machine so small that requests wait, are paused and preempted."""
    return make_spec(
        policy,
        machine={"kv_tokens": 12_000, "max_running_requests": 24, "overlap": overlap},
        online=WorkloadSpec(name="alpaca", rate=18.0),
        slo=Slo(ttft_s=1.0, tpot_s=0.02),
        duration_s=5.0,
    )


def stay_in_process(monkeypatch):
    """Simulations run one after the other in this process. Returns the list of what really ran:
    results that a store had are not in it."""
    ran = []

    def in_processes(specs, *, num_jobs):
        for index, spec in enumerate(specs):
            ran.append(spec)
            yield index, parallel.execute_replicas(spec)

    monkeypatch.setattr(parallel, "in_processes", in_processes)
    monkeypatch.setenv(ENV_VAR, "")  # a run sets it
    return ran


def fork_here(monkeypatch):
    """Simulations run in forks of this process, which has imported SGLang already: a fork server
    would import it again."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(parallel.multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setenv(ENV_VAR, "")


def watch_plans(monkeypatch: Any, look: Callable[[Any, View, Any, tuple[Plan, Any]], None]) -> None:
    """Call `look(policy, view, carry, what was planned)` after each plan."""
    plan_of = Guard.plan

    def plan(guard, policy, name, view, carry):
        made = plan_of(guard, policy, name, view, carry)
        look(policy, view, carry, made)
        return made

    monkeypatch.setattr(Guard, "plan", plan)


def plans_asked_twice(spec: RunSpec, monkeypatch: Any) -> list[Plan]:
    """The plans of a run. Each must be the same when the policy is asked again."""
    plans = []

    def ask_again(policy, view, carry, made):
        again = policy.plan(view, carry)
        assert again == made and list(again[0].prefill) == list(made[0].prefill)
        plans.append(made[0])

    watch_plans(monkeypatch, ask_again)
    execute(spec)
    return plans


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
