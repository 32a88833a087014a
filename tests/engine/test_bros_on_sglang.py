"""BROS on a real in-process SGLang scheduler: what is answered under forced exchange."""

import msgspec
import pytest

from cosched.papers.bros.policy import BrosOptions, BrosPolicy
from tests.engine.conftest import assert_drained
from tests.engine.test_policies_on_sglang import ask_all


class Crowded:
    """A policy with a batch of so few requests that it must exchange."""

    def __init__(self, inner, batch_size):
        self._inner = inner
        self._size = batch_size
        self.initial = inner.initial
        self.num_exchanged = 0

    def plan(self, view, state):
        state = msgspec.structs.replace(state, batch_size=self._size)
        without = BrosPolicy(self._inner._settings, BrosOptions(replaces=False))
        plan, after = self._inner.plan(view, state)
        plain, _ = without.plan(view, state)
        if (plan.paused, plan.prefill) != (plain.paused, plain.prefill):
            self.num_exchanged += 1
        return plan, after


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["bros", "bros-nobi"])
def test_forced_exchange_changes_no_token(make_engine, overlap, page_size, name):
    flags = {"overlap": overlap, "page_size": page_size, "chunked_prefill_size": 256}
    answers = ask_all(make_engine(policy="sarathi", **flags), seed=3)
    targets = {"slo": {"ttft_ms": 60_000, "tpot_ms": 60_000}}
    engine = make_engine(policy=name, config=targets, max_total_tokens=992, **flags)
    controller = engine.scheduler.cosched
    controller.policy = crowded = Crowded(controller.policy, batch_size=2)
    assert ask_all(engine, seed=3) == answers
    assert crowded.num_exchanged > 10
    assert_drained(engine)
