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

CHUNK_TOKENS = (512, 1024, 2048, 4096, 8192)
"""``--chunked-prefill-size``."""

TOLERANCE = 0.02
"""Of online-only attainment."""


def tuned_candidates(base: RunSpec) -> dict[str, RunSpec]:
    """The settings to try first, by a name that says what they are: every chunk size, with and
    without mixed chunks, in the order of arrival."""
    return {
        f"{chunk}{' mixed' if mixed else ''} fcfs": _with(base, chunk, mixed, "fcfs")
        for chunk in CHUNK_TOKENS
        for mixed in (False, True)
    }


def other_order(best: RunSpec) -> dict[str, RunSpec]:
    """The best of them again in the only other order that SGLang accepts beside priority
    scheduling (``lof``, longest output first)."""
    machine = best.machine
    mixed = bool(machine.mixed_chunk)
    name = f"{machine.chunk()}{' mixed' if mixed else ''} lof"
    return {name: _with(best, machine.chunk(), mixed, "lof")}


def _with(base: RunSpec, chunk: int, mixed: bool, schedule_policy: str) -> RunSpec:
    machine = replace(
        base.machine, chunk_tokens=chunk, mixed_chunk=mixed, schedule_policy=schedule_policy
    )
    return replace(base, scenario=scenario("priority"), machine=machine)


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
