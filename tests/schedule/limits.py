"""Limits of a plan worked out anew, from requests and predictor alone: what a ledger, a budget or a
plan says of itself is not asked."""

from cosched.core.batch import BatchTotals
from cosched.core.request import RequestClass


def is_online(request):
    return request.request_class is RequestClass.ONLINE


def decoding_in(plan, view):
    stopped = {preemption.rid for preemption in plan.preempt}
    return [r for r in view.running if r.rid not in plan.paused and r.rid not in stopped]


def has_offline_work(plan, view):
    known = {r.rid: r for r in (*view.unfinished, *view.online)}
    prefilled = any(rid not in known or not is_online(known[rid]) for rid in plan.prefill)
    return prefilled or not all(map(is_online, decoding_in(plan, view)))


def seconds_of(plan, view):
    """Predicted time of the iteration [s]."""
    totals = BatchTotals()
    totals.add_decodes([r.num_computed_tokens + 1 for r in decoding_in(plan, view)])
    unfinished = {r.rid: r.num_computed_tokens for r in view.unfinished}
    for rid, num_tokens in plan.prefill.items():
        num_cached = unfinished.get(rid)
        if num_cached is None:
            num_cached = view.match(view.waiting(rid)).cached
        totals.add_prefill(num_tokens, num_cached)
    return view.predictor.predict_s(totals)


def offline_limit_s(view, slo, budgets):
    """How long an iteration with offline work in it may take [s]: until the first deadline of an
    online request that can still keep it, and no longer than a burst; a share of the TTFT target
    where there is none. `slo`: of requests that name none of their own."""
    ends = []
    for request in filter(is_online, view.running):
        gap_s = budgets.aim * (request.slo.tpot_s or slo.tpot_s)
        num_gaps = request.num_computed_tokens + 1 - request.num_prompt_tokens
        # Without one, the first token comes while this is planned.
        first_s = view.start_s if request.first_token_s is None else request.first_token_s
        ends.append(first_s + gap_s * num_gaps)
    for request in filter(is_online, (*view.unfinished, *view.online)):
        due_s = request.arrival_s + (request.slo.ttft_s or slo.ttft_s)
        if due_s > view.start_s:
            ends.append(due_s)
    if not ends:
        return budgets.idle_share * slo.ttft_s
    return min(min(ends) - view.start_s, budgets.burst * slo.tpot_s)
