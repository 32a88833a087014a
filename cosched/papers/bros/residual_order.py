"""The order of online requests by residual time, and the limit of the iteration (BROS §4, Alg. 1,
lines 3 and 4).

Of an online request i at the start of the iteration (Table 1, Eq. 6)

    t_i        time since its latest token, before the first since its arrival; 0 where the token is
               on its way
    k_i        tokens left in its token group; of a prefill: chunks left
    residual   target - t_i - (k_i - 1) * mean iteration
    in the batch, its token is in time if     C <= residual
    left out, if it is in the next one and    C <= residual - mean iteration

C is the predicted time of the iteration.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from cosched.core.batch import BatchTotals
from cosched.core.request import Request, RequestClass, num_tokens_of
from cosched.papers.bros.config import BrosConfig
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.preemption import recompute_s


class Entry(NamedTuple):
    """An online request in the order of Alg. 1, line 3.

    context  tokens that its next decode attends to; 0: it has prompt tokens to compute
    """

    residual_s: float
    arrival_seq: int
    request: Request
    context: int


class ResidualOrder:
    """Running and waiting online requests of a plan that has not been filled yet.

    entries     most urgent first; with `late_last` those that cannot be in time behind those that
                can
    limit_s     T_min^res: the least residual that can still be met [s]
    shortest_s  predicted time of the shortest iteration [s]
    idle_s      most time of an iteration with offline work, for requests that arrive during it [s]
    """

    def __init__(
        self, builder: PlanBuilder, settings: PolicySettings, *, late_last: bool = False
    ) -> None:
        self._builder = builder
        self._view = builder.view
        self._slo = settings.slo
        assert isinstance(settings.own, BrosConfig | None), f"{type(settings.own)=}"
        self._group = (settings.own or BrosConfig()).token_group
        self.shortest_s = self._isolated_s(None, 1)
        self.idle_s = settings.budgets.idle_share * _target(None, self._slo.ttft_s)
        self.entries = self._by_residual()
        first = self._first_attainable()
        fixed_s, num_late = settings.latency_budget_s, 0
        self.limit_s = self._least_residual_s(first) if fixed_s is None else fixed_s
        if late_last and first is not None:
            self.entries = self.entries[first:] + self.entries[:first]
            num_late = first
        self._keep_unfinished_ahead(num_late)

    def _by_residual(self) -> list[Entry]:
        """The waiting ones are in order already where all have one target; sorting two ordered runs
        is merging them, which is what Fig. 8 is about. O(online requests)."""
        view, builder = self._view, self._builder
        start_s, mean_s = view.start_s, view.mean_iteration_s
        group = self._group
        default_s = _target(None, self._slo.tpot_s)
        entries: list[Entry] = []
        requests, contexts, _ = builder.running_of(RequestClass.ONLINE)
        for request, context in zip(requests, contexts.tolist(), strict=True):
            own_s = request.slo.tpot_s
            tpot_s = default_s if own_s is None else own_s
            residual_s = tpot_s
            # As `PlanBuilder.gap_s`, without its look at the context.
            if context <= num_tokens_of(request):
                last_s = request.last_token_s
                if last_s is not None:
                    residual_s -= start_s - last_s
            if group > 1:
                num_left = group - (context - request.num_prompt_tokens - 1) % group
                residual_s += (group - 1) * tpot_s
                residual_s -= (num_left - 1) * mean_s
            entries.append(Entry(residual_s, request.arrival_seq, request, context))
        for request in builder.unfinished():
            if request.request_class is RequestClass.ONLINE and request.traits.can_preempt:
                entries.append(self._prefill_entry(request))
        entries += map(self._prefill_entry, view.online)
        entries.sort()
        return entries

    def _prefill_entry(self, request: Request) -> Entry:
        num_tokens = num_tokens_of(request) - request.num_computed_tokens
        return Entry(self._residual_s(request, num_tokens), request.arrival_seq, request, 0)

    def _residual_s(self, request: Request, num_tokens: int) -> float:
        """Of a request with `num_tokens` to compute until its next token."""
        view = self._view
        last_s = request.last_token_s
        if last_s is None:
            target_s = _target(request.slo.ttft_s, self._slo.ttft_s)
            residual_s = target_s - (view.start_s - request.arrival_s)
        else:  # it was preempted
            target_s = self._group * _target(request.slo.tpot_s, self._slo.tpot_s)
            residual_s = target_s - (view.start_s - last_s)
        chunk = view.caps.max_chunk_tokens
        if chunk is not None and num_tokens > chunk:
            residual_s -= ((num_tokens - 1) // chunk) * view.mean_iteration_s
        return residual_s

    def _first_attainable(self) -> int | None:
        """Place of the most urgent one whose token would be in time in an iteration of its own
        (own)."""
        entries = self.entries
        for place in range(bisect_left(entries, (self.shortest_s,)), len(entries)):
            residual_s, _, request, context = entries[place]
            if residual_s >= self._isolated_s(request, context):
                return place
        return None

    def _least_residual_s(self, first: int | None) -> float:
        """first: place of the first attainable one. Where none is: the least TPOT target, or what
        the first request takes in an iteration of its own."""
        entries = self.entries
        if first is not None:
            return entries[first].residual_s
        if not entries:
            return self.idle_s
        tpot_s = min(_target(e.request.slo.tpot_s, self._slo.tpot_s) for e in entries)
        return max(tpot_s, self._isolated_s(entries[0].request, entries[0].context))

    def _isolated_s(self, request: Request | None, context: int) -> float:
        """Predicted time of an iteration of its own, with a chunk of its prompt at the most [s]."""
        totals = BatchTotals()
        if context:
            totals.add_decode(context)
        else:
            assert request is not None
            num_cached = request.num_computed_tokens or self._view.match(request).cached
            num_tokens = max(num_tokens_of(request) - num_cached, 1)
            chunk = self._view.caps.max_chunk_tokens
            totals.add_prefill(num_tokens if chunk is None else min(num_tokens, chunk), num_cached)
        return self._view.predictor.predict_s(totals)

    def _keep_unfinished_ahead(self, num_late: int) -> None:
        """An unfinished prefill has its place before the waiting requests that are not more urgent
        by more than preempting it costs (own). num_late: entries at the end that cannot be in time.

        It is as urgent as if it had computed nothing, and by the time that recomputing takes:
        progress must not make it give way, or two prompts of nearly equal residual times would
        preempt each other in every iteration.
        """
        entries, view = self.entries, self._view
        unfinished = {request.rid: request for request in self._builder.unfinished()}
        for place in range(len(entries)) if unfinished else ():
            request = unfinished.get(entries[place].request.rid)
            if request is None:
                continue
            residual_s = self._residual_s(request, num_tokens_of(request))
            residual_s -= recompute_s(view, request)
            num_ahead = len(entries) - num_late
            for before in range(0 if place < num_ahead else num_ahead, place):
                entry = entries[before]
                if not entry.context and entry.residual_s >= residual_s:
                    entries.insert(before, entries.pop(place))
                    break


def _target(own_s: float | None, default_s: float | None) -> float:
    """A request's own target, or the server's."""
    target_s = default_s if own_s is None else own_s
    assert target_s is not None, "the server's targets are always set"
    return target_s
