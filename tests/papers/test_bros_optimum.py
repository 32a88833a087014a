"""BROS against the optimum of its own problem (Eq. 1 to 8), found by trying every selection."""

from __future__ import annotations

import random
from dataclasses import replace

from cosched.core.request import RequestClass
from cosched.schedule.validate import validate
from tests.papers.bros_optimum import Problem, plan_of, random_view

NUM_VIEWS = 2000


def without_offline(view):
    held = sum(
        r.num_computed_tokens + r.max_new_tokens - r.num_output_tokens
        for r in view.running
        if r.request_class is RequestClass.OFFLINE
    )
    running = tuple(r for r in view.running if r.request_class is RequestClass.ONLINE)
    return replace(view, running=running, offline=(), total_kv=view.total_kv - held)


def test_no_hard_constraint_is_broken_and_the_optimum_is_not_exceeded():
    num_with_offline = num_better = 0
    for seed in range(NUM_VIEWS):
        rng = random.Random(seed)
        view, batch_size = random_view(rng), rng.randint(1, 10)
        plan = plan_of(view, batch_size)
        validate(plan, view)  # Eq. 8, and all that the engine asks for beyond it
        problem = Problem(view, batch_size)
        ours = problem.outcome(plan)
        assert ours.num_in <= batch_size, seed  # Eq. 7
        if not ours.objective:
            continue
        num_with_offline += 1
        best = problem.optimum()
        if all(ours.kept):
            assert best is not None and ours.objective <= best + 1e-9, seed
            num_better += ours.objective < best - 1e-9
        # Eq. 6 holds for everybody for whom it holds without any offline work.
        alone = without_offline(view)
        if plan.preempt or not (alone.running or alone.online):
            continue  # who is stopped leaves memory for others than would have found it
        kept_alone = Problem(alone, batch_size).outcome(plan_of(alone, batch_size)).kept
        assert all(ours.kept[i] for i, kept in enumerate(kept_alone) if kept), seed
    assert num_with_offline > NUM_VIEWS / 4 and num_better > 0


def test_exchange_raises_what_is_maximised():
    gains = []
    for seed in range(NUM_VIEWS):
        rng = random.Random(seed)
        view, batch_size = random_view(rng), rng.randint(1, 10)
        problem = Problem(view, batch_size)
        with_it, without = (
            problem.outcome(plan_of(view, batch_size, replaces=replaces)).objective
            for replaces in (True, False)
        )
        gains.append(with_it - without)
    assert sum(gain > 0 for gain in gains) > 50 and sum(gains) > 0
