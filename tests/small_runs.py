"""Short simulated runs in which much happens, and their plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.plan import Plan
from cosched.core.request import Slo
from cosched.core.view import View
from cosched.engine.guard import Guard
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import execute
from cosched.lab.simulation.run_spec import CostSpec, RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import Setting

SMALL = Machine(kv_tokens=12_000, chunk_tokens=512, max_running_requests=24)


def spec_of(policy: str, *, overlap: bool) -> RunSpec:
    """Chat and documents on a small machine: requests wait, are paused and preempted."""
    return RunSpec(
        setting=Setting(name=policy, summary="", policy=policy, has_online=True, has_offline=True),
        machine=replace(SMALL, overlap=overlap),
        online=WorkloadSpec(name="alpaca", rate=18.0),
        offline=WorkloadSpec(name="bros-offline", num_requests=60),
        cost=CostSpec(name="roofline"),
        slo=Slo(ttft_s=1.0, tpot_s=0.02),
        duration_s=5.0,
    )


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
