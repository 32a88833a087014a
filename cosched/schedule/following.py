"""Requests that follow another one which computes their prefix: they find it cached afterwards."""

from __future__ import annotations

from functools import cached_property
from itertools import islice

from cosched.core.plan import SkipReason
from cosched.core.request import Request, num_tokens_of
from cosched.core.view import OfflineOrder, View
from cosched.schedule.builder import PlanBuilder

LEAST_SHARED = 64
"""Shared tokens for which a request waits until another has computed them."""


class UnderWay:
    """Requests whose prompts are being computed, in launched prefills or in those of the plan, and
    the tokens that each then has. Prefills that are added to the plan are seen."""

    def __init__(self, builder: PlanBuilder) -> None:
        self._builder = builder
        self._num_seen = 0

    @cached_property
    def _computed(self) -> dict[str, tuple[Request, int]]:
        found = without_output(self._builder.view)
        return {other.rid: (other, other.num_computed_tokens) for other in found}

    def has_prefix_of(self, request: Request) -> bool:
        """True if what this request would compute first is among it, and it has to wait. It finds
        it cached afterwards, and would compute it once more now."""
        builder = self._builder
        view = builder.view
        num_shared = view.match(request).cached + LEAST_SHARED
        if num_shared > num_tokens_of(request):
            return False
        self._look()
        for other, num_computed in self._computed.values():
            if num_shared <= num_computed and view.num_common(request, other, num_shared):
                builder.skip(request, SkipReason.SHARED_PREFIX)
                return True
        return False

    def _look(self) -> None:
        view, prefill, computed = self._builder.view, self._builder.prefill, self._computed
        for rid, num_tokens in islice(prefill.items(), self._num_seen, None):
            waiting = view.waiting(rid)
            if waiting is not None:
                computed[rid] = waiting, view.match(waiting).cached + num_tokens
            elif rid in computed:
                other, num_computed = computed[rid]
                computed[rid] = other, num_computed + num_tokens
        self._num_seen = len(prefill)


def follow(order: OfflineOrder, request: Request, num_cached: int) -> None:
    """Requests that share what this one computes wait until it is cached, unless it is short."""
    num_shared = num_cached + LEAST_SHARED
    if order.knows_prefixes and num_shared <= num_tokens_of(request):
        order.skip_sharing(request, num_shared)


def without_output(view: View) -> list[Request]:
    """Requests under way without a token of output."""
    found: list[Request] = []
    num_output = view.progress().num_output
    if 0 in num_output:
        found += [r for r, num in zip(view.running, num_output, strict=True) if not num]
    return found + [r for r in view.unfinished if not r.num_output_tokens]
