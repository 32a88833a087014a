"""Which offline requests are preempted for an online one (HyGen §4.1, Alg. 2: PREEMPT_OFFLINE).

The paper orders them by "their original priority in the waiting queue and their memory consumption"
and does not say how the two are combined. Here the lowest priority is the latest arrival, and of
the `NUM_ALIKE` latest the one that holds most KV memory goes first: few are preempted for one
online request, and none that is far ahead in the queue. What is preempted keeps its output and
waits again; its KV stays in the radix tree until the memory is needed.
"""

from __future__ import annotations

from collections.abc import Callable

from cosched.core.request import Request
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.phases import youngest_first

NUM_ALIKE = 8
"""Requests of about the same priority."""


def latest_by(builder: PlanBuilder, key: Callable[[Request], int]) -> list[Request]:
    """Victims: an unfinished prefill, then the latest, `NUM_ALIKE` of them by `key`, of equals the
    latest first."""
    victims = [*youngest_first(builder)]
    num_unfinished = sum(1 for victim in victims if victim in builder.view.unfinished)
    end = num_unfinished + NUM_ALIKE
    alike = sorted(victims[num_unfinished:end], key=key)
    return [*victims[:num_unfinished], *alike, *victims[end:]]


def largest_of_latest(builder: PlanBuilder) -> list[Request]:
    """By priority and memory. See the module's docstring."""
    return latest_by(builder, lambda victim: -builder.view.preemption_gain(victim))
