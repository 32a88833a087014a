"""Random preemptions in every mode: the greedy tokens are those of an engine without
preemptions."""

import os
import random

import pytest
from msgspec.structs import replace

from cosched.core.plan import Preemption, PreemptMode
from cosched.errors import PlanError
from cosched.schedule.validate import validate
from tests.engine.conftest import assert_drained, outputs, prompt

NUM_REQUESTS = int(os.environ.get("COSCHED_STOPPED_REQUESTS", "60"))

ROOM = 60_000
TIGHT = 800
"""Tokens of KV: enough for all requests ever, or hardly enough for the running ones."""

HOST = ("--enable-hierarchical-cache",)


class StoppingPolicy:
    """Another policy's plans with more preemptions, all in one mode."""

    def __init__(self, inner, mode, *, seed):
        self._inner = inner
        self._mode = mode
        self._draw = random.Random(seed)
        self.initial = inner.initial
        self.stopped = []

    def plan(self, view, state):
        plan, state = self._inner.plan(view, state)
        prefill = dict(plan.prefill)
        stopped = [preemption.rid for preemption in plan.preempt]
        for request in [*view.unfinished, *view.running]:
            idle = {*stopped, *plan.paused}
            runs = [r.rid for r in view.running if r.rid not in idle]
            is_left = len(prefill.keys() - {request.rid}) + len({*runs} - {request.rid}) > 0
            if request.rid in stopped or not request.traits.can_preempt or not is_left:
                continue
            if self._draw.random() < 0.1:
                prefill.pop(request.rid, None)
                stopped.append(request.rid)
        preempt = tuple(Preemption(rid=rid, mode=self._mode) for rid in stopped)
        hold = plan.paused - {*stopped}
        forced = replace(plan, prefill=prefill, paused=hold, preempt=preempt)
        try:
            validate(forced, view)
        except PlanError:  # without an online request there may be no room for an offline one
            return plan, state
        self.stopped += stopped
        return forced, state


def answers(engine):
    """Of requests of both classes, many with shared prefixes."""
    draw = random.Random(11)
    asked = []
    for i in range(NUM_REQUESTS):
        head = prompt(draw.randrange(12), draw.choice((0, 40, 90)))
        tokens = head + prompt(20 + i, draw.randrange(1, 60))
        asked.append((f"r{i}", tokens, draw.randrange(2, 14), draw.choice((0, -1))))

    def more(iteration):
        while asked and len(engine.scheduler.waiting_queue) + len(engine._inbox) < 12:
            rid, tokens, num_tokens, priority = asked.pop()
            engine.submit(rid, tokens, max_new_tokens=num_tokens, priority=priority)

    engine.run_until_idle(on_iteration=more)
    assert_drained(engine)
    return outputs(engine)


@pytest.fixture(scope="module")
def undisturbed():
    """Filled by the first test."""
    return {}


@pytest.mark.parametrize(
    ("mode", "num_tokens", "switches", "loop"),
    [
        pytest.param(PreemptMode.KEEP_KV, ROOM, (), {"overlap": False}, id="kept in the tree"),
        pytest.param(PreemptMode.KEEP_KV, TIGHT, (), {"page_size": 16}, id="tail evicted"),
        pytest.param(PreemptMode.CHECKPOINT, TIGHT, HOST, {}, id="host checkpoint"),
        pytest.param(PreemptMode.RECOMPUTE, TIGHT, (), {"overlap": False}, id="recomputed"),
    ],
)
def test_preemptions_change_no_token(
    make_engine, monkeypatch, undisturbed, mode, num_tokens, switches, loop
):
    if not undisturbed:
        undisturbed |= answers(make_engine(policy="sglang", max_total_tokens=ROOM))
        assert len(undisturbed) == NUM_REQUESTS
    monkeypatch.setattr("cosched.engine.tree_core._LEAST_TAIL", 16)  # prompts are short here
    flags = {"hicache_size": 0, "hicache_ratio": 3, "hicache_write_policy": "write_back"}
    engine = make_engine(
        policy="hygen",
        config={"kv": {"reservation": "off"}},
        max_total_tokens=num_tokens,
        switches=switches,
        **{"overlap": True} | loop | (flags if switches else {}),
    )
    controller = engine.scheduler.cosched
    core = controller.kv.core
    cut = []
    keep_head = core._keep_head

    def noted(node, wanted):
        before = node.num_tokens
        keep_head(node, wanted)
        cut.append(node.num_tokens < before)

    core.__dict__["_keep_head"] = noted
    policy = StoppingPolicy(controller.planner.policy, mode, seed=5)
    controller.planner.use_policy(policy)
    assert answers(engine) == undisturbed
    assert len(policy.stopped) > NUM_REQUESTS / 2
    counters = controller.counters
    # With enough memory, all KV of preempted requests is found again.
    assert (counters.recomputed_tokens > 0) == any(cut) == (num_tokens == TIGHT)
    if switches:
        assert core.transferred["to_device"] > 0
