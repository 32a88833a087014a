"""SGLang's allocator of KV pages, with pages that an online and an offline request share (BROS).

`cosched.papers.bros.pages` decides which requests share a page; this module assigns the slots. An
offline request fills all its pages from the right, so that a page need not be reversed when it is
shared. Page numbers stay on the device, as in SGLang: decisions depend on lengths only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.utils.common import async_h2d

from cosched.core.request import RequestClass
from cosched.errors import ConfigError
from cosched.papers.bros.pages import PageTail, PreemptionTable
from cosched.wire import class_of_priority


class _Rows(NamedTuple):
    """Per row, on the device: the page of its tail, and the step from one slot to the next."""

    tail_pages: torch.Tensor
    steps: torch.Tensor


class BidirectionalAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]  # untyped here
    """Shares pages when there are fewer free pages than requests with a tail: another page would
    then soon cost an eviction. Beams, sessions and requests with input embeddings share nothing."""

    free_pages: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_parted = 0
        """Tails that were copied to another page since the start."""
        self.before_copy: Callable[[], None] = lambda: None
        """Makes the device finish what runs before a copy."""
        super().__init__(*args, **kwargs)

    def clear(self) -> None:
        super().clear()
        self.table = PreemptionTable(self.page_size)
        self._is_online: dict[int, bool] = {}
        self._rows: _Rows | None = None
        self._batch: Any = None
        self._freed_row: int | None = None

    def available_size(self) -> int:
        """Tokens of the free pages, without those that the next iteration may need to split shared
        pages. Below 0: decodes lack memory, and a request must be preempted."""
        page_size: int = self.page_size
        return int(super().available_size()) - self.table.num_threatened * page_size

    def savings(self) -> tuple[int, int]:
        """KV tokens that sharing saves now, and tails that were copied since the start."""
        return self.table.num_shared * self.page_size, self.num_parted

    # --- Taking slots ---

    @contextlib.contextmanager
    def allocating(self, batch: Any) -> Iterator[None]:
        """While SGLang allocates for a batch."""
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool | None:
        if self._batch is None:
            return super().evict_to_free_tokens(tree_cache, num_tokens)  # type: ignore[no-any-return]
        return None  # `_take` knows how much is needed when pages are shared

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        rows, steps = [], []
        for req in self._batch.reqs:
            row = req.kv.req_pool_idx
            self._is_online.pop(row, None)
            if req.beam_group is None and req.session is None and req.input_embeds is None:
                request_class = class_of_priority(req.priority)
                self._is_online[row] = request_class is RequestClass.ONLINE
            rows.append(row)
            steps.append(self._step(row))
        self._rows_of(self._batch).steps[rows] = self._copied(steps)
        starts, ends = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist()
        growth = {
            row: min(end, -(-start // self.page_size) * self.page_size) - start
            for row, start, end in zip(rows, starts, ends, strict=True)
            if start % self.page_size
        }
        # SGLang writes the prefix of these rows again when it has their slots: they stay.
        moved = [(tail, tail.count) for tail in self.table.part(growth, stay=growth)]
        return self._take(rows, starts, ends, last_loc, moved)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        batch, page_size = self._batch, self.page_size
        rows, ends = batch.req_pool_indices_cpu.tolist(), seq_lens_cpu.tolist()
        growing = {row: 1 for row, end in zip(rows, ends, strict=True) if (end - 1) % page_size}
        moved = [(tail, tail.count) for tail in self.table.part(growing)]
        # Most requests take the slot beside their last one. The others begin a page or have moved.
        new = {tail.row for tail, _ in moved}
        some = [i for i, row in enumerate(rows) if row not in growing or row in new]
        self.table.grow_each(growing.keys() - new)
        places = self._copied(some)
        taken = self._take(
            [rows[i] for i in some],
            [ends[i] - 1 for i in some],
            [ends[i] for i in some],
            last_loc[places],
            moved,
        )
        if taken is None:
            return None
        slots = last_loc + self._rows_of(batch).steps[batch.req_pool_indices]
        slots[places] = taken
        return slots

    def _step(self, row: int) -> int:
        """From one slot of a request to the next in a page."""
        return -1 if self._is_online.get(row) is False else 1

    def _take(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        last_loc: torch.Tensor,
        moved: Sequence[tuple[PageTail, int]],
    ) -> torch.Tensor | None:
        """Slots of the tokens from `starts` to `ends` of each row; None: there is too little
        memory. last_loc: the slot before `starts`; moved: tails that get a page of their own, and
        their present number of tokens."""
        page_size, table = self.page_size, self.table
        tail_pages = self._rows_of(self._batch).tail_pages
        draft = _Draft(num_rows=len(tail_pages))
        for tail, _ in moved:
            draft.tails[tail.row] = draft.fresh()
        num_free = len(self.free_pages) - table.num_threatened
        for index, (row, start, end) in enumerate(zip(rows, starts, ends, strict=True)):
            is_online = self._is_online.get(row)
            is_mirrored = is_online is False
            if start % page_size:
                count = min(end - start, -start % page_size)
                old = table.tail(row)
                if old is None:
                    draft.add(draft.last(index), count, is_mirrored, start)
                else:
                    draft.add(draft.tail(row), count, is_mirrored, start)
                    table.grow(old, count)
                start += count
            num_pages, count = divmod(end - start, page_size)
            if num_pages:
                draft.add(draft.fresh(num_pages), num_pages * page_size, is_mirrored, start)
                start += num_pages * page_size
            if not count:
                continue
            beside: PageTail | None = None
            if is_online is not None and num_free - draft.num_fresh <= len(table):
                find = table.find_preempt_block if is_online else table.find_block
                beside = find(count)
            page = draft.fresh() if beside is None else draft.tail(beside.row)
            draft.add(page, count, is_mirrored, start)
            if is_online is not None:
                table.open(row, is_online=is_online, start=start, count=count, beside=beside)
                draft.tails[row] = page
        super().evict_to_free_tokens(self._batch.tree_cache, draft.num_fresh * page_size)
        if draft.num_fresh > len(self.free_pages):
            return None
        fresh = self.free_pages[: draft.num_fresh]
        self.free_pages = self.free_pages[draft.num_fresh :]
        pages = torch.cat((fresh, tail_pages, last_loc // page_size))
        sources, offsets = self._copied(draft.slots(page_size))
        slots = pages[sources] * page_size + offsets
        if draft.tails:
            changed, codes = self._copied(draft.changed())
            if moved:
                self._move(moved, pages[codes[: len(moved)]])
            tail_pages[changed] = pages[codes]
        return slots

    def _copied(self, values: Any) -> torch.Tensor:
        """On the device; the host does not wait for it."""
        copied: torch.Tensor = async_h2d(values, dtype=torch.int64, device=self.device)
        return copied

    def _rows_of(self, batch: Any) -> _Rows:
        if self._rows is None:
            num_rows = len(batch.req_to_token_pool.req_to_token)
            self._rows = _Rows(
                torch.zeros(num_rows, dtype=torch.int64, device=self.device),
                torch.ones(num_rows, dtype=torch.int64, device=self.device),
            )
        return self._rows

    def _move(self, moved: Sequence[tuple[PageTail, int]], pages: torch.Tensor) -> None:
        """Copy tails to these pages, and update their rows."""
        counts = np.array([count for _, count in moved])
        owner = np.repeat(np.arange(len(moved)), counts)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        mirrored = np.array([not tail.is_online for tail, _ in moved])[owner]
        rows = np.array([tail.row for tail, _ in moved])[owner]
        column = np.array([tail.start for tail, _ in moved])[owner] + place
        offset = np.where(mirrored, self.page_size - 1 - place, place)
        owner_, rows_, column_, offset_ = self._copied(np.stack((owner, rows, column, offset)))
        # The device may still write these tokens.
        self.before_copy()
        source = self._rows_of(self._batch).tail_pages[rows_] * self.page_size + offset_
        target = pages[owner_] * self.page_size + offset_
        self._kvcache.move_kv_cache(target, source)
        self._batch.req_to_token_pool.write((rows_, column_), target.to(torch.int32))
        self.num_parted += len(moved)

    # --- Giving slots back ---

    @contextlib.contextmanager
    def freeing(self, row: int) -> Iterator[None]:
        """While SGLang frees tokens of a row."""
        self._freed_row = row
        try:
            yield
        finally:
            self._freed_row = None

    def free_segments(self, segments: Sequence[tuple[torch.Tensor, int]]) -> None:
        row = self._freed_row
        tail = None if row is None else self.table.tail(row)
        if row is None or tail is None:
            super().free_segments(segments)
            return
        whole = [(slots[: max(tail.start - start, 0)], start) for slots, start in segments]
        super().free_segments(whole)
        if any(start + len(slots) > tail.start for slots, start in segments):
            assert self._rows is not None
            if self.table.leave(row):
                self.free_page_ids(self._rows.tail_pages[row : row + 1])


class _Draft:
    """The slots of a batch before its pages are known. Page numbers from 0 are new pages, those
    below 0 are pages of tails, by row, and then pages of last slots, by index in the batch."""

    def __init__(self, num_rows: int) -> None:
        self.num_fresh = 0
        self.tails: dict[int, int] = {}
        """Row -> new page of a tail."""
        self._num_rows = num_rows
        self._pieces: list[tuple[int, int, bool, int]] = []

    def fresh(self, num_pages: int = 1) -> int:
        """The first of `num_pages` new pages."""
        self.num_fresh += num_pages
        return self.num_fresh - num_pages

    def tail(self, row: int) -> int:
        return self.tails.get(row, -1 - row)

    def last(self, index: int) -> int:
        return -1 - self._num_rows - index

    def add(self, page: int, count: int, is_mirrored: bool, start: int) -> None:
        """Tokens of one request from its token `start`, in one page or in new pages from it."""
        self._pieces.append((page, count, is_mirrored, start))

    def slots(self, page_size: int) -> np.ndarray:
        """[2, tokens]: page and offset in it."""
        pieces = np.array(self._pieces, dtype=np.int64).reshape(-1, 4)
        counts = pieces[:, 1]
        before = np.cumsum(counts) - counts
        page, _, mirrored, start = np.repeat(pieces, counts, axis=0).T
        token = np.arange(len(page)) - np.repeat(before, counts) + start
        page = page + np.where(page >= 0, token // page_size - start // page_size, 0)
        place = token % page_size
        place = np.where(mirrored, page_size - 1 - place, place)
        return np.stack((self._resolved(page), place))

    def changed(self) -> np.ndarray:
        """[2, rows]: rows of tails with a new page, and this page."""
        rows, pages = np.array(list(self.tails.items()), dtype=np.int64).T
        return np.stack((rows, self._resolved(pages)))

    def _resolved(self, pages: np.ndarray) -> np.ndarray:
        return np.where(pages >= 0, pages, self.num_fresh - 1 - pages)


# --- A scheduler ---


def share_pages(scheduler: Any) -> None:
    """Prepare copies between pages, if its allocator shares them. ConfigError if pages of its model
    cannot be copied."""
    allocator = scheduler.token_to_kv_pool_allocator
    if not isinstance(allocator, BidirectionalAllocator):
        return
    pool = allocator.get_kvcache()
    if type(pool) is not MHATokenToKVPool:
        raise ConfigError(
            "kv.bidirectional_pages cannot be had here: copies between pages of a "
            f"{type(pool).__name__} are not supported"
        )
    if scheduler.device == "cpu":
        pool.use_native_move_kv_cache = True
        return
    if not pool.use_native_move_kv_cache and pool._kv_copy_config is None:
        pool._init_kv_copy_and_warmup()  # stock has it for speculative decoding only
    device = torch.get_device_module(scheduler.device)
    allocator.before_copy = lambda: device.current_stream().wait_stream(scheduler.forward_stream)


# --- Hooks (`cosched_patches.memory`) ---


def allocate_for(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Passes the allocator of shared pages the requests that SGLang allocates for. SGLang gives
    only lengths, and sharing depends on the class."""
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if not isinstance(allocator, BidirectionalAllocator):
        return original(batch, *args, **kwargs)
    with allocator.allocating(batch):
        return original(batch, *args, **kwargs)


def free_row(original: Callable[..., None], cache: Any, kv: Any, ranges: Any) -> None:
    """Passes the allocator of shared pages the row whose tokens SGLang frees. SGLang gives slots,
    and a shared page is free after both requests have left it."""
    allocator = cache.token_to_kv_pool_allocator
    if not isinstance(allocator, BidirectionalAllocator):
        original(cache, kv, ranges)
        return
    with allocator.freeing(kv.req_pool_idx):
        original(cache, kv, ranges)


def num_saved(checker: Any) -> int:
    """KV tokens that SGLang's memory check counts twice, minus those that it misses: it assumes
    that requests share no page and that all free pages are available."""
    allocator = checker.token_to_kv_pool_allocator
    if not isinstance(allocator, BidirectionalAllocator):
        return 0
    table = allocator.table
    return (table.num_shared - table.num_threatened) * int(allocator.page_size)
