"""Targets are held within the operator's bounds where the scheduler first reads them: also those
of requests that came past HTTP."""

from __future__ import annotations

import itertools

from cosched.core.request import Slo
from cosched.engine.tracked import TrackedRequest
from tests.engine.conftest import prompt

numbers = itertools.count()


def granted(engine, **targets):
    """The targets of a request with these ones, as the policy sees them."""
    params = {"cosched": targets} if targets else None
    engine.submit(f"r{next(numbers)}", prompt(1, 20), max_new_tokens=2, custom_params=params)
    seen = set()

    def look(_):
        waiting = engine.scheduler.waiting_queue
        running = engine.scheduler.running_batch.reqs
        for req in [*waiting, *running]:
            seen.add(TrackedRequest.of(req).slo)

    engine.run_until_idle(on_iteration=look, max_iterations=50)
    assert len(seen) == 1
    return seen.pop()


def test_default_floors(make_engine):
    engine = make_engine()
    absurd = granted(engine, ttft_slo_ms=0.001, tpot_slo_ms=0.001, deadline_s=1e-9)
    assert absurd == Slo(ttft_s=0.25, tpot_s=0.0125, deadline_s=0.25)
    assert granted(engine, ttft_slo_ms=1e12, tpot_slo_ms=20) == Slo(ttft_s=1e9, tpot_s=0.02)
    assert granted(engine) == Slo()


def test_configured_bounds(make_engine):
    claims = {"floor_ratio": 0, "floors": {"tpot_ms": 30}, "ceilings": {"ttft_ms": 2000}}
    engine = make_engine(config={"claims": claims})
    found = granted(engine, ttft_slo_ms=9000, tpot_slo_ms=1, deadline_s=0.5)
    assert found == Slo(ttft_s=2.0, tpot_s=0.03, deadline_s=0.5)
    assert granted(engine, ttft_slo_ms=0.001).ttft_s == 1e-6
