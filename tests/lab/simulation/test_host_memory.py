"""Host memory in virtual time: contexts come back from it, and the way takes its time."""

import json
from dataclasses import replace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.lab.metrics.records import record_line
from cosched.lab.simulation.clock import VirtualClock
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, execute_requests
from cosched.lab.simulation.setting import setting_of
from cosched.lab.simulation.virtual_host import VirtualTransfers
from tests.traces.samples import request

SPEC = RunSpec(
    setting=setting_of("hygen"),
    machine=Machine(kv_tokens=5000, chunk_tokens=512, max_running_requests=32),
    cost=CostSpec(name="roofline"),
    duration_s=60.0,
)


def sessions():
    """Four contexts of 2,000 tokens, taken up in turn: the device holds two of them."""
    turns = []
    for session in range(4):
        for turn in range(3):
            turns.append(
                request(
                    f"{session}.{turn}",
                    0.5 + 2.0 * session,
                    ((session + 1, 2000 + 50 * turn),),
                    output=10,
                    session=f"s{session}",
                    after=f"{session}.{turn - 1}" if turn else None,
                    think_s=8.0,
                )
            )
    return turns


def run(spec):
    return execute_requests(spec, sessions(), [])


def with_host(**changes):
    return replace(SPEC, machine=replace(SPEC.machine, host_kv_tokens=20_000, **changes))


def hit_ratio(result):
    """Of the turns that continue something."""
    later = [r for r in result.records if not r.rid.endswith(".0")]
    assert len(later) == 8
    return sum(r.num_cached_tokens for r in later) / sum(r.num_prompt_tokens for r in later)


def test_contexts_come_back_and_two_runs_give_the_same_bytes():
    before, first, second = run(SPEC), run(with_host()), run(with_host())
    assert before.cosched["kv"]["host"] is None
    host = first.cosched["kv"]["host"]
    assert host["to_host"] > 0 and host["to_device"] > 0
    assert hit_ratio(before) < 0.6 < 0.9 < hit_ratio(first)

    def text(result):
        lines = [record_line(record) for record in result.records]
        return json.dumps(result.to_dict(), sort_keys=True) + "".join(lines)

    assert text(first) == text(second)
    assert '"host_bandwidth_gb_s": 20.0' in text(first)


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_the_engines_own_order_has_host_memory_too(write):
    spec = with_host(host_write_policy=write)
    result = run(replace(spec, config=(("kv", {"eviction": "lru"}),)))
    assert result.cosched["kv"] is None
    assert hit_ratio(result) > 0.9


def test_a_link_too_slow_is_not_used():
    result = run(with_host(host_bandwidth_gb_s=0.001))
    assert result.cosched["kv"]["host"]["to_host"] == 0


class Transfer:
    def __init__(self, num_tokens):
        self.device_indices = range(num_tokens)


class TestVirtualTransfers:
    def make(self, gpu_free_s=0.0):
        self.clock = VirtualClock()
        return VirtualTransfers(
            clock=self.clock, s_per_token=0.01, num_layers=10, gpu_free_s=lambda: gpu_free_s
        )

    def test_copies_of_one_direction_follow_each_other(self):
        transfers = self.make()
        first = transfers.submit_device_to_host([Transfer(100)])
        second = transfers.submit_device_to_host([Transfer(50)])
        back = transfers.submit_host_to_device([Transfer(20)])
        assert not first.finish_event.query()
        assert transfers.next_done_s() == pytest.approx(0.2)
        back.finish_event.synchronize()
        assert self.clock.now_s() == pytest.approx(0.2)
        second.finish_event.synchronize()
        assert self.clock.now_s() == pytest.approx(1.5)
        assert first.finish_event.query()
        assert transfers.next_done_s() is None

    def test_a_copy_waits_for_the_iteration_before_it(self):
        done = self.make(gpu_free_s=3.0).submit_device_to_host([Transfer(100)])
        done.finish_event.synchronize()
        assert self.clock.now_s() == pytest.approx(4.0)

    @pytest.mark.parametrize(
        ("compute_s", "expected_s"),
        [(5.0, 5.1), (0.5, 1.05), (0.0, 1.0)],  # the first layer's part, or the last layer
    )
    def test_layers_compute_while_others_are_loaded(self, compute_s, expected_s):
        transfers = self.make()
        transfers.submit_host_to_device([Transfer(100)])
        assert transfers.iteration_s(0.0, compute_s) == pytest.approx(expected_s)
        assert transfers.iteration_s(2.0, compute_s) == pytest.approx(compute_s)
