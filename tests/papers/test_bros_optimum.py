"""BROS against the optimum of its own problem (Eq. 1 to 8), found by trying every selection."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cosched.core.plan import Plan
from cosched.core.request import RequestClass, Slo
from cosched.papers.bros.policy import BrosOptions, BrosPolicy, Pressure
from cosched.schedule.base import PolicySettings
from cosched.schedule.validate import validate
from tests.factories import FakeView, Linear, decoding, make_caps, offline, online

TTFT_S, TPOT_S = 1.0, 0.05
SETTINGS_SLO = Slo(ttft_s=TTFT_S, tpot_s=TPOT_S)
CAPS = make_caps(
    max_running_requests=16,
    max_chunk_tokens=8192,
    max_prefill_tokens=8192,
    max_unfinished_prefills=0,  # prompts are whole, as in the paper
    partial_decode=True,
)


def random_view(rng: random.Random) -> FakeView:
    """At most ten requests, running and waiting, of both classes, with gaps around the targets."""
    num_tokens = lambda: rng.choice([20, 60, 150, 300])  # noqa: E731
    running, waiting_online, waiting_offline = [], [], []
    for number in range(rng.randint(1, 10)):
        is_online = rng.random() < 0.6
        make = online if is_online else offline
        fields = {"max_new_tokens": 20, "first_token_s": -9.0}
        if rng.random() < 0.6:
            gap_s = rng.choice([0.0, rng.uniform(0, 0.06)])
            request = decoding(make(f"r{number}", num_tokens(), last_token_s=-gap_s, **fields), 5)
            running.append(request)
        elif is_online:
            arrival_s = -rng.choice([0.0, rng.uniform(0.9, 1.02)])
            waiting_online.append(online(f"w{number}", num_tokens(), arrival_s=arrival_s))
        else:
            waiting_offline.append(offline(f"o{number}", num_tokens()))
    held = sum(r.num_computed_tokens + 20 for r in running)
    return FakeView(
        caps=CAPS,
        total_kv=held + rng.choice([100, 400, 4000]),
        running=tuple(running),
        online=tuple(waiting_online),
        offline=tuple(waiting_offline),
        mean_iteration_s=rng.choice([0.0, 0.006, 0.015, 0.03]),
        predictor=Linear(),
    )


class Outcome(NamedTuple):
    """Of a selection. kept: which online requests Eq. 6 holds for, in the order of `Problem`."""

    objective: float
    num_in: int
    seconds: float
    kept: tuple[bool, ...]


class Problem:
    """Eq. 1 to 8 of a view, each request with the tokens that the iteration would compute of it."""

    def __init__(self, view: FakeView, batch_size: int) -> None:
        self.view = view
        self.batch_size = batch_size
        self.requests = [*view.running, *view.online, *view.offline]
        self.is_online = np.array([r.request_class is RequestClass.ONLINE for r in self.requests])
        running = {r.rid for r in view.running}
        self.num_new = np.array(
            [1 if r.rid in running else r.num_prompt_tokens for r in self.requests]
        )
        self.left_s = np.array([self._left_s(r, r.rid in running) for r in self.requests])
        alone_s = view.predictor.fixed_s + view.predictor.token_s * self.num_new
        self.attainable = self.is_online & (self.left_s >= alone_s)

    def _left_s(self, request, runs: bool) -> float:
        """T_SLO - t_i; k_i is 1."""
        if not runs:
            return TTFT_S + request.arrival_s
        return TPOT_S + request.last_token_s

    def seconds(self, chosen: np.ndarray) -> np.ndarray:
        tokens = chosen @ self.num_new
        fixed_s, token_s = self.view.predictor.fixed_s, self.view.predictor.token_s
        return np.where(tokens > 0, fixed_s + token_s * tokens, 0.0)

    def kept(self, chosen: np.ndarray) -> np.ndarray:
        """Eq. 6 for each request and selection."""
        late_s = (1 - chosen) * self.view.mean_iteration_s + self.seconds(chosen)[:, None]
        return late_s <= self.left_s + 1e-9

    def outcome(self, plan: Plan) -> Outcome:
        idle = plan.paused | {p.rid for p in plan.preempt}
        taken = {r.rid for r in self.view.running if r.rid not in idle} | plan.prefill.keys()
        chosen = np.array([[r.rid in taken for r in self.requests]], dtype=float)
        seconds = float(self.seconds(chosen)[0])
        num_offline = float(chosen[0] @ ~self.is_online)
        return Outcome(
            num_offline / seconds if seconds else 0.0,
            int(chosen.sum()),
            seconds,
            tuple(map(bool, self.kept(chosen)[0][self.attainable])),
        )

    def optimum(self) -> float | None:
        """The largest objective of all selections that keep Eq. 6 for whoever can be in time, Eq. 7
        and Eq. 8 (tokens that are computed, against those that are free); None: there is none. The
        engine asks for more memory than Eq. 8, so a plan may not reach it."""
        size = len(self.requests)
        chosen = (np.arange(1, 2**size)[:, None] >> np.arange(size) & 1).astype(float)
        kept = (self.kept(chosen) | ~self.attainable).all(axis=1)
        fits = (chosen.sum(axis=1) <= self.batch_size) & kept
        fits &= chosen @ self.num_new <= self.view.kv.free
        if not fits.any():
            return None
        objective = (chosen @ ~self.is_online) / self.seconds(chosen)
        return float(objective[fits].max())


def plan_of(view: FakeView, batch_size: int, **options) -> Plan:
    settings = PolicySettings(caps=view.caps, slo=SETTINGS_SLO)
    policy = BrosPolicy(settings, BrosOptions(**options))
    return policy.plan(view, Pressure(batch_size=batch_size))[0]


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
