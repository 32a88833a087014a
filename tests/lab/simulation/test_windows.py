"""Sliding windows in the virtual engine: SGLang's two pools under both classes."""

from dataclasses import replace

import pytest

from cosched.core.batch import BatchShape, Prefill
from cosched.engine import port
from cosched.lab.simulation.run import execute
from cosched.lab.simulation.windows import seen_through
from tests.simulated import busy_spec, watch_plans


def test_half_of_a_context_ends_after_the_window():
    shape = BatchShape(prefills=[Prefill(50, 1000)], decodes=[80, 300])
    seen = seen_through(shape, (100, 0.5))
    assert seen.prefills == [Prefill(50, 550)] and seen.decodes == [80, 200]
    assert seen_through(shape, (0, 0.0)) is shape


@pytest.mark.parametrize("policy", ["cosched", "hygen"])
def test_a_small_pool_of_windows_is_never_overdrawn(policy, monkeypatch):
    def look(_policy, view, *_):
        (windows,) = view.memories
        pool, reads = windows.pool, windows.reads
        most = pool.window + pool.slack
        reserves = [
            min(reads.output(r), max(most - port.num_own_in_window(r.req), 0)) for r in view.running
        ]
        assert [*map(reads.reserve_of, view.running)] == reserves
        assert pool.reserved == sum(reserves)

    watch_plans(monkeypatch, look)
    spec = busy_spec(policy, overlap=True)
    machine = replace(spec.machine, window_tokens=64, window_kv_tokens=3000)
    result = execute(replace(spec, machine=machine))
    state = result.cosched
    assert state["num_engine_refusals"] == state["num_safe_plans"] == 0
    assert state["num_plans"] > 100
