"""Offline requests in what online ones leave, or in exchange for one of them (BROS Alg. 1, lines 15
to 33)."""

from __future__ import annotations

from collections.abc import Sequence

from cosched.core.plan import SkipReason
from cosched.core.request import Request, RequestClass, num_tokens_of
from cosched.core.view import OfflineOrder
from cosched.papers.bros.packing import Packing, Within, put_aside
from cosched.schedule.following import follow
from cosched.schedule.phases import (
    admission_tokens,
    has_time,
    must_wait,
    offline_admissions_left,
    offline_tokens,
    owes_recomputing,
)

PATIENCE = 16
"""Admissions in a row that may pass over the front of the pool (own)."""

CANDIDATES = 8
"""Preempted requests in front of the pool of which the one with least to restore is next (own)."""

MOST_EXCHANGES = 16
"""Of one plan (own): the others follow in the next ones."""


def add_offline(packing: Packing, num_passed: int) -> int:
    """num_passed: admissions in a row that passed over the front of the pool. Returns their number
    after this plan."""
    builder = packing.builder
    pauses_any = packing.view.rules.partial and _decode(packing)
    if packing.decodes_only:
        return num_passed
    for request in builder.unfinished():
        if request.request_class is RequestClass.OFFLINE and request.traits.can_preempt:
            _continue_prefill(packing, request)
    order = packing.view.offline_order()
    reason = None
    if owes_recomputing(builder):
        reason = SkipReason.RECOMPUTE_DEBT
    elif builder.preempts_online_prefill():
        reason = SkipReason.UNFINISHED_PREFILL
    elif packing.is_short:
        reason = SkipReason.MEMORY_BUDGET
    elif pauses_any:
        reason = SkipReason.LATENCY_BUDGET
    if reason is None:
        return _Admission(packing, order, num_passed).run()
    front = next(order, None)
    if front is not None:
        builder.skip(front, reason)
    return num_passed


def _decode(packing: Packing) -> bool:
    """Running offline requests decode, oldest first. True: some pause."""
    decodes = packing.builder.running_of(RequestClass.OFFLINE)
    requests, contexts = decodes.requests, packing.builder.reads_of(decodes).tolist()
    num_fitting = _num_decodes_that_fit(packing, contexts)
    if num_fitting < len(requests):
        places = sorted(range(len(requests)), key=lambda i: requests[i].arrival_seq)
        requests = [requests[i] for i in places]
        contexts = [contexts[i] for i in places]
        num_fitting = _num_decodes_that_fit(packing, contexts)
    packing.add_decodes(contexts[:num_fitting])
    for _ in range(MOST_EXCHANGES):
        if num_fitting == len(requests) or not _exchange_decode(packing, contexts[num_fitting]):
            break
        num_fitting += 1
    rest = requests[num_fitting:]
    return len(packing.pause(rest, contexts[num_fitting:])) < len(rest)


def _num_decodes_that_fit(packing: Packing, contexts: Sequence[int]) -> int:
    most = max(packing.most - packing.size, 0)
    return Within(packing.builder, packing.offline_s).offline_decodes(contexts[:most])


def _exchange_decode(packing: Packing, context: int) -> bool:
    """A running offline request takes the place of the least urgent online one."""
    trial = packing.without_least_urgent()
    if trial is None or trial.ledger.seconds_with_decodes((context,)) > trial.limit_s:
        return False
    put_aside(trial.out, packing.builder)
    packing.exchange(trial, packing.builder)
    packing.add_decodes((context,))
    return True


def _continue_prefill(packing: Packing, request: Request) -> None:
    builder = packing.builder
    if packing.is_full and builder.runs_anything():
        builder.skip(request, SkipReason.BATCH_SIZE)
        return
    pace = Within(builder, packing.offline_s)
    at_most = offline_tokens(builder, pace, request, request.num_computed_tokens)
    packing.size += builder.continue_prefill(request, at_most)


class _Admission:
    """Waiting offline requests, one after the other until none fits. ahead: the first of the order
    that are not admitted."""

    def __init__(self, packing: Packing, order: OfflineOrder, num_passed: int) -> None:
        self._packing = packing
        self._view = packing.view
        self._order = order
        self._num_passed = num_passed
        self._ahead: list[Request] = []

    def run(self) -> int:
        order, ahead, view = self._order, self._ahead, self._view
        num_left = offline_admissions_left(self._packing.builder)
        reason = self._why_none_fits(num_left)
        if order.knows_prefixes and reason is None:
            for request in (*view.running, *view.unfinished):
                if request.num_output_tokens == 0:
                    follow(order, request, request.num_prefix_tokens)
        while reason is None:
            self._look_ahead()
            if not ahead:
                return self._num_passed
            front, request = ahead[0], self._next()
            if must_wait(self._packing.builder, request):
                ahead.remove(request)
                continue
            if not self._admit(request):
                builder = self._packing.builder
                if request is front or must_wait(builder, front) or not self._admit(front):
                    return self._num_passed
                request = front
            ahead.remove(request)
            follow(order, request, view.match(request).cached)
            self._num_passed = 0 if request is front else self._num_passed + 1
            num_left = None if num_left is None else num_left - 1
            reason = self._why_none_fits(num_left)
        first = ahead[0] if ahead else next(order, None)
        if first is not None:
            self._packing.builder.skip(first, reason)
        return self._num_passed

    def _look_ahead(self) -> None:
        """Up to `CANDIDATES` that were preempted, and the one behind them: by arrival what was
        preempted is older than what never ran."""
        ahead = self._ahead
        while len(ahead) < CANDIDATES and all(request.num_preemptions for request in ahead):
            request = next(self._order, None)
            if request is None:
                return
            ahead.append(request)

    def _next(self) -> Request:
        """Of those that were preempted the one with least to restore (line 17); the front where
        none was preempted, or has been passed over often enough."""
        preempted = [request for request in self._ahead if request.num_preemptions]
        if not preempted or self._num_passed >= PATIENCE:
            return self._ahead[0]
        matches = [(request, self._view.match(request)) for request in preempted]
        # Tokens of KV to load or to recompute (M^cpu, and what no host memory holds).
        need = [num_tokens_of(request) - match.cached + match.to_load for request, match in matches]
        return preempted[need.index(min(need))]

    def _why_none_fits(self, num_left: int | None) -> SkipReason | None:
        """Why no waiting offline request can be admitted at all; None: one may be. num_left: what
        the operator still allows; None: any number. Looks nothing up in the tree, which is the
        slowest part of a plan."""
        if num_left == 0:
            return SkipReason.OPERATOR_LIMIT
        if self._packing.builder.ledger.slots <= 0:
            return SkipReason.REQUEST_SLOTS
        reason = self._why_no_place()
        if reason is None:
            return None
        trial = self._packing.without_least_urgent()
        if trial is not None and trial.ledger.seconds_with(1, 0) <= trial.limit_s:
            return None
        return reason

    def _why_no_place(self) -> SkipReason | None:
        """Why not one prompt token more fits without an exchange."""
        packing, builder = self._packing, self._packing.builder
        if packing.is_full and builder.runs_anything():
            return SkipReason.BATCH_SIZE
        if not has_time(builder, Within(builder, packing.offline_s)):
            return SkipReason.LATENCY_BUDGET
        return None

    def _admit(self, request: Request) -> bool:
        packing, builder = self._packing, self._packing.builder
        reason = self._why_no_place()
        if reason is not None:
            builder.skip(request, reason)
            return self._exchange(request)
        match = self._view.match(request)
        pace = Within(builder, packing.offline_s)
        if not builder.admit(request, match, admission_tokens(builder, pace, request, match)):
            is_time = builder.skipped[request.rid] is SkipReason.LATENCY_BUDGET
            return is_time and self._exchange(request)
        packing.size += 1
        return True

    def _exchange(self, request: Request) -> bool:
        """It takes the place of the least urgent online request with its whole prompt: a part
        yields no token, and tokens are what is maximised (Eq. 1)."""
        packing = self._packing
        trial = packing.without_least_urgent()
        if trial is None:
            return False
        match = self._view.match(request)
        num_tokens = num_tokens_of(request) - match.cached
        if trial.ledger.seconds_with(num_tokens, match.cached) > trial.limit_s:
            return False
        builder = packing.builder.fork()
        put_aside(trial.out, builder)
        if (
            not builder.admit(request, match, num_tokens)
            or builder.prefill[request.rid] < num_tokens
        ):
            return False
        packing.exchange(trial, builder)
        packing.size += 1
        return True
