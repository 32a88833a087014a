"""KV pages that an online and an offline request share (BROS §5).

With pages of more than one token the last page of each request, its *tail*, has empty slots. "Each
block can be used for KV cache storage of one RT request and one BE request, with a bidirectional
storage layout for sharing the block between two requests: KV cache of the RT request occupies
memory slots from the left to the right in the block while that of the BE request in the opposite
direction" (§5.1).

Only tails are shared. A page that one request has filled is its own, so whole pages stay whole and
aligned, and are what a radix tree takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Page:
    """A page that is not full, with its owners. One of the two may be missing."""

    online: PageTail | None = None
    offline: PageTail | None = None

    @property
    def left(self) -> int:
        """Slots that the online request has taken, from the left."""
        return 0 if self.online is None else self.online.count

    @property
    def right(self) -> int:
        """Slots that the offline request has taken, from the right."""
        return 0 if self.offline is None else self.offline.count


@dataclass(slots=True, eq=False, kw_only=True)
class PageTail:
    """The last page of a request, which it has not filled.

    row     of the request in the engine's table of slots: its name here
    start   its first token in that page, by its place in the request
    count   tokens in it, at least 1
    """

    row: int
    is_online: bool
    start: int
    count: int
    page: Page

    @property
    def peer(self) -> PageTail | None:
        """The owner of the other side of the page."""
        return self.page.offline if self.is_online else self.page.online


class PreemptionTable:
    """Which request has which tail: "it records the IDs of RT and BE requests that share the same
    blocks" (BROS §3), with how far each has come.

    Deviation: the paper lets an online request overwrite slots of an offline one that it shares a
    page with, and keeps in the table which. Here the page is parted before its last slot is taken:
    the side with fewer tokens moves to another page (`part`), so that nothing that a running
    request needs is ever overwritten. Where there is no other page, an offline request is stopped
    before, and loses the tokens of its tail; they are recomputed when it resumes.
    """

    def __init__(self, page_size: int) -> None:
        """page_size: tokens, above 1."""
        assert page_size > 1, f"nothing to share: {page_size=}"
        self.page_size = page_size
        self.least_empty = max(2, page_size // 4)
        """Slots that stay empty where sharing begins: below 2 the page would be parted in the next
        iteration, and each parting costs a copy."""
        self._tails: dict[int, PageTail] = {}
        self._alone: dict[bool, dict[int, PageTail]] = {True: {}, False: {}}
        self._shared: dict[Page, None] = {}

    def __len__(self) -> int:
        """Tails."""
        return len(self._tails)

    def __iter__(self) -> Iterator[PageTail]:
        return iter(self._tails.values())

    def tail(self, row: int) -> PageTail | None:
        """Of a request; None: its last page is full, or it shares none."""
        return self._tails.get(row)

    @property
    def num_shared(self) -> int:
        """Pages with two owners: each saves one page."""
        return len(self._shared)

    @property
    def num_threatened(self) -> int:
        """Shared pages that the next token of both would overfill. As many pages must stay free:
        the next iteration may part them."""
        limit = self.page_size - 1
        return sum([page.left + page.right >= limit for page in self._shared])

    # --- Which requests share ---

    def find_block(self, count: int) -> PageTail | None:
        """FindBlock, for an offline request without a free page: whose page it shares, from the
        right. "If it is a prefill request whose KV cache has not been stored, we find available GPU
        blocks for it according to the maximum number of empty slots in each block; if the request's
        KV cache has been stored in some GPU blocks, we continue growing its KV cache in the last
        block (if the empty slots of this block are not used up by itself) or start occupying a new
        block" (BROS §5.2). A free page has the most empty slots, so it comes before this.

        count: of its tokens that go there. None: no page has room.
        """
        return self._emptiest(self._alone[True], count)

    def find_preempt_block(self, count: int) -> PageTail | None:
        """FindPreemptBlock, for an online request: "if no GPU blocks are available,
        FindPreemptBlock helps them preempt BE cache blocks and store the KV tensors in the opposite
        direction. A straightforward heuristic is adopted to always preempt BE cache blocks with the
        most empty slots" (BROS §5.2). None: no such page has room; then an offline request must be
        stopped ("we progressively drop requests: first BE, then RT"), which is for a plan to say.
        """
        return self._emptiest(self._alone[False], count)

    def _emptiest(self, tails: Mapping[int, PageTail], count: int) -> PageTail | None:
        best = min(tails.values(), key=lambda tail: tail.count, default=None)
        if best is None or best.count + count + self.least_empty > self.page_size:
            return None
        return best

    # --- What requests do ---

    def open(
        self, row: int, *, is_online: bool, start: int, count: int, beside: PageTail | None
    ) -> None:
        """A request begins a tail, on a page of its own or `beside` another."""
        assert row not in self._tails, f"{row=} has a tail"
        page = Page() if beside is None else beside.page
        tail = PageTail(row=row, is_online=is_online, start=start, count=count, page=page)
        assert 0 < count and page.left + page.right + count < self.page_size
        if beside is None:
            self._alone[is_online][row] = tail
        else:
            assert beside.is_online is not is_online and beside.peer is None
            del self._alone[beside.is_online][beside.row]
            self._shared[page] = None
        if is_online:
            page.online = tail
        else:
            page.offline = tail
        self._tails[row] = tail

    def part(self, growth: Mapping[int, int], stay: Collection[int] = ()) -> list[PageTail]:
        """Part the pages that are too small for what their owners add next. Returns the tails that
        must move to a page of their own: the owner with fewer tokens, unless it is among `stay`.

        growth: row -> tokens, of those that grow in their tail.
        """
        moved = []
        for page in list(self._shared):
            online, offline = page.online, page.offline
            assert online is not None and offline is not None
            added = growth.get(online.row, 0) + growth.get(offline.row, 0)
            if not added or online.count + offline.count + added <= self.page_size:
                continue
            tail = online if online.count < offline.count else offline
            if tail.row in stay:
                tail = online if tail is offline else offline
                assert tail.row not in stay, f"neither can move: {stay=}"
            self._leave_peer(tail)
            tail.page = Page(online=tail) if tail.is_online else Page(offline=tail)
            self._alone[tail.is_online][tail.row] = tail
            moved.append(tail)
        return moved

    def grow_each(self, rows: Iterable[int]) -> None:
        """A token more in the tail of each of these that has one."""
        tails, full = self._tails, self.page_size - 1
        for row in rows:
            tail = tails.get(row)
            if tail is None:
                continue
            if tail.count == full:
                self.grow(tail, 1)
            else:
                tail.count += 1

    def grow(self, tail: PageTail, count: int) -> None:
        """A request adds tokens to its tail, which has the room (`part`). When it is full it is a
        tail no longer."""
        tail.count += count
        if tail.count >= self.page_size:
            assert tail.count == self.page_size and tail.peer is None
            del self._tails[tail.row]
            del self._alone[tail.is_online][tail.row]

    def leave(self, row: int) -> bool:
        """A request gives up its tail. True: the page has no owner any more."""
        tail = self._tails.pop(row)
        if tail.peer is None:
            del self._alone[tail.is_online][row]
            return True
        self._leave_peer(tail)
        return False

    def _leave_peer(self, tail: PageTail) -> None:
        page, peer = tail.page, tail.peer
        assert peer is not None
        if tail.is_online:
            page.online = None
        else:
            page.offline = None
        del self._shared[page]
        self._alone[peer.is_online][peer.row] = peer

    def check_integrity(self) -> None:
        """AssertionError when the table contradicts itself."""
        for row, tail in self._tails.items():
            assert tail.row == row and 0 < tail.count < self.page_size
            assert (tail.page.online if tail.is_online else tail.page.offline) is tail
            assert tail.page.left + tail.page.right <= self.page_size
            assert (tail.peer is None) == (self._alone[tail.is_online].get(row) is tail)
            assert (tail.peer is not None) == (tail.page in self._shared)
        assert len(self._tails) == sum(map(len, self._alone.values())) + 2 * len(self._shared)
