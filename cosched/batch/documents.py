"""Which of the waiting lines of a tenant's batches are next: document by document.

A *document* is what prompts begin with: lines that share most of their prefix keys. Whichever batch
chooses the next one, the lines of the others about it come with it, so it is computed once; and of
several servers one gets them all.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cosched.batch.batch_records import NewLine
from cosched.batch.jsonl.prefix_order import CHUNK_DIGEST_BYTES, MAX_CHUNKS

TO_A_BORDER = 32
"""More lines among which a server's part ends where a document does."""
MOST_ABOUT_ONE = 256
"""A prefix that more lines share stays in the cache anyway: it keeps no batches together."""
_LAST = b"\xff" * (CHUNK_DIGEST_BYTES * MAX_CHUNKS + 1)
"""After all prefix keys."""
_STEMS = (0.5, 0.75, 1.0)
"""What lines about one document share of the key of one: the first of these that so few share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A batch of a claim.

    most      lines that may be taken and set aside of it
    num_here  its lines in flight at this server
    due       end of the window, if the batch is late; infinite: it is not late
    """

    batch_id: str
    most: int
    num_here: int = 0
    due: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Lines that a server wants of batches of a tenant.

    parts      the batches
    limit      lines in all
    num_ahead  lines beyond the limit that are set aside for its next claim
    """

    parts: tuple[Part, ...]
    limit: int
    num_ahead: int = 0


class Queue:
    """The waiting lines of a batch that a server may have, in the order in which it takes them."""

    def __init__(
        self,
        part: Part,
        lines: Sequence[NewLine],
        *,
        complete: tuple[bytes, bytes | None],
        look_up: Callable[[bytes], Sequence[NewLine]],
    ) -> None:
        """lines: the first ones. complete: prefix keys from and up to, but not with, between which
        they are all; None: to the last. look_up: a beginning of keys -> all lines with it, where
        they are not complete"""
        self.part = part
        self._lines = lines
        self._at = 0
        self._by_key = sorted((line.prefix_key, line.number, line) for line in lines)
        self._complete = complete
        self._look_up = look_up
        self._chosen: set[int] = set()

    @property
    def next(self) -> NewLine | None:
        if len(self._chosen) >= self.part.most:
            return None
        while self._at < len(self._lines) and self._lines[self._at].number in self._chosen:
            self._at += 1
        return self._lines[self._at] if self._at < len(self._lines) else None

    @property
    def order(self) -> tuple[float, int]:
        """Of batches in which one chooses: the late ones, then that with the fewest in flight."""
        return self.part.due, self.part.num_here + len(self._chosen)

    def choose(self, line: NewLine) -> None:
        self._chosen.add(line.number)

    def about(self, stem: bytes) -> list[NewLine]:
        """The lines whose keys begin like this, as many as may be taken."""
        start, end = self._complete
        if not (start <= stem and (end is None or (after(stem) or _LAST) <= end)):
            self._add(self._look_up(stem))
        room = self.part.most - len(self._chosen)
        found: list[NewLine] = []
        for place in range(bisect_left(self._by_key, (stem,)), len(self._by_key)):
            key, number, line = self._by_key[place]
            if len(found) >= room or not key.startswith(stem):
                break
            if number not in self._chosen:
                found.append(line)
        return found

    def _add(self, lines: Sequence[NewLine]) -> None:
        for line in lines:
            one = (line.prefix_key, line.number, line)
            place = bisect_left(self._by_key, one[:2])
            if self._by_key[place : place + 1] != [one]:
                insort(self._by_key, one)


def after(stem: bytes) -> bytes | None:
    """The first key after all that begin with it; None: there is none."""
    begun = stem.rstrip(b"\xff")
    return begun[:-1] + bytes([begun[-1] + 1]) if begun else None


def choose(
    claim: Claim, queues: Sequence[Queue], *, begun: Sequence[bytes] = ()
) -> list[tuple[Queue, NewLine]]:
    """Lines to take and then to set aside; what is set aside ends between documents.

    begun: prefix keys of lines in flight at this server. Late batches come first and alone; then
    the other lines about documents that are begun; then the batch with the fewest lines in flight
    chooses one of its own.
    """
    wanted = claim.limit + claim.num_ahead
    enough = claim.limit + claim.num_ahead // 2
    chosen: list[tuple[Queue, NewLine]] = []
    for document in _documents(queues, begun):
        if claim.num_ahead and len(chosen) + len(document) > wanted + TO_A_BORDER:
            if len(chosen) >= enough:
                break
            del document[wanted - len(chosen) :]
        for queue, line in document:
            queue.choose(line)
        chosen += document
        if len(chosen) >= wanted:
            break
    return chosen if claim.num_ahead else chosen[: claim.limit]


def _documents(
    queues: Sequence[Queue], begun: Sequence[bytes]
) -> Iterator[list[tuple[Queue, NewLine]]]:
    """Lines about one document after the other. They must be chosen before the next is asked."""
    late = [queue for queue in queues if queue.part.due < math.inf]
    while having := [queue for queue in late if queue.next is not None]:
        yield _chosen_by(min(having, key=lambda queue: queue.order), late)
    for key in dict.fromkeys(begun):
        yield _document(key, queues)
    while having := [queue for queue in queues if queue.next is not None]:
        yield _chosen_by(min(having, key=lambda queue: queue.order), queues)


def _chosen_by(queue: Queue, queues: Sequence[Queue]) -> list[tuple[Queue, NewLine]]:
    assert queue.next is not None
    return _document(queue.next.prefix_key, queues, last=queue) or [(queue, queue.next)]


def _document(
    key: bytes, queues: Sequence[Queue], *, last: Queue | None = None
) -> list[tuple[Queue, NewLine]]:
    """The lines of all batches about the document with which a prompt begins; none if very many
    are. Those of one batch come last: if there is no room for all, it goes on with the document."""
    num_chunks = math.ceil(len(key) / CHUNK_DIGEST_BYTES)
    for part in _STEMS:
        stem = key[: math.ceil(num_chunks * part) * CHUNK_DIGEST_BYTES]
        if not stem:
            break
        found = [(of, one) for of in queues for one in of.about(stem)]
        if len(found) <= MOST_ABOUT_ONE:
            return sorted(found, key=lambda it: (it[0] is last, it[1].prefix_key, it[1].number))
    return []
