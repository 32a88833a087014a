"""The cost of a line in the best batch of its job alone."""

import pytest

from cosched.core.request import RequestClass
from cosched.simulation.work import CHUNK_TOKENS, line_costs
from cosched_traces.workload import Segment, TraceRequest

OFFLINE = RequestClass.OFFLINE


class PerToken:
    """A millisecond for each prompt token, and for a batch of decodes 10 ms and one for each."""

    def iteration_s(self, batch):
        prompts = sum(p.num_new for p in batch.prefills)
        return 1e-3 * prompts + (0.01 + 1e-3 * len(batch.decodes) if batch.decodes else 0.0)


def line(number, *segments, num_output=100):
    return TraceRequest(
        rid=f"r{number}",
        request_class=OFFLINE,
        arrival_s=0.0,
        num_output_tokens=num_output,
        segments=tuple(Segment(*each) for each in segments),
    )


def costs_of(lines, **limits):
    return line_costs(lines, PerToken(), **{"kv_tokens": 10**6, "max_running": 64, **limits})


def test_shared_tokens_are_computed_once_by_all_together():
    lines = [line(i, (7, 4000), (100 + i, 200)) for i in range(8)]
    costs = costs_of(lines)
    assert sum(c.prompt_s for c in costs.values()) == pytest.approx(4.0 + 8 * 0.2)
    assert costs["r0"].prompt_s == pytest.approx(0.7)


def test_a_prompt_of_several_chunks_costs_all_of_them():
    (cost,) = costs_of([line(0, (1, 2 * CHUNK_TOKENS + 500))]).values()
    assert cost.prompt_s == pytest.approx(1e-3 * (2 * CHUNK_TOKENS + 500))


def test_a_decode_is_shared_by_as_many_as_memory_and_slots_hold():
    lines = [line(i, (i, 950)) for i in range(4)]  # mean context: 1,000 tokens
    assert costs_of(lines)["r0"].token_s == pytest.approx((0.01 + 0.064) / 64)
    assert costs_of(lines, kv_tokens=8000)["r0"].token_s == pytest.approx((0.01 + 0.008) / 8)
    assert costs_of(lines, kv_tokens=10)["r0"].token_s == pytest.approx(0.011)


def test_the_first_token_comes_with_the_prompt():
    (cost,) = costs_of([line(0, (1, 500), num_output=1)]).values()
    assert cost.total_s(1) == cost.prompt_s
