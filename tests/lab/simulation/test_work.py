"""The cost of a line in the best batch of its job alone, and the bound beside online requests."""

import pytest

from cosched.core.request import RequestClass
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.metrics.stats import Window
from cosched.lab.simulation.work_bound import job_work
from cosched.predict.line_cost import CHUNK_TOKENS
from tests.traces.samples import request


class PerToken:
    """A millisecond for each prompt token, and for a batch of decodes 10 ms and one for each."""

    def iteration_s(self, batch):
        prompts = sum(p.num_new for p in batch.prefills)
        return 1e-3 * prompts + (0.01 + 1e-3 * len(batch.decodes) if batch.decodes else 0.0)


def line(number, *segments, num_output=100):
    return request(f"r{number}", 0.0, segments, num_output, request_class=RequestClass.OFFLINE)


class Weights:
    """10 ms for the weights, which all tokens of an iteration share, and 0.1 ms for each."""

    def iteration_s(self, batch):
        return 0.01 + 1e-4 * batch.num_tokens if batch.num_tokens else 0.0


def work_of(lines, cost_model=None, **limits):
    limits = {"kv_tokens": 10**6, "max_running": 64, **limits}
    return job_work(lines, cost_model or PerToken(), **limits)


def costs_of(lines, **limits):
    return work_of(lines, **limits).costs


def chats(*, per_s=2.0, num_prompt=100, num_output=51, until_s=100.0, num_cached=0):
    """Online requests, a reply of which takes a second."""
    return [
        RequestRecord(
            rid=f"c{i}",
            request_class=RequestClass.ONLINE,
            arrival_s=i / per_s,
            first_token_s=i / per_s,
            finish_s=i / per_s + 1.0,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            num_cached_tokens=num_cached,
        )
        for i in range(int(per_s * until_s))
    ]


RUN = Window(start_s=10.0, end_s=90.0)


def test_a_prompt_costs_all_of_its_chunks_and_the_first_token_comes_with_it():
    (cost,) = costs_of([line(0, (1, 2 * CHUNK_TOKENS + 500), num_output=1)]).values()
    assert cost.prompt_s == pytest.approx(1e-3 * (2 * CHUNK_TOKENS + 500), rel=0.01)
    assert cost.total_s(1) == cost.prompt_s


def test_shared_tokens_are_computed_once_by_all_together():
    lines = [line(i, (7, 4000), (100 + i, 200)) for i in range(8)]
    costs = costs_of(lines)
    assert sum(c.prompt_s for c in costs.values()) == pytest.approx(4.0 + 8 * 0.2, rel=0.01)
    assert costs["r0"].prompt_s == pytest.approx(0.7, rel=0.01)


def test_a_decode_is_shared_by_as_many_as_memory_and_slots_hold():
    lines = [line(i, (i, 950)) for i in range(4)]  # mean context: 1,000 tokens
    assert costs_of(lines)["r0"].token_s == pytest.approx((0.01 + 0.064) / 64, rel=0.01)
    assert costs_of(lines, kv_tokens=8000)["r0"].token_s == pytest.approx(
        (0.01 + 0.008) / 8, rel=0.01
    )
    assert costs_of(lines, kv_tokens=10)["r0"].token_s == pytest.approx(0.011, rel=0.02)


@pytest.fixture(scope="module")
def eight():
    lines = [line(i, (i, 1000), num_output=101) for i in range(8)]
    return work_of(lines, Weights())


def test_costs_add_up_to_the_time_of_the_best_mix_and_alone_to_the_whole_device(eight):
    # Iterations of 64 decodes and 640 prompt tokens, 8 x 100 / 64 of them.
    assert eight.total_s == pytest.approx(12.5 * (0.01 + 1e-4 * 704), rel=1e-3)
    assert sum(cost.total_s(101) for cost in eight.costs.values()) == pytest.approx(eight.total_s)
    assert eight.bound_per_s([], RUN, tpot_s=0.05) == pytest.approx(1, rel=1e-3)


def test_the_bound_leaves_online_requests_their_tokens_and_each_iteration_its_weights(eight):
    online_s = 2 * 150 * 1e-4  # in each second; the weights are read for the job's tokens anyway
    best = 704e-4 / (0.01 + 704e-4)  # share of an iteration that is not the weights
    free = eight.bound_per_s(chats(), RUN, tpot_s=None)
    assert free == pytest.approx((1 - online_s - 0.01 / 0.0829) / best, rel=0.01)
    # An iteration may take 20 ms: half of it is the weights.
    limited = eight.bound_per_s(chats(), RUN, tpot_s=0.02)
    assert limited == pytest.approx((1 - online_s - 0.5) / best, rel=0.01)
    # Only while an online request decodes: here a second in four.
    seldom = chats(per_s=0.25)
    free, limited = (eight.bound_per_s(seldom, RUN, tpot_s=tpot_s) for tpot_s in (None, 0.011))
    assert limited == pytest.approx(0.75 * free, abs=0.1)


def test_what_online_requests_found_computed_takes_no_time(eight):
    cold = eight.bound_per_s(chats(num_prompt=1000), RUN, tpot_s=None)
    warm = eight.bound_per_s(chats(num_prompt=1000, num_cached=990), RUN, tpot_s=None)
    assert warm - cold == pytest.approx(2 * 990e-4, rel=0.02)


@pytest.mark.parametrize("tpot_s", [0.05, None])
def test_beside_more_than_the_device_can_do_nothing_is_left(eight, tpot_s):
    assert eight.bound_per_s(chats(num_prompt=6000), RUN, tpot_s=tpot_s) == 0


def test_the_bound_uses_the_sizes_that_kernels_like():
    """Beyond 256 tokens an iteration takes 10 ms more, and no more up to 1,024: half of the
    iterations are then small and some are large."""

    class Step:
        def iteration_s(self, batch):
            num_tokens = batch.num_tokens
            return 1e-4 * num_tokens + (0.01 if num_tokens > 256 else 0.0)

    work = work_of([line(i, (i, 10_000), num_output=2) for i in range(8)], Step())
    at_the_step = work.bound_per_s([*chats()], RUN, tpot_s=0.027)
    assert at_the_step > 0.9
