"""What plans need to know of all running requests, kept from plan to plan.

Little changes for a request that keeps decoding, and what changes is known without reading it:
the batch has all lengths in one array, and each result says whose tokens it holds. So a plan reads
only new requests. With hundreds of requests most of its time would otherwise go into reading them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from cosched.core.batch import IntArray
from cosched.core.plan import Plan
from cosched.core.request import PLAIN, RequestClass
from cosched.core.view import Decodes, Outlook, Progress
from cosched.engine import port
from cosched.engine.lengths import Lengths
from cosched.engine.tracked import TrackedRequest
from cosched.memory.tree import KvTree
from cosched.predict.lengths import NUM_ENDS
from cosched.schedule.ledger import promised_tokens


class _Column:
    """Of the table; one row of the array each.

    OUTPUT    generated tokens
    SHARED    tokens at its head that the radix tree owns, less what is allocated beyond what is
              computed
    SLOTS     request slots
    LIMIT     most output tokens
    PROMISED  output tokens for which a plan has set KV aside; `_NONE`: none has
    OFFLINE   1: offline
    SPECIAL   1: it has `Traits` of its own
    CERTAIN   1: the engine keeps all of its output free
    GUEST     1: it grows into KV that is set aside for another
    ARRIVAL   its `arrival_seq`
    GAIN      tokens of the radix tree that it alone holds; `_NONE`: not looked up
    UNTIL     output at which its length is estimated again
    UPPER     upper estimate of its whole output until then
    ENDS      and the columns behind it: the ends of its whole output until then
    """

    OUTPUT = 0
    SHARED = 1
    SLOTS = 2
    LIMIT = 3
    PROMISED = 4
    OFFLINE = 5
    SPECIAL = 6
    CERTAIN = 7
    GUEST = 8
    ARRIVAL = 9
    GAIN = 10
    UNTIL = 11
    UPPER = 12
    ENDS = 13


_NUM_COLUMNS = _Column.ENDS + NUM_ENDS
_KEPT = slice(0, _Column.UNTIL)
"""Columns that are written when a request is new."""

_LENGTH = slice(_Column.UNTIL, None)
"""Columns of its estimated length."""

_ESTIMATED = 16
"""Lengths that are estimated again with a result, or one of as many: each is due with every 16th
token at most. Where hundreds of requests began together, nothing waits for all of them."""

_NEWEST_SHARE = 0.05
"""Of the newest iteration in the moving average of tokens per decode."""

_NONE = -1
"""Not read, not promised, not known."""


class RunningTable:
    """The running requests of one scheduler, by the row that each has in the engine: a few integers
    of each (`_Column`)."""

    def __init__(
        self, lengths: Lengths, generations: Any, *, page_size: int, decode_reserve: int = 1
    ) -> None:
        """generations: of each row, a number that changes when another request gets it
        (`port.row_generations`). decode_reserve: as in `EngineCaps`."""
        num_rows = len(generations)
        self._lengths = lengths
        self._page_size = page_size
        self._decode_reserve = decode_reserve
        self.tokens_per_decode = 1.0
        """Moving average: tokens of an online request in an iteration without prefills; until one
        has had such an iteration, of any request."""
        self._knows_online_tokens = False
        self._generations = generations
        self._read = np.full(num_rows, _NONE, dtype=np.int64)
        """With which of them each row was read."""
        self._columns = np.zeros((_NUM_COLUMNS, num_rows), dtype=np.int64)
        self._owners: Any = np.full(num_rows, None, dtype=object)
        """`TrackedRequest`s."""
        self._rows: dict[str, int] = {}
        """rid of each of them -> its row."""
        self._settling: dict[int, int] = {}
        """Rows of those whose prompt may still come into the tree, and their output when they came:
        under overlap they run before the result of their prefill is there."""
        self._num_shifts = _NONE
        self._estimates = False
        """Somebody asks how long requests will run (`outlook`): with most policies nobody does."""
        self._has_guests = False
        """A plan has had guests: with most policies none has, and nothing looks for them."""

    def forget(self, request: TrackedRequest) -> None:
        """It has ended, or a plan has set KV aside for it: read it again if it runs."""
        if request.row is not None:
            self._read[request.row] = _NONE
            self._let_go(request.row)

    def _let_go(self, row: int) -> None:
        owner: TrackedRequest | None = self._owners[row]
        if owner is not None:
            self._owners[row] = owner.row = None
            del self._rows[owner.rid]

    def came(self, batch: Any) -> None:
        """The result of an iteration is known."""
        rows = port.rows_of(batch)
        num_output = np.array(port.num_outputs(batch.reqs), dtype=np.int64)
        if self._decode_reserve > 1 and not port.num_prefills(batch):
            generated = num_output - self._columns[_Column.OUTPUT, rows]
            is_online = self._columns[_Column.OFFLINE, rows] == 0
            self._learn_tokens(generated[is_online & (generated > 0)], is_online=True)
            self._learn_tokens(generated[generated > 0], is_online=False)
        self._columns[_Column.OUTPUT, rows] = num_output
        if self._estimates:
            known = rows[self._read[rows] == self._generations[rows]]
            self._estimate(known, most=max(_ESTIMATED, len(known) // _ESTIMATED))

    def _learn_tokens(self, generated: Any, *, is_online: bool) -> None:
        if len(generated) and (is_online or not self._knows_online_tokens):
            self._knows_online_tokens = is_online
            self.tokens_per_decode += _NEWEST_SHARE * (
                float(generated.mean()) - self.tokens_per_decode
            )

    def promise(
        self,
        plan: Plan,
        waiting: Callable[[str], TrackedRequest | None],
        batch: Any,
        unfinished: Any | None,
    ) -> Mapping[str, int]:
        """Remember what a plan sets aside, and which requests grow into what is set aside for
        another. Returns, where the plan prefills, the rid of each running guest -> KV tokens that
        it has taken of what its host was promised. waiting: the request of an id, if it waits."""
        running: dict[str, TrackedRequest] = {}
        if plan.hosts or any(waiting(rid) is None for rid in plan.promise):
            running = {req.rid: req.cosched for req in batch.reqs}
            if unfinished is not None:
                running[unfinished.rid] = unfinished.cosched
        for rid, num_tokens in plan.promise.items():
            tracked = running.get(rid) or waiting(rid)
            if tracked is not None:  # else it ended while the results were drained
                tracked.promise(num_tokens)
                self.forget(tracked)
        for rid, hosting in plan.hosts.items():
            guest, host = running.get(rid), running.get(hosting.host)
            if guest is not None and host is not None:
                guest.grow_into(host)
                self.forget(guest)
                self._has_guests = True
        if not plan.prefill or not self._has_guests:
            return {}
        return taken_by_guests([req.cosched for req in batch.reqs])

    def follow(self, batch: Any, elsewhere: Iterable[port.Elsewhere] = ()) -> Running:
        """The requests of a running batch, and `elsewhere`, that have not ended. O(1) for each new
        one and a few array operations for all others."""
        reqs, rows = batch.reqs, port.rows_of(batch)
        if self._decode_reserve == 1:
            computed = allocated = port.computed_of(batch)
        else:
            computed, allocated = port.committed_of(batch), port.allocated_of(batch)
        for part in elsewhere:
            reqs = [*reqs, *part.reqs]
            rows = np.concatenate((rows, part.rows))
            computed = allocated = np.concatenate((computed, part.computed))
        new = (self._read[rows] != self._generations[rows]).nonzero()[0].tolist()
        over = [place for place in new if not self._look_at(reqs[place], int(rows[place]))]
        if over:
            rows, computed, allocated = (
                np.delete(one, over) for one in (rows, computed, allocated)
            )
        if self._settling:
            self._settle()
        columns = self._columns.take(rows, axis=1)
        return Running(
            self._owners,
            rows,
            columns,
            computed,
            allocated,
            page_size=self._page_size,
            decode_reserve=self._decode_reserve,
            is_whole=not over,
        )

    def named(self, rids: Iterable[str], running: Running) -> dict[str, TrackedRequest]:
        """The running requests among these ids. O(ids)."""
        runs = np.zeros(len(self._read), dtype=bool)
        runs[running.rows] = True
        rows = [row for rid in rids if (row := self._rows.get(rid)) is not None]
        owners = self._owners[rows][runs[rows]].tolist() if rows else []
        return {owner.rid: owner for owner in owners}

    def _estimate(self, rows: Any, *, most: int) -> None:
        """Estimate the lengths that are due again, `most` of them: the longest overdue first."""
        num_output = self._columns[_Column.OUTPUT, rows]
        late = num_output - self._columns[_Column.UNTIL, rows]
        due = (late >= 0).nonzero()[0]
        if len(due) > most:
            due = due[np.argsort(-late[due], kind="stable")[:most]]
        for row, num in zip(rows[due].tolist(), num_output[due].tolist(), strict=True):
            self._columns[_LENGTH, row] = self._length(self._owner(row), num)

    def _length(self, tracked: TrackedRequest, num_output: int) -> tuple[int, ...]:
        """Of the columns `_LENGTH`."""
        until, upper, ends = self._lengths.ends(tracked, num_output)
        return (until, upper, *(0,) * (NUM_ENDS - len(ends)), *ends)

    def _look_at(self, req: Any, row: int) -> bool:
        """Read a new request. False: it has ended."""
        if not port.is_under_way(req):
            return False
        tracked: TrackedRequest = req.cosched
        self._let_go(row)
        if tracked.row is not None:
            self._let_go(tracked.row)
        self._owners[row], tracked.row = tracked, row
        self._rows[tracked.rid] = row
        promised = tracked.promised
        num_output = tracked.num_output_tokens
        self._columns[_LENGTH, row] = self._length(tracked, num_output) if self._estimates else 0
        self._columns[_KEPT, row] = (
            num_output,
            self._shared_of(tracked),
            tracked.traits.num_rows,
            tracked.max_new_tokens,
            _NONE if promised is None else promised,
            tracked.request_class is RequestClass.OFFLINE,
            tracked.traits is not PLAIN,
            tracked.reserves_all,
            tracked.is_hosted,
            tracked.arrival_seq,
            _NONE,
        )
        self._read[row] = self._generations[row]
        self._settling[row] = num_output
        return True

    def _settle(self) -> None:
        columns = self._columns
        for row, num_output in [*self._settling.items()]:
            tracked = self._owners[row]
            if tracked is not None:
                num_shared = self._shared_of(tracked)
                if num_shared != columns[_Column.SHARED, row]:
                    columns[_Column.SHARED, row], columns[_Column.GAIN, row] = num_shared, _NONE
            if tracked is None or tracked.num_output_tokens > num_output:
                del self._settling[row]

    def outlook(
        self,
        running: Running,
        *,
        kv_tree: KvTree | None,
        gain_of: Callable[[TrackedRequest], int],
    ) -> Outlook:
        """Of `View.outlook`. kv_tree: knows what of the tree each request alone holds; None:
        `gain_of` is asked about each."""
        columns, rows = running.columns, running.rows
        self._begin_estimates(running)
        left = columns[_Column.ENDS :] - columns[_Column.OUTPUT]
        if not running.are_plain:
            left *= columns[_Column.SLOTS]
        if kv_tree is None:
            held = [gain_of(request) for request in running.everyone]
            return Outlook(np.array(held, dtype=np.int64), left)
        if self._num_shifts != kv_tree.num_shifts:
            self._num_shifts = kv_tree.num_shifts
            self._columns[_Column.GAIN] = columns[_Column.GAIN] = _NONE
        unknown = (columns[_Column.GAIN] == _NONE).nonzero()[0].tolist()
        if unknown:
            nodes = [port.last_node(self._owner(rows[place]).req) for place in unknown]
            columns[_Column.GAIN, unknown] = kv_tree.gains_of_release(nodes)
            self._columns[_Column.GAIN, rows] = columns[_Column.GAIN]
        return Outlook(running.num_own + columns[_Column.GAIN], left)

    def longest_left(self, running: Running, request_class: RequestClass) -> int:
        """Of `View.longest_left`."""
        self._begin_estimates(running)
        columns = running.columns
        num_output = columns[_Column.OUTPUT]
        left = np.maximum(columns[_Column.UPPER] - num_output, 1)
        left = np.minimum(left, columns[_Column.LIMIT] - num_output)
        return int(left[running.places[request_class]].max(initial=0))

    def _begin_estimates(self, running: Running) -> None:
        """The first time that anything is asked about lengths; later results keep them."""
        if not self._estimates:
            self._estimates = True
            self._estimate(running.rows, most=len(running.rows))
            running.columns[_LENGTH] = self._columns[_LENGTH][:, running.rows]

    def _shared_of(self, tracked: TrackedRequest) -> int:
        """Its tokens less the KV tokens that it holds outside the tree."""
        if self._decode_reserve > 1:
            return tracked.num_allocated_tokens - tracked.num_own_tokens
        return tracked.num_computed_tokens - tracked.num_own_tokens

    def _owner(self, row: Any) -> TrackedRequest:
        owner: TrackedRequest | None = self._owners[int(row)]
        assert owner is not None, f"{row=} runs"
        return owner


class Running:
    """What is read of all running requests for one plan, in their order.

    rows       of each, in the table and in the engine
    places     of the requests of each class
    columns    of the table
    num_own    KV tokens of each outside the radix tree
    are_plain  none has special `Traits`, and no request of the batch has ended
    """

    def __init__(
        self,
        owners: Any,
        rows: Any,
        columns: Any,
        computed: Any,
        allocated: Any,
        *,
        page_size: int,
        decode_reserve: int,
        is_whole: bool,
    ) -> None:
        """owners: of all rows. computed: tokens of each whose KV is there; allocated: those for
        which it holds KV. is_whole: no request of the batch has ended."""
        self._owners = owners
        self.rows = rows
        self.columns = columns
        self._computed = computed
        self._allocated = allocated
        self._page_size = page_size
        self._decode_reserve = decode_reserve
        self._is_promised = columns[_Column.PROMISED] != _NONE
        self._num_promised = int(np.count_nonzero(self._is_promised))
        is_offline = columns[_Column.OFFLINE]
        self.places = {
            RequestClass.ONLINE: (is_offline == 0).nonzero()[0],
            RequestClass.OFFLINE: is_offline.nonzero()[0],
        }
        self.num_own = allocated - columns[_Column.SHARED]
        self.are_plain = is_whole and not columns[_Column.SPECIAL].any()

    @cached_property
    def everyone(self) -> Sequence[TrackedRequest]:
        return _Owners(self._owners, self.rows)

    @cached_property
    def by_class(self) -> Mapping[RequestClass, Decodes]:
        return {request_class: self._decodes(request_class) for request_class in RequestClass}

    def _decodes(self, request_class: RequestClass) -> Decodes:
        places = self.places[request_class]
        return _Decodes(
            _Owners(self._owners, self.rows[places]),
            self._computed[places] + 1,
            self.columns[_Column.ARRIVAL, places],
        )

    def own(self) -> dict[RequestClass, int]:
        """KV tokens of each class outside the tree."""
        num_own = self.num_own
        return {
            request_class: int(np.add.reduce(num_own[places]))
            for request_class, places in self.places.items()
        }

    @cached_property
    def progress(self) -> Progress:
        num_output = self.columns[_Column.OUTPUT].tolist()
        promised: list[int | None] = [None] * len(num_output)
        if self._num_promised:
            promised = [None if n == _NONE else n for n in self.columns[_Column.PROMISED].tolist()]
        return Progress(num_output, promised)

    def output_left(self) -> tuple[Any, Any]:
        """Output of each that is still to come, in one slot; whether the engine keeps all of it
        free."""
        columns = self.columns
        return columns[_Column.LIMIT] - columns[_Column.OUTPUT], columns[_Column.CERTAIN] != 0

    def to_come(self) -> tuple[Any, Any]:
        """Of requests without promised KV: output still to come in all their slots, of those that
        may end early, and of those that cannot."""
        columns, is_free = self.columns, ~self._is_promised
        num_left = columns[_Column.LIMIT] - columns[_Column.OUTPUT]
        if self._num_promised == len(num_left):
            return num_left[:0], num_left[:0]
        if not self.are_plain:
            num_left *= columns[_Column.SLOTS]
        is_certain = columns[_Column.CERTAIN] != 0
        return num_left[is_free & ~is_certain], num_left[is_free & is_certain]

    @cached_property
    def promised(self) -> int:
        """KV tokens kept for what plans have promised, less what guests have taken of it."""
        if not self._num_promised:
            return 0
        columns = self.columns
        num_left = np.maximum(columns[_Column.PROMISED] - columns[_Column.OUTPUT], 0)
        if not self.are_plain:
            num_left *= columns[_Column.SLOTS]
        num_lent = sum(self.lent.values())
        return promised_tokens(int(np.add.reduce(num_left)), self._num_promised) - num_lent

    @property
    def taken(self) -> Mapping[str, int]:
        """rid of a guest -> KV tokens that it has taken of what its host was promised."""
        return self._loans[0]

    @property
    def lent(self) -> Mapping[str, int]:
        """rid of its host -> those of all its guests."""
        return self._loans[1]

    @cached_property
    def _loans(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        guests = self.columns[_Column.GUEST].nonzero()[0].tolist()
        return _loans([self.everyone[place] for place in guests], self.everyone)

    @property
    def next_step(self) -> int:
        """KV tokens that their next decodes take."""
        if self._decode_reserve > 1:
            page = self._page_size
            held = -(-self._allocated // page)
            needed = -(-(self._computed + self._decode_reserve) // page)
            return page * int(np.add.reduce(np.maximum(needed - held, 0)))
        num_rows = self.columns[_Column.SLOTS]
        if self._page_size > 1:
            num_rows = num_rows[self._computed % self._page_size == 0]
        return self._page_size * int(np.add.reduce(num_rows))

    @property
    def mixes(self) -> bool:
        """All of them may decode beside a prefill."""
        return self.are_plain or all(request.traits.can_mix for request in self.everyone)


class _Decodes(Decodes):
    """Reads no request that is not asked for."""

    __slots__ = ()

    def at(self, places: IntArray) -> Decodes:
        assert isinstance(self.requests, _Owners), f"{type(self.requests)=}"
        return Decodes(self.requests.at(places), self.contexts[places], self.arrivals[places])


class _Owners(Sequence[TrackedRequest]):
    """Most plans ask how many there are, and for few of them: a request is read from memory when
    it is asked for."""

    def __init__(self, owners: Any, rows: Any) -> None:
        self._owners = owners
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self[:])

    def __getitem__(self, place: Any) -> Any:
        return self.at(place) if isinstance(place, slice) else self._owners[self._rows[place]]

    def at(self, places: IntArray | slice) -> list[TrackedRequest]:
        found: list[TrackedRequest] = self._owners[self._rows[places]].tolist()
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == [*other]

    __hash__ = None  # type: ignore[assignment]  # as a list


def _loans(
    guests: Sequence[TrackedRequest], everyone: Sequence[TrackedRequest]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """KV tokens that guests have taken of what their hosts were promised, by guest and by host. A
    guest takes no more than its host has left; without its host nothing counts."""
    taken: dict[str, int] = {}
    lent: dict[str, int] = {}
    if guests:
        here = {tracked.rid for tracked in everyone}
        for guest in guests:
            host = guest.host
            if host is None or host.promised is None or host.rid not in here:
                continue
            assert guest.promised is not None, f"{guest.rid=}"
            left = host.promised - host.num_output_tokens - lent.get(host.rid, 0)
            num_taken = max(min(guest.num_output_tokens - guest.promised, left), 0)
            taken[guest.rid] = num_taken
            lent[host.rid] = lent.get(host.rid, 0) + num_taken
    return taken, lent


def taken_by_guests(everyone: Sequence[TrackedRequest]) -> Mapping[str, int]:
    """Of running requests: rid of a guest -> KV tokens that it has taken of what its host was
    promised (`Plan.hosts`)."""
    return _loans([tracked for tracked in everyone if tracked.is_hosted], everyone)[0]


def own_tokens(
    requests: Iterable[TrackedRequest], running: Mapping[RequestClass, int] | None = None
) -> Mapping[RequestClass, int]:
    """KV tokens of each class outside the tree: those of some requests, and those of others that
    are known."""
    own = dict.fromkeys(RequestClass, 0) if running is None else dict(running)
    for tracked in requests:
        own[tracked.request_class] += tracked.num_own_tokens
    return own
