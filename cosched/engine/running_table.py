"""What plans need to know of all running requests, kept from plan to plan.

Little changes for a request that keeps decoding, and what changes is known without reading it:
the batch has all lengths in one array, and each result says whose tokens it holds. So a plan reads
only new requests. With hundreds of requests most of its time would otherwise go into reading them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from cosched.core.plan import Plan
from cosched.core.request import PLAIN, RequestClass
from cosched.core.view import Outlook
from cosched.engine import port
from cosched.engine.reply_lengths import ReplyLengths
from cosched.engine.running import NONE, RequestColumn, Running, RunningRows, borrowed_by
from cosched.engine.tracked import TrackedRequest
from cosched.engine.tree_core import KvTreeCore
from cosched.predict.length_estimator import NUM_ENDS

_NUM_COLUMNS = RequestColumn.ENDS + NUM_ENDS
_KEPT = slice(0, RequestColumn.UNTIL)
"""Columns that are written when a request is new."""

_LENGTH = slice(RequestColumn.UNTIL, None)
"""Columns of its estimated length."""

_ESTIMATED = 16
"""Lengths that are estimated again with a result, or one of as many: each is due with every 16th
token at most. Where hundreds of requests began together, nothing waits for all of them."""

_NEWEST_SHARE = 0.05
"""Of the newest iteration in the moving average of tokens per decode."""


class RunningTable:
    """The running requests of one scheduler, by the row that each has in the engine: a few integers
    of each (`RequestColumn`)."""

    def __init__(
        self, lengths: ReplyLengths, generations: Any, *, page_size: int, decode_reserve: int = 1
    ) -> None:
        """generations: of each row, a number that changes when another request gets it
        (`port.row_generations`). decode_reserve: as in `EngineCaps`."""
        num_rows = len(generations)
        self.lengths = lengths
        self._page_size = page_size
        self._decode_reserve = decode_reserve
        self.tokens_per_decode = 1.0
        """Moving average: tokens of an online request in an iteration without prefills; until one
        has had such an iteration, of any request."""
        self._knows_online_tokens = False
        self._generations = generations
        self._read = np.full(num_rows, NONE, dtype=np.int64)
        """With which of them each row was read."""
        self._columns = np.zeros((_NUM_COLUMNS, num_rows), dtype=np.int64)
        self._owners: Any = np.full(num_rows, None, dtype=object)
        """`TrackedRequest`s."""
        self._rows: dict[str, int] = {}
        """rid of each of them -> its row."""
        self._settling: dict[int, int] = {}
        """Rows of those whose prompt may still come into the tree, and their output when they came:
        under overlap they run before the result of their prefill is there."""
        self._num_shifts = NONE
        self._estimates = False
        """Whether the policy asks how long requests will run (`outlook`): most do not."""
        self._lends = False
        """A plan has had loans: with most policies none has, and nothing looks for them."""

    def forget(self, request: TrackedRequest) -> None:
        """Read it again if it runs: a plan has set KV aside for it, for instance."""
        if request.row is not None:
            self._read[request.row] = NONE
            self._let_go(request.row)

    def ended(self, request: TrackedRequest) -> None:
        """It has ended: learn from its length."""
        self.lengths.ended(request)
        self.forget(request)

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
            generated = num_output - self._columns[RequestColumn.OUTPUT, rows]
            is_online = self._columns[RequestColumn.OFFLINE, rows] == 0
            self._learn_tokens(generated[is_online & (generated > 0)], is_online=True)
            self._learn_tokens(generated[generated > 0], is_online=False)
        self._columns[RequestColumn.OUTPUT, rows] = num_output
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
        """Remember what a plan sets aside, and which requests borrow of it. Returns, where the plan
        prefills, the rid of each running borrower -> KV tokens that it has taken of what its lender
        was promised. waiting: the request of an id, if it waits."""
        running: dict[str, TrackedRequest] = {}
        if plan.loans or any(waiting(rid) is None for rid in plan.promise):
            running = {req.rid: req.cosched for req in batch.reqs}
            if unfinished is not None:
                running[unfinished.rid] = unfinished.cosched
        for rid, num_tokens in plan.promise.items():
            tracked = running.get(rid) or waiting(rid)
            if tracked is not None:  # else it ended while the results were drained
                tracked.promise(num_tokens)
                self.forget(tracked)
        for rid, loan in plan.loans.items():
            borrower, lender = running.get(rid), running.get(loan.lender)
            if borrower is not None and lender is not None:
                borrower.borrow(lender)
                self.forget(borrower)
                self._lends = True
        if not plan.prefill or not self._lends:
            return {}
        return borrowed_by([req.cosched for req in batch.reqs])

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
            RunningRows(rows, columns, computed, allocated),
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
        num_output = self._columns[RequestColumn.OUTPUT, rows]
        late = num_output - self._columns[RequestColumn.UNTIL, rows]
        due = (late >= 0).nonzero()[0]
        if len(due) > most:
            due = due[np.argsort(-late[due], kind="stable")[:most]]
        for row, num in zip(rows[due].tolist(), num_output[due].tolist(), strict=True):
            self._columns[_LENGTH, row] = self._length(self._owner(row), num)

    def _length(self, tracked: TrackedRequest, num_output: int) -> tuple[int, ...]:
        """Of the columns `_LENGTH`."""
        until, upper, ends = self.lengths.ends(tracked, num_output)
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
            NONE if promised is None else promised,
            tracked.request_class is RequestClass.OFFLINE,
            tracked.traits is not PLAIN,
            tracked.reserves_all,
            tracked.loan is not None,
            tracked.arrival_seq,
            NONE,
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
                if num_shared != columns[RequestColumn.SHARED, row]:
                    columns[RequestColumn.SHARED, row], columns[RequestColumn.GAIN, row] = (
                        num_shared,
                        NONE,
                    )
            if tracked is None or tracked.num_output_tokens > num_output:
                del self._settling[row]

    def outlook(
        self,
        running: Running,
        *,
        kv_tree: KvTreeCore | None,
        gain_of: Callable[[TrackedRequest], int],
    ) -> Outlook:
        """Of `View.outlook`. kv_tree: knows what of the tree each request alone holds; None:
        `gain_of` is asked about each."""
        columns, rows = running.columns, running.rows
        self._begin_estimates(running)
        left = columns[RequestColumn.ENDS :] - columns[RequestColumn.OUTPUT]
        if not running.are_plain:
            left *= columns[RequestColumn.SLOTS]
        if kv_tree is None:
            held = [gain_of(request) for request in running.everyone]
            return Outlook(np.array(held, dtype=np.int64), left)
        if self._num_shifts != kv_tree.num_shifts:
            self._num_shifts = kv_tree.num_shifts
            self._columns[RequestColumn.GAIN] = columns[RequestColumn.GAIN] = NONE
        unknown = (columns[RequestColumn.GAIN] == NONE).nonzero()[0].tolist()
        if unknown:
            nodes = [port.last_node(self._owner(rows[place]).req) for place in unknown]
            columns[RequestColumn.GAIN, unknown] = kv_tree.gains_of_release(nodes)
            self._columns[RequestColumn.GAIN, rows] = columns[RequestColumn.GAIN]
        return Outlook(running.num_own + columns[RequestColumn.GAIN], left)

    def longest_left(self, running: Running, request_class: RequestClass) -> int:
        """Of `View.longest_left`."""
        self._begin_estimates(running)
        columns = running.columns
        num_output = columns[RequestColumn.OUTPUT]
        left = np.maximum(columns[RequestColumn.UPPER] - num_output, 1)
        left = np.minimum(left, columns[RequestColumn.LIMIT] - num_output)
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
