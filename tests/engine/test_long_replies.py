"""Replies that are longer than expected, on SGLang's scheduler: what fits beside them is served."""

from __future__ import annotations

import pytest

from tests.engine.conftest import OFFLINE, assert_drained, prompt, without_model

LEARNED = (4, 30, 60, 8, 20, 80, 50, 12)
"""Lengths of replies before."""


def engine_with_lengths(make_engine):
    engine = without_model(make_engine(policy="cosched"))  # 2,000 tokens of KV
    for i, length in enumerate(LEARNED):
        engine.submit(f"before{i}", prompt(i, 50), max_new_tokens=length)
    engine.run_until_idle()
    return engine


@pytest.mark.parametrize(("priority", "length"), [(0, 1880), (OFFLINE, 1700)])
def test_a_prompt_that_fits_an_idle_engine_is_served(make_engine, priority, length):
    """Mean and deviations of its reply need more than there is."""
    engine = engine_with_lengths(make_engine)
    engine.submit("large", prompt(20, length), max_new_tokens=90, priority=priority)
    engine.submit("behind", prompt(21, 60), max_new_tokens=4, priority=OFFLINE)
    engine.run_until_idle(max_iterations=400)
    assert [len(engine.replies[rid].output_ids) for rid in ("large", "behind")] == [90, 4]
    assert_drained(engine)


def test_short_offline_replies_pass_endless_ones(make_engine):
    engine = engine_with_lengths(make_engine)
    endless = [f"endless{i}" for i in range(4)]
    for i, rid in enumerate(endless):
        engine.submit(rid, prompt(30 + i, 50), max_new_tokens=1500, priority=OFFLINE)
    held = []

    def act(iteration):
        if iteration == 200:
            held.append(sum(len(engine.replies[rid].output_ids) for rid in endless))
            engine.submit("short", prompt(40, 50), max_new_tokens=4, priority=OFFLINE)
        if iteration == 240:
            assert len(engine.replies["short"].output_ids) == 4
            for rid in endless:
                engine.abort(rid)

    engine.run_until_idle(on_iteration=act, max_iterations=300)
    assert held[0] > 600  # with their prompts 40 % of the memory
    assert_drained(engine)
