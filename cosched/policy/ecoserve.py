"""EcoServe: prompts fill the compute, generations fill the memory, by the lengths they will have.

Idea         a prompt (PT) takes KV for itself alone. Once computed it waits as a generation task
             (GT), its KV kept, until KV for all of its predicted output can be set aside; then it
             runs to its end without an allocation that could fail. GTs of one length run as a
             group and end together, so the next ones are chosen seldom. What a GT will need only
             later it lends: a shorter one runs there and is gone by then.
Assumptions  lengths are predicted well enough (docs/lengths.md); prefill and decode share an
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

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import msgspec

from cosched.core.batch import BatchTotals
from cosched.core.plan import Plan, PreemptMode, SkipReason
from cosched.core.request import Request, RequestClass
from cosched.core.view import View
from cosched.planning.builder import PlanBuilder, num_tokens_of
from cosched.planning.timeline import Need, Timeline
from cosched.policy.base import EcoConfig, PolicySettings
from cosched.policy.forward_size import target_forward_size
from cosched.policy.phases import (
    Steps,
    is_turn_of_decodes,
    must_wait,
    offline_room,
    stop_beyond_limit,
    youngest_first,
)

__all__ = ["Batch", "EcoOptions", "EcoServePolicy"]

WINDOW = 256
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
    is_due        a group has ended, and not all the KV has been given out since
    forward_size  target [tokens]
    num_plans     since it was worked out
    """

    groups: Mapping[str, int] = {}
    guests: Mapping[str, tuple[str, int]] = {}
    is_due: bool = True
    forward_size: int = 0
    num_plans: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EcoOptions:
    """In what the ablations differ.

    synced    GTs of one length are a group, and new ones are chosen where one has ended
    ordered   both queues are ordered, and searched for what fits; False: by arrival
    pipeline  GTs run in KV that others were promised and do not need yet
    timeline  nothing is promised: what runs must fit at each iteration to come (own)
    """

    synced: bool = True
    ordered: bool = True
    pipeline: bool = True
    timeline: bool = False


_ALL = EcoOptions()
_STEPS = Steps()


class EcoServePolicy:
    """Alg. 1. See the module's docstring."""

    initial = Batch()

    def __init__(self, settings: PolicySettings, options: EcoOptions = _ALL) -> None:
        self._config = settings.ecoserve
        self._options = options

    def plan(self, view: View, carry: Batch) -> tuple[Plan, Batch]:
        size, num_plans = carry.forward_size, carry.num_plans + 1
        if not size or num_plans >= REFRESHED:
            size, num_plans = target_forward_size(view.predictor), 0
        builder = PlanBuilder(view)
        stop_beyond_limit(builder, _STEPS)
        work = _Work(builder, self._config, self._options, carry, size)
        work.settle()
        work.choose()
        work.hold_others()
        if not is_turn_of_decodes(builder):
            work.add_prompts()
        after = Batch(
            groups=work.groups,
            guests=work.guests,
            is_due=work.is_due,
            forward_size=size,
            num_plans=num_plans,
        )
        return builder.build(), after


class _Entry(NamedTuple):
    """GTs of one length, or one alone.

    band    class and range of the deadline: what comes first whatever fits
    key     the rest of the order, and of its first member
    length  tokens for which KV is set aside, of each
    """

    band: tuple[int, int]
    key: tuple[int, int, int]
    length: int
    members: list[Request]


class _Work:
    """One plan under construction."""

    def __init__(
        self,
        builder: PlanBuilder,
        config: EcoConfig,
        options: EcoOptions,
        carry: Batch,
        forward_size: int,
    ) -> None:
        self._builder = builder
        self._view = view = builder.view
        self._config = config
        self._options = options
        self._size = forward_size
        self._page = view.caps.page_size
        self._block = view.caps.ceil_to_page(max(config.block, self._page))
        self._reserve = int(config.reserve * view.kv.total)
        self._running = {r.rid: r for r in view.running if not builder.is_preempted(r)}
        self.groups = dict(carry.groups)
        self.guests = dict(carry.guests)
        self.is_due = carry.is_due
        self._next_group = max(carry.groups.values(), default=0) + 1
        self._token_s = 0.0
        """Of a prompt [s]; 0.0: not asked yet."""

    # Step 1

    def settle(self) -> None:
        """Those that ended are no more, and those that go on beyond what they were promised get
        more, or wait."""
        running = self._running
        for rid in self.groups.keys() - running.keys():
            self._leave(rid)
        for rid, (host, offset) in list(self.guests.items()):
            if host not in self.groups or running[host].num_output_tokens >= offset:
                self._settle_guest(running[rid])
        if self._options.timeline:
            return
        promised = self._view.promised
        for rid in list(self.groups):
            request = running[rid]
            if rid not in self.guests and (promised(request) or 0) <= request.num_output_tokens:
                self._extend(request)

    def _leave(self, rid: str) -> None:
        group = self.groups.pop(rid)
        self.guests.pop(rid, None)
        if not self._options.synced or group not in self.groups.values():
            self.is_due = True

    def _extend(self, request: Request) -> None:
        """KV for what it is now believed to need, or for a block; else it waits."""
        if not any(self._promise(request, n) for n in (self._length(request), self._block)):
            self._leave(request.rid)
            if self._config.overrun == "offload":
                self._stop(request, _offload_mode(self._view))

    def _settle_guest(self, guest: Request) -> None:
        """Its host needs the KV, or is over: it is promised some of its own. Nothing ahead of it
        where there is no more, and it waits; it is stopped where even what it holds is missing."""
        del self.guests[guest.rid]
        if any(self._promise(guest, n) for n in (self._length(guest), self._block)):
            return
        self._leave(guest.rid)
        if not self._promise(guest, 0):
            self._stop(guest, _offload_mode(self._view))

    def _promise(self, request: Request, num_tokens: int) -> bool:
        """Set KV aside for so many more tokens, the reserve included unless it is not to be. False:
        there is none, and nothing has changed but that it is no guest any more."""
        ledger = self._builder.ledger
        before = ledger.headroom
        num_now = request.num_output_tokens
        most = max(request.max_new_tokens, num_now)
        self._builder.promise(request, min(num_now + num_tokens, most))
        least = 0 if self._config.overrun == "reserve" or not num_tokens else self._reserve
        if ledger.headroom >= min(least, before):
            return True
        self._builder.promise(request, num_now)
        return False

    def _stop(self, request: Request, mode: PreemptMode | None = None) -> None:
        self._builder.preempt(request, mode)
        del self._running[request.rid]
        for rid, (host, _) in list(self.guests.items()):
            if host == request.rid:
                self._settle_guest(self._running[rid])

    # Steps 2 and 3

    def choose(self) -> None:
        waiting = [r for r in self._waiting() if self._view.can_hold(r)]
        if not waiting:
            return
        if not (self.is_due or not self.groups or any(map(_is_impatient, waiting))):
            return
        account = _Peaks(self) if self._options.timeline else _Promises(self)
        queue, chosen = _fill(self._entries(waiting), account, by_search=self._options.ordered)
        self._start(chosen)
        self._make_room_for_online(queue)
        if not self.groups:
            self._start_somebody(queue)
        self.is_due = not queue
        if self._options.pipeline and not self._options.timeline and queue:
            self._find_guests(queue)

    def _waiting(self) -> Iterator[Request]:
        """GTs that wait."""
        return (r for rid, r in self._running.items() if rid not in self.groups)

    def _start(self, chosen: Iterable[_Entry]) -> None:
        for entry in chosen:
            for request in entry.members:
                self.groups[request.rid] = self._next_group
            self._next_group += 1

    def _make_room_for_online(self, queue: list[_Entry]) -> None:
        """Offline requests stop for online ones that nothing could be set aside for (own)."""
        victims = youngest_first(self._builder)
        while queue and victims:
            entry = queue[0]
            if entry.band[0] == _OFFLINE_LAST:
                return
            victim = victims.pop(0)
            if self._running.get(victim.rid) is not victim:
                continue
            if victim.rid in self.groups:
                self._leave(victim.rid)
            self._stop(victim)
            self._remove(queue, victim)
            account = _Peaks(self) if self._options.timeline else _Promises(self, reserve=0)
            rest, chosen = _fill(queue, account, by_search=False)
            self._start(chosen)
            queue[:] = rest

    def _start_somebody(self, queue: list[_Entry]) -> None:
        """Nothing runs: the reserve too is given out, and the last of those that wait stop until
        the first can run. The last that is left runs whatever it is promised."""
        while queue:
            first = queue[0].members[0]
            if self._promise(first, min(queue[0].length, self._length(first))):
                break
            last = queue[-1].members[-1]
            if last is first:
                break
            if not last.traits.can_stop:
                break
            self._stop(last)
            self._remove(queue, last)
        if queue:
            self.groups[first.rid] = self._next_group
            self._next_group += 1
            self._remove(queue, first)

    def _remove(self, queue: list[_Entry], request: Request) -> None:
        for place, entry in enumerate(queue):
            if request in entry.members:
                entry.members.remove(request)
                if not entry.members:
                    del queue[place]
                return

    def _entries(self, waiting: Sequence[Request]) -> list[_Entry]:
        """The GT queue in order."""
        gain = self._view.preemption_gain
        found: dict[tuple[object, ...], _Entry] = {}
        singles = []
        for request in waiting:
            length = self._length(request)
            band, key = self._place(request, gain(request), length)
            singles.append(_Entry(band, key, length, [request]))
        singles.sort(key=lambda entry: (entry.band, entry.key))
        if not self._options.synced:
            return singles
        for entry in singles:
            # All members run until the longest of them ends.
            like = (entry.band[0], -(-entry.length // self._block))
            if like in found:
                group = found[like]
                group.members.extend(entry.members)
                found[like] = group._replace(length=max(group.length, entry.length))
            else:
                found[like] = entry
        return list(found.values())

    def _place(
        self, request: Request, num_held: int, length: int
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """In the order of either queue."""
        is_offline = int(request.request_class is RequestClass.OFFLINE)
        if not self._options.ordered:
            return (is_offline, 0), (0, 0, request.arrival_seq)
        left_s = self._deadline_s(request) - self._view.now_s
        band = bisect_left(_RANGES_S, left_s)
        key = (-(num_held // _LENGTH_RANGE), -(length // _LENGTH_RANGE), request.arrival_seq)
        return (is_offline, band), key

    def _deadline_s(self, request: Request) -> float:
        """Its own, or what the configuration allows a request of its length (§4): SLO scale *
        (prompt + output tokens at their mean times)."""
        own_s = request.slo.deadline_s
        if own_s is None:
            view = self._view
            if not self._token_s:
                totals = BatchTotals()
                totals.add_prefill(self._size, 0)
                self._token_s = view.predictor.predict_s(totals) / self._size
            num_output = request.num_output_tokens + view.length(request).median
            own_s = self._config.slo_scale * (
                request.num_prompt_tokens * self._token_s + num_output * view.mean_iteration_s
            )
        return request.arrival_s + own_s

    def _length(self, request: Request) -> int:
        """Tokens of KV, in whole pages, for the output that it is still to generate."""
        return self._view.caps.ceil_to_page(max(self._view.length(request).upper, 1))

    def _find_guests(self, queue: list[_Entry]) -> None:
        """GTs that wait run in what others were promised and need only later."""
        shelf = _Shelf(
            request
            for entry in queue
            for request in [(entry.length, r) for r in entry.members if _is_patient(entry, r)]
        )
        regions = []
        hosts = {host for host, _ in self.guests.values()}
        for rid in self.groups:
            if rid not in self.guests and rid not in hosts:
                request = self._running[rid]
                promise = self._builder.ledger.promises.get(rid) or self._view.promised(request)
                regions.append(((promise or 0) - request.num_output_tokens, rid, request))
        regions.sort(key=lambda region: -region[0])
        for num_tokens, _, host in regions:
            if not shelf:
                return
            self._lend(shelf, host, num_tokens, host.num_output_tokens)

    def _lend(self, shelf: _Shelf, host: Request, num_tokens: int, start: int) -> None:
        """Fill the second half of `num_tokens` of KV that the host, or who has the place, begins to
        use at the host's output token `start`; then the first half, and the half of the guest."""
        half = num_tokens // 2 // self._page * self._page
        if half <= self._page or not shelf:
            return
        guest = shelf.take(half, self._config.buffer)
        if guest is None:
            return
        offset = start + half
        self._builder.host(guest, host, offset)
        self.guests[guest.rid] = (host.rid, offset)
        self.groups[guest.rid] = self._next_group
        self._next_group += 1
        self._lend(shelf, host, half, start)
        self._lend(shelf, host, half, start)

    # Step 4

    def hold_others(self) -> None:
        """GTs that wait sit out; those that run too, the last chosen first, where not even a token
        of each has room."""
        builder, ledger = self._builder, self._builder.ledger
        builder.hold_all(self._waiting(), SkipReason.MEMORY_BUDGET)
        active = [self._running[rid] for rid in self.groups]
        while ledger.available < 0 and len(active) > 1:
            request = active.pop()
            self._leave(request.rid)
            if not builder.hold(request, SkipReason.MEMORY_BUDGET) or not active:
                break
        victims = youngest_first(builder) if ledger.available < 0 else []
        for victim in victims:
            if ledger.available >= 0:
                break
            if victim.rid in self.groups:
                self._leave(victim.rid)
            self._stop(victim)

    def add_prompts(self) -> None:
        """Prompts until the iteration has the target forward size: whole ones, and a part of one
        (decision 7)."""
        builder, view = self._builder, self._view
        num_waiting, pinned = 0, 0
        for request in self._waiting():
            num_waiting += 1
            pinned += view.preemption_gain(request)
        # They would take the KV of those that could run.
        most_kv = builder.ledger.headroom
        if num_waiting:
            most_kv = min(most_kv, self._reserve - pinned)
        left = self._size - len(self.groups)
        for request in builder.unfinished():
            if left > 0 and builder.go_on(request, left, unreserved=True):
                left -= builder.prefill[request.rid]
                most_kv -= builder.prefill[request.rid]
        least = 0 if self._runs_anything() else 1
        room = offline_room(builder)
        queue = self._prompts()
        misfit: Request | None = None
        while queue and (left > 0 or least) and builder.ledger.slots > 0:
            request = queue.pop(0)
            if room == 0 and request.request_class is RequestClass.OFFLINE:
                builder.skip(request, SkipReason.OPERATOR_LIMIT)
                continue
            match = view.match(request)
            num_tokens = num_tokens_of(request) - match.cached
            if num_tokens > most_kv and not least:
                builder.skip(request, SkipReason.MEMORY_BUDGET)
                break
            if num_tokens > left and queue and self._options.ordered and misfit is None:
                # What fits exactly comes before what must be cut.
                misfit = request
                queue = _closest(queue, left)
                continue
            builder.promise(request, request.num_output_tokens)
            if not builder.admit(request, match, max(left, 1) if not least else num_tokens):
                del builder.ledger.promises[request.rid]
                break
            least = 0
            left -= builder.prefill[request.rid]
            most_kv -= builder.prefill[request.rid] + match.evictable + match.host
            if room is not None and request.request_class is RequestClass.OFFLINE:
                room -= 1
        if misfit is not None and left > 0 and not must_wait(builder, misfit):
            self._cut(misfit, left, most_kv)

    def _cut(self, request: Request, left: int, most_kv: int) -> None:
        builder = self._builder
        match = self._view.match(request)
        if num_tokens_of(request) - match.cached > most_kv:
            return
        builder.promise(request, request.num_output_tokens)
        if not builder.admit(request, match, left):
            del builder.ledger.promises[request.rid]

    def _runs_anything(self) -> bool:
        return bool(self.groups) or self._builder.runs_anything()

    def _prompts(self) -> list[Request]:
        """Waiting prompts in order."""
        view, builder = self._view, self._builder
        waiting = [
            request
            for source in (view.online, view.offline_order())
            for request in islice(source, WINDOW)
            if not must_wait(builder, request)
        ]
        if not self._options.ordered:
            return waiting
        return sorted(waiting, key=lambda r: self._place(r, 0, num_tokens_of(r)))


class _Promises:
    """Exact allocation: what is set aside for all outputs, in full, leaves the reserve."""

    def __init__(self, work: _Work, *, reserve: int | None = None) -> None:
        self._builder = work._builder
        self._reserve = work._reserve if reserve is None else reserve

    def take(self, request: Request, length: int) -> bool:
        if not self.fits(request, length):
            return False
        num_now = request.num_output_tokens
        self._builder.promise(request, min(num_now + length, max(request.max_new_tokens, num_now)))
        return True

    def fits(self, request: Request, length: int) -> bool:
        return length <= self._builder.ledger.headroom - self._reserve


class _Peaks:
    """The timeline: those that run must fit, beside what others hold and the reserve, at each
    iteration to come."""

    def __init__(self, work: _Work) -> None:
        view = work._view
        self._gain = view.preemption_gain
        kv = view.kv
        self._most = kv.total - work._reserve
        running = [work._running[rid] for rid in work.groups]
        self._needs = [Need(self._gain(r), view.length(r).upper) for r in running]
        self._others = kv.total - kv.free - kv.evictable - sum(n.held for n in self._needs)
        self._timeline: Timeline | None = None

    def take(self, request: Request, length: int) -> bool:
        if not self.fits(request, length):
            return False
        held = self._gain(request)
        self._needs.append(Need(held, length))
        self._others -= held
        self._timeline = None
        return True

    def fits(self, request: Request, length: int) -> bool:
        if self._timeline is None:
            self._timeline = Timeline(self._needs)
        held = self._gain(request)
        peak = self._timeline.peak_with(Need(held, length))
        return peak + self._others - held <= self._most


class _Shelf:
    """GTs that may be hosted, by length."""

    def __init__(self, items: Iterable[tuple[int, Request]]) -> None:
        self._items = sorted(items, key=lambda item: item[0])
        self._lengths = [length for length, _ in self._items]

    def __bool__(self) -> bool:
        return bool(self._items)

    def take(self, most: int, buffer: float) -> Request | None:
        """The longest whose length and buffer are below `most`."""
        place = bisect_left(self._lengths, most / (1 + buffer))
        if not place:
            return None
        del self._lengths[place - 1]
        return self._items.pop(place - 1)[1]


def _fill(
    queue: Sequence[_Entry], account: _Promises | _Peaks, *, by_search: bool
) -> tuple[list[_Entry], list[_Entry]]:
    """Entries in order until one does not fit, of which as many members as do; with a search then
    the longest that fit of each band. Returns those that wait and those that were taken."""
    rest, chosen = list(queue), []
    while rest:
        entry = rest[0]
        taken = _take_members(entry, account)
        if taken:
            chosen.append(entry._replace(members=taken))
        if entry.members:
            break
        del rest[0]
    if by_search and rest:
        for band in dict.fromkeys(entry.band for entry in rest):
            here = sorted((e for e in rest if e.band == band), key=lambda e: e.length)
            while here:
                # The longest that fits: what fits is a prefix of the order by length.
                place = bisect_left(
                    here, True, key=lambda e: not account.fits(e.members[0], e.length)
                )
                if not place:
                    break
                entry = here.pop(place - 1)
                taken = _take_members(entry, account)
                if taken:
                    chosen.append(entry._replace(members=taken))
        rest = [entry for entry in rest if entry.members]
    return rest, chosen


def _take_members(entry: _Entry, account: _Promises | _Peaks) -> list[Request]:
    taken: list[Request] = []
    while entry.members and account.take(entry.members[0], entry.length):
        taken.append(entry.members.pop(0))
    return taken


def _closest(queue: Sequence[Request], most: int) -> list[Request]:
    """Those that fit, longest first (binary search in §3.3), and no others."""
    return sorted((r for r in queue if num_tokens_of(r) <= most), key=lambda r: -num_tokens_of(r))


def _is_impatient(request: Request) -> bool:
    """An online request whose targets are tokens in time, not its end."""
    return request.request_class is RequestClass.ONLINE and request.slo.deadline_s is None


def _is_patient(entry: _Entry, request: Request) -> bool:
    """It may be a guest: its SLO is loose (§3.4)."""
    if request.request_class is RequestClass.OFFLINE:
        return True
    return request.slo.deadline_s is not None and entry.band[1] == len(_RANGES_S)


def _offload_mode(view: View) -> PreemptMode:
    return PreemptMode.CHECKPOINT if view.caps.host_tokens else PreemptMode.KEEP_KV


_OFFLINE_LAST = 1
"""First part of the order of offline requests."""
