"""The running requests as one plan sees them: arrays with a value of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cosched.core.batch import IntArray
from cosched.core.request import RequestClass
from cosched.core.view import Decodes, Progress
from cosched.engine.tracked import TrackedRequest
from cosched.memory.kv_memory import promised_tokens


class RequestColumn:
    """What the table keeps of each request (`cosched.engine.running_table`), a row of its array
    each.

    OUTPUT    generated tokens
    SHARED    tokens at its head that the radix tree owns, less what is allocated beyond what is
              computed
    SLOTS     request slots
    LIMIT     most output tokens
    PROMISED  output tokens for which a plan has set KV aside; `NONE`: none has
    OFFLINE   1: offline
    SPECIAL   1: it has `Traits` of its own
    CERTAIN   1: the engine keeps all of its output free
    BORROWS   1: it grows into KV that is set aside for another
    ARRIVAL   its `arrival_seq`
    GAIN      tokens of the radix tree that it alone holds; `NONE`: not looked up
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
    BORROWS = 8
    ARRIVAL = 9
    GAIN = 10
    UNTIL = 11
    UPPER = 12
    ENDS = 13


NONE = -1
"""Not read, not promised, not known."""


class RunningRows(NamedTuple):
    """What is known of each running request, in their order. Arrays of int64.

    numbers    its row, in the table and in the engine
    columns    (`RequestColumn`, requests): of the table
    computed   tokens whose KV is there
    allocated  tokens for which it holds KV
    """

    numbers: Any
    columns: Any
    computed: Any
    allocated: Any


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
        rows: RunningRows,
        *,
        page_size: int,
        decode_reserve: int,
        is_whole: bool,
    ) -> None:
        """owners: of all rows of the table. is_whole: no request of the batch has ended."""
        self._owners = owners
        self.rows, self.columns, self._computed, self._allocated = rows
        self._page_size = page_size
        self._decode_reserve = decode_reserve
        self._is_promised = self.columns[RequestColumn.PROMISED] != NONE
        self._num_promised = int(np.count_nonzero(self._is_promised))
        is_offline = self.columns[RequestColumn.OFFLINE]
        self.places = {
            RequestClass.ONLINE: (is_offline == 0).nonzero()[0],
            RequestClass.OFFLINE: is_offline.nonzero()[0],
        }
        self.num_own = rows.allocated - self.columns[RequestColumn.SHARED]
        self.are_plain = is_whole and not self.columns[RequestColumn.SPECIAL].any()

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
            self.columns[RequestColumn.ARRIVAL, places],
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
        num_output = self.columns[RequestColumn.OUTPUT].tolist()
        promised: list[int | None] = [None] * len(num_output)
        if self._num_promised:
            promised = [
                None if n == NONE else n for n in self.columns[RequestColumn.PROMISED].tolist()
            ]
        return Progress(num_output, promised)

    def output_left(self) -> tuple[Any, Any]:
        """Output of each that is still to come, in one slot; whether the engine keeps all of it
        free."""
        columns = self.columns
        return columns[RequestColumn.LIMIT] - columns[RequestColumn.OUTPUT], columns[
            RequestColumn.CERTAIN
        ] != 0

    def to_come(self) -> tuple[Any, Any]:
        """Of requests without promised KV: output still to come in all their slots, of those that
        may end early, and of those that cannot."""
        columns, is_free = self.columns, ~self._is_promised
        num_left = columns[RequestColumn.LIMIT] - columns[RequestColumn.OUTPUT]
        if self._num_promised == len(num_left):
            return num_left[:0], num_left[:0]
        if not self.are_plain:
            num_left *= columns[RequestColumn.SLOTS]
        is_certain = columns[RequestColumn.CERTAIN] != 0
        return num_left[is_free & ~is_certain], num_left[is_free & is_certain]

    @cached_property
    def promised(self) -> int:
        """KV tokens kept for what plans have promised, less what others have borrowed of it."""
        if not self._num_promised:
            return 0
        columns = self.columns
        num_left = np.maximum(columns[RequestColumn.PROMISED] - columns[RequestColumn.OUTPUT], 0)
        if not self.are_plain:
            num_left *= columns[RequestColumn.SLOTS]
        num_lent = sum(self.lent.values())
        return promised_tokens(int(np.add.reduce(num_left)), self._num_promised) - num_lent

    @property
    def taken(self) -> Mapping[str, int]:
        """rid of a borrower -> KV tokens that it has taken of what its lender was promised."""
        return self._loans[0]

    @property
    def lent(self) -> Mapping[str, int]:
        """rid of its lender -> KV tokens that all its borrowers have taken."""
        return self._loans[1]

    @cached_property
    def _loans(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        places = self.columns[RequestColumn.BORROWS].nonzero()[0].tolist()
        return _loans([self.everyone[place] for place in places], self.everyone)

    @property
    def next_step(self) -> int:
        """KV tokens that their next decodes take."""
        if self._decode_reserve > 1:
            page = self._page_size
            held = -(-self._allocated // page)
            needed = -(-(self._computed + self._decode_reserve) // page)
            return page * int(np.add.reduce(np.maximum(needed - held, 0)))
        num_rows = self.columns[RequestColumn.SLOTS]
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
    borrowers: Sequence[TrackedRequest], everyone: Sequence[TrackedRequest]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """KV tokens that borrowers have taken of what their lenders were promised, by borrower and by
    lender. No more than the lender has left; without the lender nothing counts."""
    taken: dict[str, int] = {}
    lent: dict[str, int] = {}
    if borrowers:
        here = {tracked.rid for tracked in everyone}
        for tracked in borrowers:
            lender = tracked.lender
            if lender is None or lender.promised is None or lender.rid not in here:
                continue
            assert tracked.promised is not None, f"{tracked.rid=}"
            left = lender.promised - lender.num_output_tokens - lent.get(lender.rid, 0)
            num_taken = max(min(tracked.num_output_tokens - tracked.promised, left), 0)
            taken[tracked.rid] = num_taken
            lent[lender.rid] = lent.get(lender.rid, 0) + num_taken
    return taken, lent


def borrowed_by(everyone: Sequence[TrackedRequest]) -> Mapping[str, int]:
    """Of running requests: rid of a borrower -> KV tokens that it has taken of what its lender was
    promised (`Plan.loans`)."""
    return _loans([tracked for tracked in everyone if tracked.loan is not None], everyone)[0]


def own_tokens(
    requests: Iterable[TrackedRequest], running: Mapping[RequestClass, int] | None = None
) -> Mapping[RequestClass, int]:
    """KV tokens of each class outside the tree: those of some requests, and those of others that
    are known."""
    own = dict.fromkeys(RequestClass, 0) if running is None else dict(running)
    for tracked in requests:
        own[tracked.request_class] += tracked.num_own_tokens
    return own
