"""EcoServe: prompts fill the compute, generations fill the memory, by the lengths they will have.

Idea         a prompt (PT) takes KV for itself alone. Once computed it waits as a generation task
             (GT), its KV kept, until KV for all of its predicted output can be set aside; then it
             runs to its end without an allocation that could fail. GTs of one length run as a
             group and end together, so the next ones are chosen seldom. What a GT will need only
             later it lends: a shorter one runs there and ends before.
Assumptions  lengths are predicted well enough (docs/architecture.md); prefill and decode share an
             iteration; a running request can pause with its KV kept; what matters of a request is
             when it is complete.
Good         no preemptions and no recomputing while predictions hold; all memory is in use.
Bad          a GT that waits is a gap in the output: no TPOT target is considered, nor the predicted
             time of an iteration. Nothing is shared, so neither prefixes nor evictions matter.
Parameters   `EcoConfig`; how lengths are estimated (`length` in the configuration).

Steps of a plan (Alg. 1)
1. `_settle`: requests that ended leave their groups. One that is longer than its promise is
   promised what it is now expected to need, from the reserve too; where that is not there it waits
   as a GT, its KV kept (offload-free). A guest whose host comes near gets KV of its own likewise,
   or is preempted.
2. `_choose`: if a group is complete, groups of GTs in order until the KV memory is full but for the
   reserve; then guests for them.
3. `_pause_others`: all other GTs pause.
4. `add_prompts`: prompts in order until the iteration has the target forward size.

The order of both queues (§3.3) is `Work.order`; where the next entry does not fit, the longest that
does is found by binary search. Deviations from the paper, with reasons: docs/policies.md.
"""

from __future__ import annotations

import msgspec

from cosched.core.plan import Plan, SkipReason
from cosched.core.request import Request
from cosched.core.view import View
from cosched.papers.ecoserve.forward_size import target_forward_size
from cosched.papers.ecoserve.generation_plan import EcoOptions, Generations, Work, is_impatient
from cosched.papers.ecoserve.hosting import find_guests
from cosched.papers.ecoserve.prompts import add_prompts
from cosched.papers.ecoserve.queues import Entry, Promises, begins_online, entries, fill, remove
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.phases import Steps, must_decode, preempt_beyond_limit, youngest_first

REFRESHED = 512
"""Plans after which the target forward size is computed again: the predictor learns."""

_ALL = EcoOptions()


class EcoServePolicy:
    """Alg. 1. See the module's docstring."""

    initial = Generations()

    def __init__(self, settings: PolicySettings, options: EcoOptions = _ALL) -> None:
        self._settings = settings
        self._options = options

    def plan(self, view: View, state: Generations) -> tuple[Plan, Generations]:
        state = msgspec.structs.replace(state, num_plans=state.num_plans + 1)
        if not state.forward_size or state.num_plans >= REFRESHED:
            size = target_forward_size(view.predictor)
            state = msgspec.structs.replace(state, forward_size=size, num_plans=0)
        builder = PlanBuilder(view)
        preempt_beyond_limit(builder, Steps())
        work = Work(builder, self._settings, self._options, state)
        _settle(work)
        _choose(work)
        _pause_others(work)
        # What is preempted may be on its way to host memory, and not free yet.
        if not builder.num_preempted and not must_decode(builder):
            add_prompts(work)
        after = msgspec.structs.replace(
            state,
            groups=work.groups,
            guests=work.guests,
            regions=work.regions,
            is_due=work.is_due,
        )
        return builder.build(), after


def _settle(work: Work) -> None:
    """Step 1."""
    running, groups = work.running, work.groups
    for rid in groups.keys() - running.keys():
        work.leave(rid)
    for rid, (host, offset) in list(work.guests.items()):
        if host not in groups or running[host].num_output_tokens >= offset:
            work.settle_guest(running[rid])
    progress = work.progress.items()
    outgrown = {rid for rid, (num_output, most) in progress if (most or 0) <= num_output}
    for rid in [rid for rid in groups if rid in outgrown] if outgrown else ():
        if rid not in work.guests and not work.promise_more(running[rid]):
            request = running[rid]
            work.leave(rid)
            if work.config.overrun == "offload":
                work.preempt(request, work.offload_mode)


def _choose(work: Work) -> None:
    """Step 2: GTs until the KV is full, and guests for them."""
    bound = {request.rid for request in work.view.cannot_pause(work.waiting())}
    waiting = [request for request in work.waiting() if request.rid not in bound]
    if not waiting:
        return
    if not (work.is_due or not work.groups or any(map(is_impatient, waiting))):
        return
    queue = entries(work, waiting)
    account = Promises(work, work.reserve)
    work.start(fill(queue, account, by_search=work.options.ordered))
    _make_room_for_online(work, queue)
    if not work.groups:
        _start_one(work, queue)
    work.is_due = not queue or not work.waits_for_groups
    if work.options.pipeline and queue:
        find_guests(work, queue)


def _make_room_for_online(work: Work, queue: list[Entry]) -> None:
    """Offline requests are preempted for online ones that nothing could be set aside for (own)."""
    for victim in youngest_first(work.builder) if begins_online(queue) else ():
        if victim.rid in work.running:
            work.preempt(victim)
            remove(queue, victim)
            work.start(fill(queue, Promises(work, 0), by_search=False))
            if not begins_online(queue):
                return


def _start_one(work: Work, queue: list[Entry]) -> None:
    """Nothing runs: the reserve is given out too, each request alone, and the last of those that
    wait are preempted until one can run. One that is left alone runs in any case."""
    singles = [
        entry._replace(length=work.length(request), members=[request])
        for entry in queue
        for request in entry.members
    ]
    while not (chosen := fill(singles, Promises(work, 0), by_search=True)):
        last = singles[-1].members[0]
        if len(singles) == 1 or not last.traits.can_preempt:
            chosen = [[last]]
            break
        del singles[-1]
        remove(queue, last)
        work.preempt(last)
    for members in chosen:
        remove(queue, members[0])
    work.start(chosen)


def _pause_others(work: Work) -> None:
    """Step 3: GTs that wait pause, but for those whose next token is due (decision 5); active ones
    too, the last chosen first, where there is not even room for a token of each."""
    builder, ledger = work.builder, work.builder.ledger
    due: list[Request] = []
    rest: list[Request] = []
    for request in work.waiting():
        (due if _is_token_due(work, request) else rest).append(request)
    builder.pause_all(rest, SkipReason.MEMORY_BUDGET)
    if ledger.decodes_fit():
        return
    active = [*map(work.running.__getitem__, work.groups), *due]
    while not ledger.decodes_fit() and len(active) > 1:
        request = active.pop()
        if request.rid in work.groups:
            work.leave(request.rid)
        builder.pause(request, SkipReason.MEMORY_BUDGET)
    if ledger.decodes_fit():
        return
    # What holds memory and generates nothing goes first, of either class.
    for victim in [r for r in builder.unfinished() if r.traits.can_preempt]:
        builder.preempt(victim)
        if ledger.decodes_fit():
            return
    others = [r for r in work.running.values() if r not in active and r.traits.can_preempt]
    for victim in (*youngest_first(builder), *reversed(others)):
        if victim.rid in work.running:
            work.preempt(victim)
        if ledger.decodes_fit():
            return


def _is_token_due(work: Work, request: Request) -> bool:
    """An online request with a TPOT target that it would miss by pausing."""
    first_s, tpot_s = request.first_token_s, request.slo.tpot_s or work.tpot_s
    if not is_impatient(request) or first_s is None or tpot_s is None:
        return False
    due_s = first_s + tpot_s * request.num_output_tokens
    return work.view.start_s + work.view.mean_iteration_s > due_s
