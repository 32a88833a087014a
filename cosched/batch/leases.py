"""Which waiting lines of batches a server gets, in a transaction of the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise, takewhile

import sqlalchemy as sa

from cosched.batch.batch_records import Line, NewLine
from cosched.batch.database import LineState, lines, servers
from cosched.batch.documents import MOST_ABOUT_ONE, TO_A_BORDER, Claim, Part, Queue, after, choose

LEASED_STATES = (LineState.WAITING, LineState.TAKEN)
_MOST_LOOKUPS = 64
"""Documents of a claim about which lines are looked for beyond the next ones of each batch."""
_LATE_PART = 8
"""One in eight lines at a server may be far behind the others: a long reply."""
_IN_ORDER = (lines.c.lease_owner, lines.c.prefix_key, lines.c.number)
"""The owner makes PostgreSQL read along the index, where it would sort all free lines."""


class Leases:
    """The lines of a tenant's batches in a transaction, for one server."""

    def __init__(self, connection: sa.Connection, seqs: Mapping[str, int], *, server: str) -> None:
        """seqs: batch -> `batches.seq`, of those in progress"""
        self._connection = connection
        self._seqs = seqs
        self._server = server
        self._num_lookups = 0

    def take(self, claim: Claim, *, max_bytes: int, may_steal: bool) -> list[tuple[str, Line]]:
        """Batches and their lines in the order in which they are sent: in prefix order, first those
        set aside for this server, then free ones, of which `claim.num_ahead` more are set aside.
        may_steal: if there are no others, the last of those set aside for other servers."""
        num_ahead = claim.num_ahead
        parts = [part for part in claim.parts if part.batch_id in self._seqs]
        begun = self._begun()
        queues = list(self._queues(claim, parts, begun[0] if begun else None))
        found = choose(claim, queues, begun=begun)
        chosen = [(queue.part.batch_id, line) for queue, line in found]
        if not chosen and may_steal:
            chosen = self._of_others(claim.limit, parts)
            num_ahead = len(chosen)
        num_taken = num_bytes = 0
        for _, line in chosen[: claim.limit]:
            num_bytes += line.num_bytes
            if num_taken and num_bytes > max_bytes:
                break
            num_taken += 1
        taken, rest = chosen[:num_taken], chosen[num_taken:] if num_ahead else []
        for some, state in ((taken, LineState.TAKEN), (rest, LineState.WAITING)):
            for part in parts:
                numbers = [line.number for name, line in some if name == part.batch_id]
                mark(self._connection, self._seqs[part.batch_id], numbers, state, self._server)
        return list(taken)

    def _queues(self, claim: Claim, parts: Sequence[Part], place: bytes | None) -> Iterator[Queue]:
        most = claim.limit + claim.num_ahead + TO_A_BORDER
        for part in parts:
            yield self._queue(part, place, most)

    def _queue(self, part: Part, place: bytes | None, most: int) -> Queue:
        """From a place in prefix order on, and then what was passed over."""
        seq, owner = self._seqs[part.batch_id], lines.c.lease_owner
        key = lines.c.prefix_key
        spans = [sa.true()] if place is None else [key >= place, key < place]
        found: list[NewLine] = []
        complete: tuple[bytes, bytes | None] = (b"" if place is None else place, None)
        for span in spans:
            for of in (owner == self._server, owner.is_(None)):
                limit = most - len(found)
                some = self._waiting(seq, sa.and_(of, span), limit=limit) if limit > 0 else []
                found += some
                if span is spans[0] and len(some) >= limit:
                    last = some[-1].prefix_key if some else complete[0]
                    complete = (complete[0], min(last, complete[1] or last))
        if len(found) < most:
            complete = (b"", None)

        def look_up(stem: bytes) -> Sequence[NewLine]:
            self._num_lookups += 1
            if self._num_lookups > _MOST_LOOKUPS:
                return ()
            end = after(stem)
            mine = sa.or_(owner == self._server, owner.is_(None))
            among = sa.and_(mine, key >= stem, sa.true() if end is None else key < end)
            return self._waiting(seq, among, limit=MOST_ABOUT_ONE + 1)

        return Queue(part, found, complete=complete, look_up=look_up)

    def _begun(self) -> Sequence[bytes]:
        """The keys of the lines in flight at this server in order, without about the first ones."""
        here = sa.select(lines.c.prefix_key).where(
            lines.c.batch.in_(list(self._seqs.values())),
            lines.c.state == LineState.TAKEN,
            lines.c.lease_owner == self._server,
        )
        keys = sorted(self._connection.scalars(here))
        return keys[len(keys) // _LATE_PART :]

    def _of_others(self, limit: int, parts: Sequence[Part]) -> list[tuple[str, NewLine]]:
        """The last lines that are set aside for other servers: whole documents, so a few more."""
        found = [
            (part.batch_id, line)
            for part in parts
            for line in self._waiting(
                self._seqs[part.batch_id],
                lines.c.lease_owner != self._server,
                limit=min(limit + TO_A_BORDER, part.most),
                is_last=True,
            )
        ]
        found = sorted(found, key=lambda it: (it[1].prefix_key, it[1].number))
        found = found[-limit - TO_A_BORDER :]
        places = sorted(range(len(found)), key=lambda place: abs(len(found) - limit - place))
        return found[_border([line for _, line in found], places) :] if found else []

    def _waiting(
        self, seq: int, of: sa.ColumnElement[bool], *, limit: int, is_last: bool = False
    ) -> list[NewLine]:
        """The first waiting lines, or the last ones, in prefix order. Lines that another server is
        taking now are left out."""
        query = (
            sa.select(*(lines.c[field.name] for field in fields(NewLine)))
            .where(lines.c.batch == seq, lines.c.state == LineState.WAITING, of)
            .order_by(*([column.desc() for column in _IN_ORDER] if is_last else _IN_ORDER))
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        found = [NewLine(**row._mapping) for row in self._connection.execute(query)]
        return found[::-1] if is_last else found


def _border(found: Sequence[NewLine], places: Sequence[int]) -> int:
    """The place, the first of equals, at which lines on both sides share least. At the ends of
    `found` that is not known, and taken for the most."""
    pairs = pairwise(line.prefix_key for line in found)
    shared = dict(enumerate((_num_shared(*pair) for pair in pairs), start=1))
    most = max(shared.values(), default=0)
    return min(places, key=lambda place: shared.get(place, most))


def _num_shared(one: bytes, other: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def mark(
    connection: sa.Connection, seq: int, numbers: Sequence[int], state: int, owner: str | None
) -> None:
    if numbers:
        which = lines.update().where(lines.c.batch == seq, lines.c.number.in_(numbers))
        connection.execute(which.values(state=state, lease_owner=owner))


def release(connection: sa.Connection, seq: int, of: sa.ColumnElement[bool]) -> None:
    """Free leased lines of a batch."""
    connection.execute(
        lines.update()
        .where(lines.c.batch == seq, lines.c.state.in_(LEASED_STATES), of)
        .values(state=LineState.WAITING, lease_owner=None)
    )


def is_alive(connection: sa.Connection, server: str) -> bool:
    """Whether a server may lease; it cannot be found dead before this transaction ends."""
    query = sa.select(servers.c.name).where(servers.c.name == server)
    return connection.execute(query.with_for_update(read=True)).first() is not None


def has_leftovers(connection: sa.Connection, seq: int) -> bool:
    """Whether lines of a batch have no final result."""
    left = sa.select(lines.c.number).where(lines.c.batch == seq, lines.c.state.in_(LEASED_STATES))
    return connection.execute(left.limit(1)).first() is not None
