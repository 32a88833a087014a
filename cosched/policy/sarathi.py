"""Sarathi++: chunked prefill in two phases, online first (HyGen §5.1, the SLO-unaware baseline).

Idea         every iteration has a fixed token budget. Running requests decode, then online prefill
             takes what it needs, then offline prefill fills the rest in chunks.
Assumptions  prefill and decode share an iteration (mixed batches); the token budget was chosen so
             that a full iteration keeps the TPOT target.
Good         simple, no model of the hardware.
Bad          tokens are not time: a hundred offline decodes or one long offline context stretch
             every online token gap, and nothing here notices.
Parameters   token budget of an iteration [tokens]: the engine's ``--chunked-prefill-size``.

Deviations from HyGen's Algorithm 1 without its latency budget: admission counts the output a
request may still generate (SGLang's rule), not only its prompt; and offline requests are also
stopped when the decodes themselves would not fit in memory.
"""

from __future__ import annotations

from cosched.core.plan import Plan
from cosched.core.view import View
from cosched.policy.two_phase import Unlimited, two_phase_plan

__all__ = ["SarathiPolicy"]

_UNLIMITED = Unlimited()


class SarathiPolicy:
    """Two phases over one token budget. See the module's docstring and `two_phase`."""

    def __init__(self, *, offline_rate: float | None = None) -> None:
        """offline_rate  most offline requests admitted per second while some wait [1/s]; None: any
        number. With a rate that the SLO-aware profiler found this is HyGen* (HyGen §5.1)."""
        self._offline_rate = offline_rate

    def plan(self, view: View) -> Plan:
        return two_phase_plan(view, _UNLIMITED, most_offline=self._most_offline(view))

    def _most_offline(self, view: View) -> int | None:
        if self._offline_rate is None:
            return None
        backlog = view.backlog
        due = 1 + int(self._offline_rate * (view.now_s - backlog.since_s))
        return max(due - backlog.num_admitted, 0)
