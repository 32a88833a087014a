"""Which waiting lines of a batch a server gets: in prefix order, in step with other batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, takewhile

import sqlalchemy as sa

from cosched.batch.data import Line, NewLine
from cosched.batch.database import LineState, lines

LEASED_STATES = (LineState.WAITING, LineState.TAKEN)
_TO_A_BORDER = 32
"""More lines among which a server's part of a batch ends where a document does: every document that
is divided is computed twice."""
_MOST_OF_PEER = 512
"""Lines of another batch that are set aside with those of one: a prefix may have very many."""
_LATE_PART = 8
"""One in eight lines at a server may be far behind the others: a long reply."""
_IN_ORDER = (lines.c.lease_owner, lines.c.prefix_key, lines.c.number)
"""The owner makes PostgreSQL read along the index, where it would sort all free lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Lines that a server wants of a batch.

    num_ahead    lines beyond the limit that are set aside for its next claim
    leader       the batch of the tenant, this one or another, with which it keeps in step: its
                 lines come from where those of the leader are at this server, so that a document
                 that both ask about is computed once; None: this one
    most_behind  waiting lines by which its own place may be behind the leader's; with more it goes
                 to that, and comes back to them last
    peers        other batches of the tenant: where servers share the store, what this one takes of
                 the prefix order it has of all of them
    """

    batch_id: str
    limit: int
    num_ahead: int = 0
    leader: str | None = None
    most_behind: int = 0
    peers: tuple[str, ...] = ()


class Leases:
    """The lines of one batch in a transaction, for one server."""

    def __init__(
        self,
        connection: sa.Connection,
        seq: int,
        *,
        server: str,
        leader: int,
        peers: Sequence[int] = (),
    ) -> None:
        """seq, leader, peers: `batches.seq`"""
        self._peers = peers
        self._connection = connection
        self._seq = seq
        self._server = server
        self._leader = leader

    def take(self, claim: Claim, *, max_bytes: int, may_steal: bool) -> list[Line]:
        """In prefix order: first lines set aside for this server, then free ones, of which
        `claim.num_ahead` more are set aside, so that one server takes lines with a common prefix.
        may_steal: if there are no others, the last of those set aside for other servers."""
        owner = lines.c.lease_owner
        found: list[NewLine] = []
        num_more = claim.num_ahead + (_TO_A_BORDER if claim.num_ahead else 0)
        for span in self._spans(claim.most_behind):
            for of, more in ((owner == self._server, 0), (owner.is_(None), num_more)):
                limit = claim.limit - len(found)
                if limit > 0:
                    found += self._waiting(sa.and_(of, span), limit=limit + more)
        if not found and may_steal:
            found = self._waiting(owner != self._server, limit=claim.limit, is_last=True)
            found = found[_border(found, range(len(found) // 2 + 1)) :]
        taken: list[Line] = []
        num_bytes = 0
        for line in found[: claim.limit]:
            num_bytes += line.num_bytes
            if taken and num_bytes > max_bytes:
                break
            taken.append(line)
        end = len(taken)
        if claim.num_ahead:
            wanted = claim.limit + claim.num_ahead
            least = min(claim.limit + claim.num_ahead // 2, len(found))
            places = sorted(range(least, len(found) + 1), key=lambda place: abs(place - wanted))
            end = max(end, _border(found, places))
        for some, state in ((taken, LineState.TAKEN), (found[len(taken) : end], LineState.WAITING)):
            numbers = [line.number for line in some]
            mark(self._connection, self._seq, numbers, state, self._server)
        if claim.num_ahead and end:
            keys = [line.prefix_key for line in found[:end]]
            turn = next((n for n in range(1, end) if keys[n] < keys[n - 1]), end)
            self._set_aside_of_peers(keys[0], keys[turn - 1])  # without what was passed over
        return taken

    def _set_aside_of_peers(self, first: bytes, last: bytes) -> None:
        for peer in self._peers:
            numbers = self._connection.scalars(
                sa.select(lines.c.number)
                .where(
                    lines.c.batch == peer,
                    lines.c.state == LineState.WAITING,
                    lines.c.lease_owner.is_(None),
                    lines.c.prefix_key.between(first, last),
                )
                .order_by(*_IN_ORDER)
                .limit(_MOST_OF_PEER)
                .with_for_update(skip_locked=True)
            ).all()
            mark(self._connection, peer, numbers, LineState.WAITING, self._server)

    def _spans(self, most_behind: int) -> Sequence[sa.ColumnElement[bool]]:
        """The parts of the prefix order from which lines are taken, one after the other: from the
        leader's place on, or its own a little behind, and then what was passed over."""
        first, own = self._first_of(self._leader), self._first_of(self._seq)
        if first is None or (own is not None and self._is_close(own, first, most_behind)):
            first = own
        if first is None:
            return [sa.true()]
        return [lines.c.prefix_key >= first, lines.c.prefix_key < first]

    def _is_close(self, own: bytes, first: bytes, most_behind: int) -> bool:
        """Whether few lines wait between its own place and the leader's behind it."""
        between = (lines.c.prefix_key >= own, lines.c.prefix_key < first)
        free = (lines.c.state == LineState.WAITING, lines.c.lease_owner.is_(None))
        numbers = sa.select(lines.c.number).where(lines.c.batch == self._seq, *free, *between)
        found = self._connection.execute(numbers.limit(most_behind + 1)).all()
        return own < first and len(found) <= most_behind

    def _first_of(self, seq: int) -> bytes | None:
        """About the first key of a batch's lines in flight at this server; None: there are none."""
        here = sa.and_(
            lines.c.batch == seq,
            lines.c.state == LineState.TAKEN,
            lines.c.lease_owner == self._server,
        )
        count = sa.select(sa.func.count()).select_from(lines).where(here)
        num_late = self._connection.execute(count).scalar_one() // _LATE_PART
        keys = sa.select(lines.c.prefix_key).where(here).order_by(*_IN_ORDER)
        return self._connection.execute(keys.offset(num_late).limit(1)).scalar()

    def _waiting(
        self, of: sa.ColumnElement[bool], *, limit: int, is_last: bool = False
    ) -> list[NewLine]:
        """The first waiting lines, or the last ones, in prefix order. Lines that another server is
        taking now are left out."""
        query = (
            sa.select(*(lines.c[field.name] for field in fields(NewLine)))
            .where(lines.c.batch == self._seq, lines.c.state == LineState.WAITING, of)
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
