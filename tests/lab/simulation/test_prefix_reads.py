"""Questions on documents where a shared prefix is read once, in virtual time."""

from dataclasses import replace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.lab.simulation.setting import setting_of
from tests.small_runs import plans_asked_twice

SPEC = RunSpec(
    setting=setting_of("hygen"),
    machine=Machine(kv_tokens=300_000, max_running_requests=64),
    cost=CostSpec(name="roofline"),
    offline=WorkloadSpec(name="documents", num_requests=120),
    duration_s=12.0,
)


def run(way, **changes):
    return execute(replace(SPEC, cost=replace(SPEC.cost, prefix_reads=way), **changes))


@pytest.fixture(scope="module")
def runs():
    return {way: run(way) for way in ("each", "cached", "once")}


def test_more_is_served_the_less_is_read_again(runs):
    served = {way: result.summary.offline.tokens_per_s for way, result in runs.items()}
    assert served["each"] < served["cached"] < served["once"]


def test_predictions_follow_what_is_read(runs):
    """A predictor that took every context to be read would be far above."""
    errors = runs["once"].summary.iterations.prediction_error_ratio
    assert errors.p50 < 0.05


def test_a_policy_asked_twice_about_one_view_plans_the_same(monkeypatch):
    spec = replace(SPEC, cost=replace(SPEC.cost, prefix_reads="once"), duration_s=4.0)
    assert len(plans_asked_twice(spec, monkeypatch)) > 50
