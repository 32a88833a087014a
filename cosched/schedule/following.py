"""Requests that follow another one which computes their prefix: they find it cached afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from cosched.core.plan import SkipReason
from cosched.core.request import Request, num_tokens_of
from cosched.core.view import OfflineOrder, View
from cosched.schedule.builder import PlanBuilder

LEAST_SHARED = 64
"""Shared tokens for which a request waits until another has computed them."""


def waits_for_prefix(builder: PlanBuilder, request: Request, launched: Sequence[Request]) -> bool:
    """True if what this request would compute first is under way: in a launched prefill, or in one
    of this plan. It finds it cached afterwards, and would compute it once more now."""
    view = builder.view
    num_shared = view.match(request).cached + LEAST_SHARED
    if num_shared > num_tokens_of(request):
        return False
    under_way = {other.rid: (other, other.num_computed_tokens) for other in launched}
    for rid, num_tokens in builder.prefill.items():
        waiting = view.waiting(rid)
        if waiting is not None:
            under_way[rid] = waiting, view.match(waiting).cached + num_tokens
        elif rid in under_way:
            other, num_computed = under_way[rid]
            under_way[rid] = other, num_computed + num_tokens
    for other, num_computed in under_way.values():
        if num_shared <= num_computed and view.num_common(request, other, num_shared):
            builder.skip(request, SkipReason.SHARED_PREFIX)
            return True
    return False


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
