"""Stock priority scheduling at its best: a sweep over its settings.

A comparison with a competitor's defaults shows only that defaults were not tuned. So every result
is also held against the best stock setting for its workload: of all that come within 2 points of
online-only attainment, the one with the most offline throughput; where none comes that near, the
one with the highest attainment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cosched.simulation.run import RunSpec
from cosched.simulation.scenario import scenario

__all__ = ["TUNED", "choose_tuned", "tuned_candidates"]

TUNED = "priority-tuned"

CHUNK_TOKENS = (256, 512, 1024, 2048, 4096, 8192)
"""``--chunked-prefill-size``."""

SCHEDULE_POLICIES = ("fcfs", "lof")
"""The ``--schedule-policy`` values that SGLang accepts beside priority scheduling."""

TOLERANCE = 0.02
"""Of online-only attainment."""


def tuned_candidates(base: RunSpec) -> dict[str, RunSpec]:
    """Every setting of the sweep, by a name that says what it is."""
    candidates = {}
    for chunk in CHUNK_TOKENS:
        for mixed in (False, True):
            for policy in SCHEDULE_POLICIES:
                machine = replace(
                    base.machine, chunk_tokens=chunk, mixed_chunk=mixed, schedule_policy=policy
                )
                name = f"{chunk}{' mixed' if mixed else ''} {policy}"
                candidates[name] = replace(base, scenario=scenario("priority"), machine=machine)
    return candidates


def choose_tuned(
    candidates: Mapping[str, tuple[float | None, float | None, float | None]],
) -> str:
    """The name of the best setting.

    candidates  name -> (attainment, attainment of online-only in the same window, offline tokens/s)
    """
    assert candidates, "an empty sweep has no best setting"

    def lacking(name: str) -> float:
        attainment, baseline, _ = candidates[name]
        return max((baseline or 0.0) - (attainment or 0.0), 0.0)

    near = [name for name in candidates if lacking(name) <= TOLERANCE]
    if near:
        return max(near, key=lambda name: candidates[name][2] or 0.0)
    return min(candidates, key=lambda name: (lacking(name), -(candidates[name][2] or 0.0)))
