"""Questions on documents where a shared prefix is read once, in virtual time."""

from dataclasses import replace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.decision_log.read import read_log
from cosched.decision_log.replan import replan
from cosched.simulation.machine import Machine
from cosched.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.simulation.scenario import scenario

SPEC = RunSpec(
    scenario=scenario("hygen"),
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


def test_recorded_plans_are_made_again(tmp_path):
    spec = replace(SPEC, cost=replace(SPEC.cost, prefix_reads="once"), duration_s=4.0)
    execute(spec, decision_log=tmp_path / "log")
    replanned = replan(read_log(tmp_path / "log", report=pytest.fail))
    assert replanned.num_equal == replanned.num_plans > 50
