"""EcoServe on SGLang's scheduler: its checks agree with what is set aside, lent and held."""

from __future__ import annotations

import random

import pytest

from cosched.core.view import Progress
from cosched.engine.running import taken_by_guests
from cosched.policies import POLICIES
from tests.engine.conftest import assert_drained, prompt, view_now

NAMES = [name for name in POLICIES if name.startswith("ecoserve")]
OFFLINE = -100


def flood(engine, rng, *, num_requests=30, deadlines=False, longest=60):
    """Requests that each know how long their output gets, at random moments."""
    sent = {}

    def act(iteration):
        engine.scheduler.invariant_checker.self_check_during_busy()
        if len(sent) < num_requests and (len(engine.replies) == len(sent) or rng.random() < 0.5):
            rid = f"r{len(sent)}"
            sent[rid] = rng.randint(1, longest)
            ids = prompt(rng.randint(0, 3), rng.choice([0, 64, 200]))
            ids += prompt(100 + len(sent), rng.randint(1, 200))
            wish = {"output_tokens_hint": sent[rid]}
            if deadlines:
                wish["deadline_s"] = rng.choice([0.3, 1.0, 60.0])
            engine.submit(
                rid,
                ids,
                max_new_tokens=sent[rid],
                priority=rng.choice([None, OFFLINE]),
                custom_params={"cosched": wish},
            )

    return sent, act


@pytest.mark.parametrize("name", NAMES)
def test_everybody_is_served_where_lengths_are_badly_known(make_engine, name):
    """A standard deviation of 0.8 of the logarithm (decision 4): nobody stands still for ever, no
    admission is refused, and SGLang's strict memory check holds in each iteration."""
    rng = random.Random(len(name))
    page_size, overlap = rng.choice([1, 16]), rng.random() < 0.5
    engine = make_engine(
        policy=name,
        config={"length": {"mode": "oracle-noise", "sigma": 0.8}},
        overlap=overlap,
        page_size=page_size,
        max_total_tokens=1600,
        max_running_requests=16,
    )
    sent, act = flood(engine, rng, deadlines=True)
    engine.run_until_idle(on_iteration=act, max_iterations=20_000)
    counters = engine.scheduler.cosched.counters
    assert {rid: len(reply.output_ids) for rid, reply in engine.replies.items()} == sent
    assert counters.num_engine_refusals == counters.num_safe_plans == 0
    assert_drained(engine)


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])
def test_guests_grow_in_what_their_hosts_were_promised(make_engine, page_size, overlap):
    engine = make_engine(
        policy="ecoserve-oracle",
        overlap=overlap,
        page_size=page_size,
        max_total_tokens=960,
        max_running_requests=16,
    )
    outputs = [260, 220, *range(20, 100, 5)]
    for i, num_output in enumerate(outputs):
        engine.submit(
            f"r{i}",
            prompt(i, 30),
            max_new_tokens=num_output,
            priority=OFFLINE,
            custom_params={"cosched": {"output_tokens_hint": num_output}},
        )
    taken, hosts = [], set()

    def look(iteration):
        engine.scheduler.invariant_checker.self_check_during_busy()
        running = [req.cosched for req in engine.scheduler.running_batch.reqs]
        taken.append(sum(taken_by_guests(running).values()))
        hosts.update(tracked.host.rid for tracked in running if tracked.host is not None)
        view = view_now(engine.scheduler)
        assert view.progress() == Progress.of(view)

    engine.run_until_idle(on_iteration=look, max_iterations=20_000)
    answers = {rid: len(reply.output_ids) for rid, reply in engine.replies.items()}
    assert answers == {f"r{i}": num_output for i, num_output in enumerate(outputs)}
    assert max(taken) >= 2 * page_size and hosts
    counters = engine.scheduler.cosched.counters
    assert counters.num_engine_refusals == counters.num_safe_plans == counters.num_preemptions == 0
    assert_drained(engine)
