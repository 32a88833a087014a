"""The decode of running requests is paused in SGLang's scheduler."""

import random

import pytest
from msgspec.structs import replace

from tests.engine.conftest import (
    OFFLINE,
    assert_drained,
    outputs,
    prompt,
    random_traffic,
    without_model,
)


class HoldingPolicy:
    """Another policy's plans, with some of the decodes paused."""

    def __init__(self, inner, *, seed, most_in_a_row=3):
        self._inner = inner
        self._rng = random.Random(seed)
        self._most = most_in_a_row
        self._in_a_row = {}
        self.num_held = 0
        self.initial = inner.initial

    def plan(self, view, state):
        plan, state = self._inner.plan(view, state)
        stopped = {p.rid for p in plan.preempt}
        running = [r.rid for r in view.running if r.rid not in stopped]
        may_wait = {r.rid for r in view.running} - {r.rid for r in view.cannot_pause(view.running)}
        held = {
            rid
            for rid in running
            if rid in may_wait
            and self._in_a_row.get(rid, 0) < self._most
            and self._rng.random() < 0.5
        }
        if len(held) == len(running) and not plan.prefill:
            held = set(running[1:]) & may_wait
        self._in_a_row = {rid: self._in_a_row.get(rid, 0) + 1 for rid in held}
        self.num_held += len(held)
        return replace(plan, paused=frozenset(held)), state


def hold_at_random(engine, *, seed):
    controller = engine.scheduler.cosched
    controller.planner.policy = HoldingPolicy(controller.planner.policy, seed=seed)
    return controller.planner.policy


def answers(engine, seed):
    rng = random.Random(seed)
    for i in range(7):
        priority = OFFLINE if i % 2 else 0
        tokens = prompt(i, rng.randint(10, 150))
        engine.submit(f"r{i}", tokens, max_new_tokens=12, priority=priority)
    engine.run_until_idle(max_iterations=3000)
    assert_drained(engine)
    return outputs(engine)


@pytest.mark.parametrize(("overlap", "mixed"), [(False, True), (True, True), (True, False)])
def test_pauses_change_no_token(make_engine, overlap, mixed):
    flags = {"overlap": overlap, "mixed": mixed, "page_size": 1 if overlap else 16}
    expected = answers(make_engine(**flags), seed=1)
    engine = make_engine(**flags)
    policy = hold_at_random(engine, seed=2)
    assert answers(engine, seed=1) == expected
    assert policy.num_held > 20


@pytest.mark.parametrize("overlap", [False, True])
def test_pauses_where_sglang_runs_decodes_as_prefills(make_engine, monkeypatch, overlap):
    """With DP attention, while another rank prefills."""
    from sglang.srt.managers.scheduler_components.dp_attn import SchedulerDPAttnAdapter

    expected = answers(make_engine(overlap=overlap), seed=1)
    converted = []

    def convert(adapter, batch):
        if batch is not None and batch.forward_mode.is_decode() and len(converted) % 3 < 2:
            batch.convert_decode_to_extend()
        converted.append(batch)
        return batch

    monkeypatch.setattr(SchedulerDPAttnAdapter, "maybe_convert_decode_to_extend", convert)
    engine = make_engine(overlap=overlap)
    policy = hold_at_random(engine, seed=2)
    assert answers(engine, seed=1) == expected
    assert policy.num_held > 20 and len(converted) > 20


@pytest.mark.parametrize("overlap", [False, True])
def test_a_paused_request_is_visible_and_can_be_aborted(make_engine, overlap):
    engine = make_engine(overlap=overlap)
    for rid in ("a", "b", "c"):
        engine.submit(rid, prompt(ord(rid), 40), max_new_tokens=30)
    scheduler = engine.scheduler
    policy = scheduler.cosched.planner.policy
    held = set()

    class HoldB:
        initial = None

        def plan(self, view, state):
            plan, _ = policy.plan(view, None)
            hold = held & {r.rid for r in view.running if not view.cannot_pause((r,))}
            return replace(plan, paused=hold), None

    scheduler.cosched.planner.policy = HoldB()
    lengths = []

    def act(iteration):
        running = {req.rid: req for req in scheduler.running_batch.reqs}
        if iteration == 6:
            assert set(running) == {"a", "b", "c"}
            held.add("b")
        if 8 <= iteration < 12:
            assert set(running) == {"a", "b", "c"}
            lengths.append((len(running["a"].output_ids), len(running["b"].output_ids)))
        if iteration == 12:
            engine.abort("b")

    engine.run_until_idle(on_iteration=act)
    of_a, of_b = zip(*lengths, strict=True)
    assert len(set(of_b)) == 1 and len(set(of_a)) == 4
    assert engine.replies["b"].finish_reason == "abort"
    assert {len(engine.replies[rid].output_ids) for rid in "ac"} == {30}
    assert_drained(engine)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), 2])
def test_random_traffic_with_pauses_leaks_nothing(make_engine, seed):
    """With preemptions and memory pressure."""
    engine = make_engine(
        overlap=bool(seed % 2),
        mixed=seed != 1,
        page_size=(1, 16)[seed // 2],
        max_total_tokens=1200,
        max_running_requests=6,
    )
    policy = hold_at_random(engine, seed=seed)
    random_traffic(engine if seed else without_model(engine), seed, most_tokens=40)
    assert policy.num_held > 30
