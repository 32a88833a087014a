"""The examples of docs/policies/own_policy.md, on SGLang's scheduler and in a simulation."""

import pytest

from tests.engine.conftest import assert_drained, prompt
from tests.engine.test_policies_on_sglang import EXAMPLES, OFFLINE

NAME = "own_policy:IdleOnly"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def test_a_chat_stops_what_runs_offline_and_nothing_is_lost(make_engine):
    engine = make_engine(policy=NAME)

    def act(iteration):
        if iteration == 0:
            engine.submit("job", prompt(1, 90), max_new_tokens=20, priority=OFFLINE)
        if iteration == 6:
            engine.submit("chat", prompt(2, 30), max_new_tokens=8)

    engine.run_until_idle(on_iteration=act, max_iterations=1000)
    assert_drained(engine)
    assert len(engine.replies["job"].output_ids) == 20
    assert engine.scheduler.cosched.counters.num_preemptions == 1
