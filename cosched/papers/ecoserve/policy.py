"""EcoServe: prompts fill the compute, generations fill the memory, by the lengths they will have.

Idea         a prompt (PT) takes KV for itself alone. Once computed it waits as a generation task
             (GT), its KV kept, until KV for all of its predicted output can be set aside; then it
             runs to its end without an allocation that could fail. GTs of one length run as a
             group and end together, so the next ones are chosen seldom. What a GT will need only
             later it lends: a shorter one runs there and is gone by then.
Assumptions  lengths are predicted well enough (docs/predict.md); prefill and decode share an
             iteration; a running request can sit out with its KV kept; what matters of a request
             is when it is complete.
Good         no stops and no recomputing while predictions hold; memory is full of what is used.
Bad          a GT that waits is a gap in the output: no TPOT target is looked at, nor the predicted
             time of an iteration. Nothing is shared, so neither prefixes nor evictions matter.
Parameters   `EcoConfig`; what is believed of lengths (`length` in the configuration).

Steps of a plan (Alg. 1)
1. Requests that ended leave their groups. One that outran its promise is promised what it is now
   believed to need, from the reserve too; where that is not there it waits as a GT, its KV kept
   (offload-free). A guest whose host comes near gets KV of its own likewise, or is stopped.
2. If a group is complete: groups of GTs in order until the KV memory is full but for the reserve.
3. Guests for them: half of what a GT of length l was promised it needs after l/2 more tokens only,
   so one of length below l/2 less the buffer runs there; both halves lend again (§3.4).
4. All other GTs sit out. Prompts in order until the iteration has the target forward size.

Order (§3.3), of both queues: time to the deadline by range, then occupied KV by range, most first,
then length by range, longest first; where what is next does not fit, the longest that does, by
binary search.

Deviations from the paper, each for a reason (docs/policies/ecoserve.md has more of them)
* Contiguous space has no meaning where any token may lie in any slot: allocation and hosting are
  sums that must fit at every iteration to come. Several levels of hosts are one: a guest of a guest
  counts towards the outermost host, and has to end by that one's position.
* "Until the KV is full" is literal: after a group has ended choosing goes on with each plan until
  some GT does not fit.
* The new length of a GT that outran its promise (L_new = predicted - generated in the paper, which
  is nothing then) is what is believed of its remaining output.
* The buffer is a share of the guest's length: a share of the host's leaves nothing for the third
  level.
* A host that has no guest lends anew whenever GTs are chosen, not only when it was chosen itself.
* While GTs wait, prompts take no more KV than the reserve holds beside those that wait already:
  their KV would be missing for what could run.
* Online requests come first in each order, and one for which nothing can be set aside stops offline
  ones; guests are offline requests, and online ones with a deadline of their own far off (own).
* Of prompts that wait the first `WINDOW` of each class are looked at.
* Where nothing runs and nothing can be promised, the last of the GTs is stopped, its KV cached.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeAlias

import msgspec

from cosched.core.batch import BatchTotals
from cosched.core.plan import Plan, PreemptMode, SkipReason
from cosched.core.request import Request, RequestClass, num_tokens_of
from cosched.core.view import View
from cosched.papers.ecoserve.forward_size import target_forward_size
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.phases import (
    Steps,
    is_turn_of_decodes,
    must_wait,
    offline_room,
    stop_beyond_limit,
    youngest_first,
)

WINDOW = 128
"""Waiting prompts of each class that are looked at (own)."""

REFRESHED = 512
"""Plans after which the target forward size is worked out again: the predictor learns."""

_RANGES_S = (0.2, 0.5, 2.0)
"""Of the time to a deadline (§3.3)."""

_LENGTH_RANGE = 128
"""Tokens of a range of lengths, and of occupied KV (§3.3)."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What is carried from plan to plan.

    groups        rid of a GT that runs -> number of its group
    guests        those of them that are hosted: rid -> (rid of the host, its output tokens by which
                  the guest is to be gone)
    regions       rid of a host -> (its output tokens when it began to lend, tokens promised then)
    is_due        a group has ended, and not all the KV has been given out since
    forward_size  target [tokens]
    num_plans     since it was worked out
    """

    groups: Mapping[str, int] = {}
    guests: Mapping[str, tuple[str, int]] = {}
    regions: Mapping[str, tuple[int, int]] = {}
    is_due: bool = True
    forward_size: int = 0
    num_plans: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EcoOptions:
    """In what the ablations differ.

    synced    GTs of one length are a group, and new ones are chosen where one has ended
    ordered   both queues are ordered, and searched for what fits; False: by arrival
    pipeline  GTs run in KV that others were promised and do not need yet
    """

    synced: bool = True
    ordered: bool = True
    pipeline: bool = True


_ALL = EcoOptions()
_STEPS = Steps()


class EcoServePolicy:
    """Alg. 1. See the module's docstring."""

    initial = Batch()

    def __init__(self, settings: PolicySettings, options: EcoOptions = _ALL) -> None:
        self._settings = settings
        self._options = options

    def plan(self, view: View, carry: Batch) -> tuple[Plan, Batch]:
        size, num_plans = carry.forward_size, carry.num_plans + 1
        if not size or num_plans >= REFRESHED:
            size, num_plans = target_forward_size(view.predictor), 0
        builder = PlanBuilder(view)
        stop_beyond_limit(builder, _STEPS)
        work = _Work(builder, self._settings, self._options, carry, size)
        work.settle()
        work.choose()
        work.hold_others()
        # What is stopped may be on its way to host memory, and not free yet.
        if not builder.num_preempted and not is_turn_of_decodes(builder):
            work.add_prompts()
        after = Batch(
            groups=work.groups,
            guests=work.guests,
            regions=work.regions,
            is_due=work.is_due,
            forward_size=size,
            num_plans=num_plans,
        )
        return builder.build(), after


_Order: TypeAlias = tuple[int, int, int, int, int]


class _Entry(NamedTuple):
    """GTs of one length, or one alone.

    order   see `_Work._order`: of its first member
    length  tokens for which KV is set aside, of each
    """

    order: _Order
    length: int
    members: list[Request]

    @property
    def band(self) -> tuple[int, ...]:
        """What comes first whatever fits."""
        return self.order[:2]


_Place: TypeAlias = tuple[int, Request, int, int, tuple[int, int]]
"""Where guests may grow: tokens that one may take, and until its host needs them; the host; output
tokens of it by which they are to be gone; guests that find room; see `Batch.regions`. No class:
hundreds of hosts have thousands of them."""


class _Work:
    """One plan under construction.

    running  rid -> request past its prefill that is not stopped
    groups, guests, regions, is_due: as in `Batch`
    """

    def __init__(
        self,
        builder: PlanBuilder,
        settings: PolicySettings,
        options: EcoOptions,
        carry: Batch,
        forward_size: int,
    ) -> None:
        self.builder = builder
        self.view = view = builder.view
        self.config = config = settings.ecoserve
        self._tpot_s = settings.slo.tpot_s
        self.options = options
        self.reserve = int(config.reserve * view.kv.total)
        running = view.running
        rids = [request.rid for request in running]
        self.running = dict(zip(rids, running, strict=True))
        self._progress = dict(zip(rids, zip(*view.progress(), strict=True), strict=True))
        """Rid of a running request -> output tokens, those for which KV was set aside before."""
        if builder.num_preempted:
            self.running = {k: r for k, r in self.running.items() if not builder.is_preempted(r)}
        self.groups = dict(carry.groups)
        self.guests = dict(carry.guests)
        self.regions = dict(carry.regions)
        self.is_due = carry.is_due
        self._size = forward_size
        self._page = view.caps.page_size
        self._block = view.caps.ceil_to_page(max(config.block, self._page))
        self._next_group = max(carry.groups.values(), default=0) + 1
        self._waits_for_groups = options.synced and config.replan_on == "group"
        self._lengths: dict[str, int] = {}
        self._least_place = max(_LEAST_PLACE, self._page + 1)

    def length(self, request: Request) -> int:
        """Tokens of KV, in whole pages, for the output that it is still to generate."""
        length = self._lengths.get(request.rid)
        if length is None:
            view = self.view
            length = view.caps.ceil_to_page(max(view.length(request).upper, 1))
            self._lengths[request.rid] = length
        return length

    @property
    def num_unfinished_tokens(self) -> int:
        """KV that prompts under way still take."""
        return sum(num_tokens_of(r) - r.num_computed_tokens for r in self.builder.unfinished())

    def waiting(self) -> list[Request]:
        """GTs that wait."""
        groups = self.groups
        if len(groups) == len(self.running):
            return []
        return [r for rid, r in self.running.items() if rid not in groups]

    def runs_anything(self) -> bool:
        return bool(self.groups or self.builder.prefill)

    def is_patient(self, request: Request) -> bool:
        """It may be a guest: its SLO is loose (§3.4)."""
        if request.request_class is RequestClass.OFFLINE:
            return True
        return request.slo.deadline_s is not None and self._time_range(request) == len(_RANGES_S)

    # Step 1

    def settle(self) -> None:
        """Those that ended are no more, and those that go on beyond what they were promised get
        more, or wait."""
        running = self.running
        for rid in self.groups.keys() - running.keys():
            self._leave(rid)
        for rid, (host, offset) in list(self.guests.items()):
            if host not in self.groups or running[host].num_output_tokens >= offset:
                self._settle_guest(running[rid])
        progress = self._progress.items()
        outgrown = {rid for rid, (num_output, most) in progress if (most or 0) <= num_output}
        for rid in [rid for rid in self.groups if rid in outgrown] if outgrown else ():
            if rid not in self.guests:
                self._extend(running[rid])

    def _leave(self, rid: str) -> None:
        """It does not run, or not as a GT for which KV is set aside."""
        group = self.groups.pop(rid)
        self.guests.pop(rid, None)
        self.regions.pop(rid, None)
        if not self._waits_for_groups or group not in self.groups.values():
            self.is_due = True

    def _extend(self, request: Request) -> None:
        """KV for what it is now believed to need, or for a block; else it waits."""
        if not any(self._promise(request, n) for n in (self.length(request), self._block)):
            self._leave(request.rid)
            if self.config.overrun == "offload":
                self._stop(request, _offload_mode(self.view))

    def _settle_guest(self, guest: Request) -> None:
        """Its host needs the KV, or is over: it is promised some of its own. Nothing ahead of it
        where there is no more, and it waits; it is stopped where even what it holds is missing."""
        del self.guests[guest.rid]
        if any(self._promise(guest, n) for n in (self.length(guest), self._block)):
            return
        self._leave(guest.rid)
        if not self._promise(guest, 0):
            self._stop(guest, _offload_mode(self.view))

    def _promise(self, request: Request, num_tokens: int) -> bool:
        """Set KV aside for so many more tokens, of the reserve too where that is meant for it.
        False: there is none, and nothing is set aside ahead of it."""
        self.set_aside(request, num_tokens)
        least = self.reserve if num_tokens and self.config.overrun != "reserve" else 0
        if self.builder.ledger.headroom >= least:
            return True
        self.set_aside(request, 0)
        return False

    def set_aside(self, request: Request, num_tokens: int) -> None:
        """KV for so many more tokens of its output, but not beyond its limit."""
        num_now = request.num_output_tokens
        most = max(request.max_new_tokens, num_now)
        self.builder.promise(request, min(num_now + num_tokens, most))

    def _stop(self, request: Request, mode: PreemptMode | None = None) -> None:
        if request.rid in self.groups:
            self._leave(request.rid)
        self.builder.preempt(request, mode)
        del self.running[request.rid]
        for rid, (host, _) in list(self.guests.items()):
            if host == request.rid:
                self._settle_guest(self.running[rid])

    # Step 2

    def choose(self) -> None:
        """GTs until the KV is full, and guests for them."""
        waiting = [r for r in self.waiting() if self.view.can_hold(r)]
        if not waiting:
            return
        if not (self.is_due or not self.groups or any(map(_is_impatient, waiting))):
            return
        queue = self._entries(waiting)
        account = _Promises(self, self.reserve)
        self._start(_fill(queue, account, by_search=self.options.ordered))
        self._make_room_for_online(queue)
        if not self.groups:
            self._start_somebody(queue)
        self.is_due = not queue or not self._waits_for_groups
        if self.options.pipeline and queue:
            self._find_guests(queue)

    def _start(self, chosen: Iterable[Sequence[Request]]) -> None:
        for members in chosen:
            self.groups.update(dict.fromkeys((r.rid for r in members), self._next_group))
            self._next_group += 1

    def _make_room_for_online(self, queue: list[_Entry]) -> None:
        """Offline requests stop for online ones that nothing could be set aside for (own)."""
        for victim in youngest_first(self.builder) if _begins_online(queue) else ():
            if victim.rid in self.running:
                self._stop(victim)
                _remove(queue, victim)
                self._start(_fill(queue, _Promises(self, 0), by_search=False))
                if not _begins_online(queue):
                    return

    def _start_somebody(self, queue: list[_Entry]) -> None:
        """Nothing runs: the reserve is given out too, to anybody alone, and the last of those that
        wait stop until somebody can run. Who is left alone runs whatever there is."""
        singles = [
            entry._replace(length=self.length(request), members=[request])
            for entry in queue
            for request in entry.members
        ]
        while not (chosen := _fill(singles, _Promises(self, 0), by_search=True)):
            last = singles[-1].members[0]
            if len(singles) == 1 or not last.traits.can_stop:
                chosen = [[last]]
                break
            del singles[-1]
            _remove(queue, last)
            self._stop(last)
        for members in chosen:
            _remove(queue, members[0])
        self._start(chosen)

    def _entries(self, waiting: Sequence[Request]) -> list[_Entry]:
        """The GT queue in order."""
        gain = self.view.preemption_gain
        singles = []
        for request in waiting:
            length = self.length(request)
            singles.append(_Entry(self._order(request, gain(request), length), length, [request]))
        singles.sort(key=attrgetter("order"))
        if not self.options.synced:
            return singles
        found: dict[tuple[int, int], _Entry] = {}
        for entry in singles:
            like = entry.order[0], -(-entry.length // self._block)
            group = found.get(like)
            if group is not None:
                # All of them run until the longest ends.
                entry = group._replace(
                    length=max(group.length, entry.length), members=group.members + entry.members
                )
            found[like] = entry
        return list(found.values())

    def _order(self, request: Request, num_held: int, length: int) -> _Order:
        """Of either queue: class, range of the deadline, of the KV held and of the length, each
        with what comes first as the least; then arrival."""
        is_offline = int(request.request_class is RequestClass.OFFLINE)
        if not self.options.ordered:
            return is_offline, 0, 0, 0, request.arrival_seq
        num_held, length = num_held // _LENGTH_RANGE, length // _LENGTH_RANGE
        return is_offline, self._time_range(request), -num_held, -length, request.arrival_seq

    def _time_range(self, request: Request) -> int:
        """Of the time to its deadline: its own, or what the configuration allows a request of its
        length (§4: SLO scale * (prompt + output tokens at their mean times))."""
        view = self.view
        own_s = request.slo.deadline_s
        if own_s is None:
            scale, token_s = self.config.slo_scale, view.mean_iteration_s
            prompt_s = request.num_prompt_tokens * self._prompt_token_s
            # Asked of all that is looked at, in each plan: its length only where that decides.
            most_s = scale * (prompt_s + request.max_new_tokens * token_s)
            if request.arrival_s + most_s - view.now_s <= _RANGES_S[0]:
                return 0
            num_output = request.num_output_tokens + view.length(request).median
            own_s = scale * (prompt_s + num_output * token_s)
        return bisect_left(_RANGES_S, request.arrival_s + own_s - view.now_s)

    @cached_property
    def _prompt_token_s(self) -> float:
        """What a token of a prompt takes in the mean [s]."""
        totals = BatchTotals()
        totals.add_prefill(self._size, 0)
        return self.view.predictor.predict_s(totals) / self._size

    # Step 3

    def _find_guests(self, queue: list[_Entry]) -> None:
        """GTs that wait run in what others were promised and need only later."""
        ledger = self.builder.ledger
        patient = [
            (entry.length, request)
            for entry in queue
            for request in entry.members
            # One that still counts as another's guest would take what it has there along.
            if self.is_patient(request) and ledger.price(request, request.num_output_tokens) <= 0
        ]
        if not patient:
            return
        patient.sort(key=lambda item: item[0])
        lengths = [length * (1 + self.config.buffer) for length, _ in patient]
        if lengths[0] >= self.longest_place():
            return
        for num_tokens, host, offset, num_free, region in self.places():
            for _ in range(num_free):
                found = bisect_left(lengths, num_tokens) - 1
                if found < 0:
                    return
                del lengths[found]
                guest = patient.pop(found)[1]
                self.builder.host(guest, host, offset)
                self.guests[guest.rid] = (host.rid, offset)
                self.regions[host.rid] = region
                self._start([[guest]])

    def places(self) -> list[_Place]:
        """Where guests may grow, the longest first: of `l` tokens promised to a host one place of
        l/2, two of l/4 and so on, each until the host has come so far (§3.4). O(active)."""
        taken = Counter(self.guests.values())
        lending = {host for host, _ in self.guests.values()}
        page = self._page
        found = []
        for rid, now, region in self._hosts():
            start, size = region
            for level in range(1, _MOST_LEVELS):
                offset = start + (size >> level) // page * page
                if offset - now < self._least_place:
                    break
                count = 1 << (level - 1)
                if rid in lending:
                    count -= taken[rid, offset]
                if count > 0:
                    found.append((offset - now, self.running[rid], offset, count, region))
        found.sort(key=itemgetter(0), reverse=True)
        return found

    def longest_place(self) -> int:
        """Tokens that none of `places` has more of, at a fraction of its price; 0: there is none.
        O(active)."""
        tokens = (start + (size >> 1) - now for _, now, (start, size) in self._hosts())
        longest = max(tokens, default=0)
        return longest if longest >= self._least_place else 0

    def _hosts(self) -> Iterator[tuple[str, int, tuple[int, int]]]:
        """Who may lend: rid, output tokens so far, and its region (`Batch.regions`), which is drawn
        anew where it lends nothing."""
        lending = {host for host, _ in self.guests.values()}
        self.regions = regions = {rid: r for rid, r in self.regions.items() if rid in lending}
        promises = self.builder.ledger.promises
        for rid in self.groups:
            if rid not in self.guests:
                now, promised = self._progress[rid]
                region = regions.get(rid)
                if region is None:
                    region = now, (promises.get(rid) or promised or 0) - now
                yield rid, now, region

    # Step 4

    def hold_others(self) -> None:
        """GTs that wait sit out, but for those whose next token is due (decision 5); those that run
        too, the last chosen first, where not even a token of each has room."""
        builder, ledger = self.builder, self.builder.ledger
        due: list[Request] = []
        rest: list[Request] = []
        for request in self.waiting():
            (due if self._is_token_due(request) else rest).append(request)
        builder.hold_all(rest, SkipReason.MEMORY_BUDGET)
        if ledger.available >= 0:
            return
        active = [*map(self.running.__getitem__, self.groups), *due]
        while ledger.available < 0 and len(active) > 1:
            request = active.pop()
            if request.rid in self.groups:
                self._leave(request.rid)
            builder.hold(request, SkipReason.MEMORY_BUDGET)
        if ledger.available < 0:
            # What holds memory and generates nothing goes first, whoever it is for.
            for victim in [r for r in builder.unfinished() if r.traits.can_stop]:
                builder.preempt(victim)
                if ledger.available >= 0:
                    return
            others = [r for r in self.running.values() if r not in active and r.traits.can_stop]
            for victim in (*youngest_first(builder), *reversed(others)):
                if victim.rid in self.running:
                    self._stop(victim)
                if ledger.available >= 0:
                    break

    def _is_token_due(self, request: Request) -> bool:
        """An online request with a TPOT target that would miss it by sitting out."""
        first_s, tpot_s = request.first_token_s, request.slo.tpot_s or self._tpot_s
        if not _is_impatient(request) or first_s is None or tpot_s is None:
            return False
        due_s = first_s + tpot_s * request.num_output_tokens
        return self.view.start_s + self.view.mean_iteration_s > due_s

    def add_prompts(self) -> None:
        """Prompts until the iteration has the target forward size: whole ones in order, then the
        longest that fit, then a part of one (decision 7)."""
        builder = self.builder
        for request in builder.unfinished():
            left = max(self._size - len(self.groups), _LEAST_CHUNK)
            if not builder.go_on(request, left, unreserved=True):
                return
        queue, cut = deque(self._prompts() if builder.ledger.slots > 0 else ()), None
        if not queue:
            return
        gate = _Gate(self)
        room = offline_room(builder)
        misses, most = (_MOST_MISSES if self.options.ordered else 0), sys.maxsize
        is_searched = False
        while queue and builder.ledger.slots > 0:
            num_tokens, request = queue.popleft()
            if num_tokens >= most or must_wait(builder, request):
                continue
            left = self._left()
            if left <= 0 and self.runs_anything():
                break
            is_offline = request.request_class is RequestClass.OFFLINE
            if is_offline and room == 0:
                builder.skip(request, SkipReason.OPERATOR_LIMIT)
                continue
            if (
                cut is None
                and num_tokens > left > 0
                and num_tokens - self.view.match(request).cached > left
            ):
                cut = request
                queue = deque(_shorter(queue, left) if self.options.ordered else ())
            elif self._admit(gate, request, left):
                if is_offline and room is not None:
                    room -= 1
            elif not misses:
                break
            else:
                misses, most = misses - 1, builder.ledger.headroom
                if not is_searched:
                    queue, is_searched = gate.those_that_fit(queue), True
        if cut is None or (room == 0 and cut.request_class is RequestClass.OFFLINE):
            return
        if self._left() >= _LEAST_CHUNK or not self.runs_anything():
            self._admit(gate, cut, self._left())

    def _left(self) -> int:
        """Tokens that the iteration lacks of its target."""
        return self._size - len(self.groups) - sum(self.builder.prefill.values())

    def _admit(self, gate: _Gate, request: Request, left: int) -> bool:
        builder = self.builder
        if not gate.lets_in(request):
            builder.skip(request, SkipReason.MEMORY_BUDGET)
            return False
        builder.promise(request, request.num_output_tokens)
        if builder.admit(request, self.view.match(request), max(left, _LEAST_CHUNK)):
            return True
        del builder.ledger.promises[request.rid]
        return False

    def _prompts(self) -> list[tuple[int, Request]]:
        """Waiting prompts in order, each behind its tokens."""
        view = self.view
        waiting = chain(islice(view.online, WINDOW), islice(view.offline_order(), WINDOW))
        sized = [(num_tokens_of(request), request) for request in waiting]
        if self.options.ordered:
            sized.sort(key=lambda item: self._order(item[1], 0, item[0]))
        return sized


class _Gate:
    """Which prompts are let in: those that can run once they are computed, as guests or in KV of
    their own; and as many more as the reserve holds, for the next GTs to be chosen from."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._account = _Promises(work, work.reserve)
        self._pinned = sum(map(work.view.preemption_gain, work.waiting()))

    @cached_property
    def _longest_place(self) -> int:
        return self._work.longest_place() if self._work.options.pipeline else 0

    @cached_property
    def _places(self) -> tuple[list[int], list[int]]:
        """That are free: tokens of each, rising, and the guests that find room."""
        places = self._work.places()[::-1] if self._longest_place else []
        return [place[0] for place in places], [place[3] for place in places]

    def lets_in(self, request: Request) -> bool:
        work = self._work
        length = work.length(request)
        if work.is_patient(request) and self._takes_place(
            length * (1 + work.config.buffer) + _BEYOND
        ):
            return True
        num_tokens = _kv_of(work.view, request)
        if work.is_due and self._account.add(num_tokens, length):
            return True
        if self._pinned + num_tokens > work.reserve and work.runs_anything():
            return False
        self._pinned += num_tokens
        return True

    def those_that_fit(self, queue: Iterable[tuple[int, Request]]) -> deque[tuple[int, Request]]:
        """Of prompts in order those that may be let in. Many that are too long come before one that
        fits: prompts are ordered by their own lengths, and places are taken by those of outputs."""
        work = self._work
        longest = 0.0
        if work.is_due:
            longest = self._account.most
        room = work.reserve - self._pinned
        beyond = max(longest, self._guest_of(self._longest_place))
        found = deque(item for item in queue if item[0] <= room or work.length(item[1]) <= beyond)
        if found and beyond > longest:
            longest = max(longest, self._guest_of(self._places[0][-1] if self._places[0] else 0))
            found = deque(
                item for item in found if item[0] <= room or work.length(item[1]) <= longest
            )
        return found

    def _guest_of(self, num_tokens: int) -> float:
        """Length of the longest guest of a place."""
        return (num_tokens - _BEYOND) / (1 + self._work.config.buffer)

    def _takes_place(self, num_tokens: float) -> bool:
        """It is computed first, and then a guest."""
        if num_tokens > self._longest_place:
            return False
        sizes, free = self._places
        found = bisect_left(sizes, num_tokens)
        if found == len(sizes):
            return False
        free[found] -= 1
        if not free[found]:
            del sizes[found], free[found]
        return True


class _Promises:
    """Exact allocation: what is set aside for all outputs, in full, leaves the reserve."""

    def __init__(self, work: _Work, reserve: int) -> None:
        self._work = work
        self._ledger = work.builder.ledger
        self._least = reserve + work.num_unfinished_tokens

    def take(self, request: Request, length: int) -> bool:
        """Set KV aside for a GT that waits. False: it does not fit."""
        if not self.fits(request, length):
            return False
        self._work.set_aside(request, length)
        return True

    def fits(self, request: Request, length: int) -> bool:
        num_tokens = request.num_output_tokens + length
        return self._ledger.price(request, num_tokens) <= self._ledger.headroom - self._least

    @property
    def most(self) -> int:
        """Tokens of an output beyond which no prompt can be added."""
        return self._ledger.headroom - self._least

    def add(self, num_tokens: int, length: int) -> bool:
        """Remember that a prompt will run once it is computed. False: it could not."""
        if num_tokens + length > self._ledger.headroom - self._least:
            return False
        self._least += length
        return True


def _kv_of(view: View, request: Request) -> int:
    """KV tokens that computing a prompt takes."""
    match = view.match(request)
    return num_tokens_of(request) - match.cached + match.host + match.evictable


def _fill(queue: list[_Entry], account: _Promises, *, by_search: bool) -> list[list[Request]]:
    """Take entries in order until one does not fit, of which as many members as do; with a search
    then the longest that fit of each band. Returns what was taken; the queue has the others."""
    chosen: list[list[Request]] = []
    while queue:
        entry = queue[0]
        chosen.append(_take(entry, account))
        if entry.members:
            break
        del queue[0]
    if by_search:
        for band in dict.fromkeys(entry.band for entry in queue):
            here = sorted((e for e in queue if e.band == band), key=lambda e: e.length)
            while here:
                # Those that fit are the shorter ones.
                place = bisect_left(
                    here, True, key=lambda e: not account.fits(e.members[0], e.length)
                )
                if not place:
                    break
                chosen.append(_take(here.pop(place - 1), account))
        queue[:] = [entry for entry in queue if entry.members]
    return [members for members in chosen if members]


def _take(entry: _Entry, account: _Promises) -> list[Request]:
    """As many members as fit."""
    taken: list[Request] = []
    while entry.members and account.take(entry.members[0], entry.length):
        taken.append(entry.members.pop(0))
    return taken


def _begins_online(queue: Sequence[_Entry]) -> bool:
    return bool(queue) and queue[0].order[0] == _ONLINE


def _remove(queue: list[_Entry], request: Request) -> None:
    for place, entry in enumerate(queue):
        if request in entry.members:
            entry.members.remove(request)
            if not entry.members:
                del queue[place]
            return


def _shorter(queue: Iterable[tuple[int, Request]], most: int) -> list[tuple[int, Request]]:
    """Those that fit, longest first."""
    return sorted((item for item in queue if item[0] <= most), key=lambda item: -item[0])


def _is_impatient(request: Request) -> bool:
    """An online request whose targets are tokens in time, not its end."""
    return request.request_class is RequestClass.ONLINE and request.slo.deadline_s is None


def _offload_mode(view: View) -> PreemptMode:
    return PreemptMode.CHECKPOINT if view.caps.host_tokens else PreemptMode.KEEP_KV


_ONLINE = 0
"""First part of the order of online requests."""

_MOST_LEVELS = 8
"""Of hosts in hosts; a place halves with each."""

_LEAST_PLACE = 8
"""Tokens that a guest may take at least: shorter ones are over before they are worth planning."""

_BEYOND = 2
"""Tokens that a place is longer than what its guest will take when its prompt is computed."""

_MOST_MISSES = 16
"""Prompts for which there is no KV that are passed over in a plan, for others to fill it."""

_LEAST_CHUNK = 16
"""Prompt tokens that are worth a forward of their own."""
