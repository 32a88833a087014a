"""KV set aside by plans in place of the engine's ratio, on SGLang's scheduler."""

from __future__ import annotations

import random
import sys
import zlib

import pytest

from cosched.schedule.builder import PlanBuilder
from tests.engine.conftest import assert_drained, prompt, without_model

NAME = f"{__name__}:Promising"
OFFLINE = -100


def share(request) -> float:
    """In [0, 1): another one for each token that it has."""
    return zlib.crc32(f"{request.rid}/{request.num_output_tokens // 4}".encode()) / 2**32


def wanted(request) -> int:
    """From what it has up to all that it may generate."""
    left = request.max_new_tokens - request.num_output_tokens
    return request.num_output_tokens + round(share(request) * left)


class Promising:
    """everybody in the order of arrival, with some room for the output, which changes now and then;
    when that is more than there is, the last that came stops"""

    initial = None

    def __init__(self, settings):
        pass

    def plan(self, view, state):
        builder = PlanBuilder(view)
        running = sorted(view.running, key=lambda request: request.arrival_seq)
        for request in running:
            if not request.num_output_tokens % 4:
                builder.promise(request, wanted(request))
        while len(running) > 1 and min(builder.ledger.headroom, builder.ledger.available) < 0:
            if running[-1].traits.can_preempt:
                builder.preempt(running[-1])
            del running[-1]
        if builder.ledger.headroom < 0 and builder.ledger.promises:
            return PlanBuilder(view).build(), state
        for request in builder.unfinished():
            builder.continue_prefill(request, sys.maxsize, unreserved=True)
        if not builder.num_preempted:
            for request in (*view.online, *view.offline_order()):
                builder.promise(request, wanted(request))
                if not builder.take(request, float("inf")):
                    del builder.ledger.promises[request.rid]
                    break
        return builder.build(), state


@pytest.mark.parametrize(
    ("overlap", "mixed", "page_size"),
    [(False, True, 1), (True, False, 1), (False, False, 16), (True, True, 16)],  # every pair
)
def test_the_engine_admits_what_fits_beside_promises(make_engine, overlap, mixed, page_size):
    """Random lengths, limits and moments, with SGLang's strict memory check each iteration."""
    rng = random.Random(2 * page_size + mixed)
    engine = without_model(
        make_engine(
            policy=NAME,
            overlap=overlap,
            mixed=mixed,
            page_size=page_size,
            max_total_tokens=1600,
            max_running_requests=8,
        )
    )
    sent = {}
    promised = set()

    def act(iteration):
        scheduler = engine.scheduler
        scheduler.invariant_checker.self_check_during_busy()
        promised.update(
            (req.rid, req.cosched.promised)
            for req in scheduler.running_batch.reqs
            if req.cosched.promised is not None
        )
        for req in scheduler.running_batch.reqs:
            assert req.sampling_params.max_new_tokens == sent[req.rid], "the limit is as it was"
        if iteration < 80 and (len(engine.replies) == len(sent) or rng.random() < 0.4):
            rid = f"r{len(sent)}"
            sent[rid] = rng.randint(1, 60)
            ids = prompt(rng.randint(0, 3), rng.choice([0, 64, 200]))
            ids += prompt(100 + len(sent), rng.randint(1, 250))
            engine.submit(rid, ids, max_new_tokens=sent[rid], priority=rng.choice([None, OFFLINE]))

    engine.run_until_idle(on_iteration=act, max_iterations=5000)
    counters = engine.scheduler.cosched.counters
    assert {rid: len(reply.output_ids) for rid, reply in engine.replies.items()} == sent
    assert counters.num_engine_refusals == counters.num_safe_plans == 0
    assert len({rid for rid, _ in promised}) > 15 and len(promised) > 30, "and they changed"
    assert_drained(engine)


class Nothing(Promising):
    """nobody is promised anything"""

    def plan(self, view, state):
        builder = PlanBuilder(view)
        for request in builder.unfinished():
            builder.continue_prefill(request, sys.maxsize)
        for request in view.offline_order():
            builder.promise(request, 0)
            if not builder.take(request, float("inf")):
                del builder.ledger.promises[request.rid]
                break
        return builder.build(), state


def test_what_is_promised_decides_how_many_run(make_engine):
    """The engine's own rule sets a share of the limit aside."""

    def most_running(policy):
        engine = make_engine(policy=policy, max_total_tokens=600, max_running_requests=16)
        without_model(engine)
        for i in range(12):
            engine.submit(f"r{i}", prompt(i, 20), max_new_tokens=100, priority=OFFLINE)
        seen = [0]

        def act(iteration):
            seen.append(len(engine.scheduler.running_batch.reqs))

        engine.run_until_idle(on_iteration=act, max_iterations=20_000)
        assert_drained(engine)
        assert engine.scheduler.cosched.counters.num_engine_refusals == 0
        return max(seen)

    assert most_running(f"{__name__}:Nothing") == 12 > most_running("sarathi")
