"""What a policy is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cosched.core.caps import EngineCaps
from cosched.core.plan import Plan
from cosched.core.request import Slo
from cosched.core.view import View
from cosched.latency.predictor import Predictor

__all__ = ["Policy", "PolicySettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """What a policy is built with.

    caps              limits of the engine
    slo               targets of online requests that name none of their own; none of them is None
                      but the deadline
    predictor         what is believed of the time of an iteration. The engine keeps it up to date
                      between two plans; a policy only asks it
    latency_budget_s  most predicted time of an iteration that serves online requests [s]; None: it
                      follows from their deadlines
    offline_rate      most offline requests admitted per second [1/s]; None: any number
    """

    caps: EngineCaps
    slo: Slo
    predictor: Predictor
    latency_budget_s: float | None = None
    offline_rate: float | None = None


class Policy(Protocol):
    """Pure: no clock, no randomness, no torch, no sglang, and it changes nothing.

    The same object plans in production and under the virtual clock.
    """

    def plan(self, view: View) -> Plan:
        """The next iteration. Everything it may know is in `view` and in the settings it was built
        with; called once per iteration."""
        ...
