"""The default policy on SGLang's scheduler: late prefills are preempted, and all are answered."""

from __future__ import annotations

import random

import pytest

from tests.engine.conftest import assert_drained, prompt, with_virtual_time


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])
def test_late_prefills_are_preempted_and_all_requests_are_answered(make_engine, page_size, overlap):
    """Most targets are missed from the start, and prompts have many chunks. SGLang's strict memory
    check passes in each iteration."""
    rng = random.Random(page_size)
    engine = with_virtual_time(make_engine(policy="cosched", overlap=overlap, page_size=page_size))
    stopped_online, sent = set(), {}

    def act(iteration):
        engine.scheduler.invariant_checker.self_check_during_busy()
        for tracked in engine.scheduler.cosched.waiting.online:
            if tracked.num_preemptions:
                stopped_online.add(tracked.rid)
        if len(sent) < 30 and (len(engine.replies) == len(sent) or rng.random() < 0.6):
            rid = f"r{len(sent)}"
            sent[rid] = rng.randint(1, 12)
            is_offline = rng.random() < 0.3
            engine.submit(
                rid,
                prompt(len(sent), rng.choice([20, 300, 700])),
                max_new_tokens=sent[rid],
                priority=-1 if is_offline else None,
                custom_params={"cosched": {"ttft_slo_ms": rng.choice([1, 50, 5000])}},
            )

    engine.run_until_idle(on_iteration=act, max_iterations=20_000)
    answers = {rid: len(reply.output_ids) for rid, reply in engine.replies.items()}
    assert answers == sent
    counters = engine.scheduler.cosched.counters
    assert counters.num_engine_refusals == counters.num_safe_plans == 0
    assert stopped_online, "no late prefill was preempted"
    assert_drained(engine)
