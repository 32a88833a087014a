"""The isolated baseline: what online requests would have without offline work, in virtual time.

Of every online request are known its arrival, its prompt, and in the end its length. From these and
from predicted times of iterations follows how the stock scheduler would have served the online
requests with the device to themselves: no run without offline work is needed. It is as right as the
predictions are.

The order is SGLang's own: prompts before decodes, first come, first served, in chunks, at most one
of them unfinished; all that run decode together. With the overlap scheduler a batch is planned
when the one before the last is done, so an arriving request waits for up to two of them, and a
request that has ended is in one more batch.

How long a reply is becomes known when it ends, later than it would have ended alone. So no decode
is simulated that has not been seen: time waits for it (`num_output`).

Not modelled: KV memory (no request waits for it), what the prefix cache would have held in place of
what it holds, and preemption.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from cosched.core.batch import BatchTotals

MOST_FOLLOWED = 8192
"""Requests that are followed at a time. Beyond them all are forgotten: either they would never get
through alone, or the predictions are far off."""

_KEPT_ENDS = 1 << 16
"""Decode iterations of which is known when they ended: for replies that were longer here than they
turn out to be."""

_LEAST_S = 1e-5
"""No iteration is shorter [s]: time advances whatever is predicted."""


class BaselineLatency(NamedTuple):
    """Latency of a request in the baseline.

    tpot_s  None: its reply has one token
    """

    rid: str
    ttft_s: float
    tpot_s: float | None


@dataclass(slots=True, eq=False)
class _Request:
    """num_left      prompt tokens still to be computed
    num_context   tokens before them
    num_output    of its reply; None: not known yet
    first_s       when its first token came out; None: it has not
    first_decode  number of the decode iteration that gives its second token
    is_running    it decodes
    """

    rid: str
    arrival_s: float
    num_left: int
    num_context: int
    num_output: int | None = None
    first_s: float | None = None
    first_decode: int = 0
    is_running: bool = False
    is_over: bool = False


@dataclass(slots=True)
class _Batch:
    """done_s  when its result is there [s]
    firsts  whose first tokens it gives
    decode  its number among the decode iterations; None: it is a prefill
    """

    done_s: float
    firsts: list[_Request]
    decode: int | None


class IsolatedBaseline:
    """Online requests without offline work under stock scheduling.

    Deterministic, and time is given. `advance` costs O(1) for each iteration that it passes
    through, and O(requests) where one of them ends.
    """

    def __init__(
        self,
        *,
        max_chunk_tokens: int | None,
        max_prefill_tokens: int,
        max_running_requests: int,
        page_size: int = 1,
        overlaps: bool = True,
        num_output: Callable[[str], int] | None = None,
    ) -> None:
        """The limits of the engine as `EngineCaps` has them.

        overlaps    its scheduler plans an iteration while another one runs
        num_output  tokens that a request has had so far; None: it may have any number
        """
        self._num_output = num_output
        self._most_chunk = math.inf if max_chunk_tokens is None else max_chunk_tokens
        self._most_input = max_prefill_tokens
        self._most_running = max_running_requests
        self._page_size = page_size
        self._overlaps = overlaps
        self.num_forgotten = 0
        """Requests of which nothing became known, since there were too many."""
        self._forget()
        self._now_s = -math.inf
        self._free_s = -math.inf

    def _forget(self) -> None:
        self._known: dict[str, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._unfinished: _Request | None = None
        self._joining: list[_Request] = []
        self._running: dict[str, _Request] = {}
        self._offset = 0
        """Of all that run: tokens of their contexts before decode iteration 0, had they run."""
        self._longest: int | None = 0
        """The largest of these; None: to be computed."""
        self._last_seen = -1
        """The last decode iteration that gives no token that has not been seen."""
        self._ends: list[tuple[int, int, _Request]] = []
        """(number of the decode iteration that gives the last token, place, request)."""
        self._num_ends = 0
        self._in_flight: deque[_Batch] = deque()
        self._is_following = False
        """The turn before this one launched a batch."""
        self._num_decodes = 0
        self._num_done = 0
        """Decode iterations planned, and of these done."""
        self._done_s: deque[float] = deque(maxlen=_KEPT_ENDS)
        self._served: list[BaselineLatency] = []

    def arrived(self, rid: str, arrival_s: float, *, num_prompt: int, num_cached: int = 0) -> None:
        """An online request has come. Requests come in the order of their arrival.

        num_cached: prompt tokens that were in the prefix cache then
        """
        if rid in self._known:
            return
        if len(self._known) >= MOST_FOLLOWED:
            self.num_forgotten += len(self._known)
            self._forget()
        num_context = min(num_cached, num_prompt - 1)
        request = _Request(rid, arrival_s, num_prompt - num_context, num_context)
        self._known[rid] = request
        self._waiting.append(request)

    def ended(self, rid: str, num_output: int) -> None:
        """Its reply is over, and this long [tokens]: here it ends with the same token. Unknown
        requests are left out; one without any output counts as never come."""
        request = self._known.get(rid)
        if request is None or request.num_output is not None:
            return
        if num_output < 1:
            self._drop(request)
            return
        request.num_output = num_output
        if request.first_s is not None or request.is_running:
            self._expect_end(request)

    def advance(self, until_s: float, predict_s: Callable[[BatchTotals], float]) -> None:
        """Follow them until then [s]. All that came by then must be known. predict_s: time of an
        iteration [s]."""
        while True:
            if not self._in_flight and not self._is_following and not self._has_work():
                if not self._waiting:
                    return
                self._now_s = max(self._now_s, self._waiting[0].arrival_s)
            if self._now_s > until_s:
                return
            if self._must_wait():
                return
            batch = self._plan(predict_s)
            if batch is not None:
                self._in_flight.append(batch)
            if self._is_following or (batch is not None and not self._overlaps):
                self._finish(self._in_flight.popleft())
            self._is_following = batch is not None and self._overlaps

    def pop_served(self) -> list[BaselineLatency]:
        """Those that have ended, here and in reality, since the last call."""
        served, self._served = self._served, []
        return served

    def _has_work(self) -> bool:
        if self._running or self._joining or self._unfinished is not None:
            return True
        return bool(self._waiting) and self._waiting[0].arrival_s <= self._now_s

    def _must_wait(self) -> bool:
        """The next iteration might be a decode that has not been seen."""
        for request in self._joining:
            self._join(request)
        self._joining = []
        if self._num_output is None or self._num_decodes <= self._last_seen:
            return False
        # Its first token is that of the prefill, the second that of its first decode.
        self._last_seen = min(
            (
                request.first_decode + self._num_output(request.rid) - 2
                for request in self._running.values()
                if request.num_output is None
            ),
            default=self._num_decodes,
        )
        return self._num_decodes > self._last_seen

    def _plan(self, predict_s: Callable[[BatchTotals], float]) -> _Batch | None:
        totals = BatchTotals()
        firsts = self._add_prefills(totals)
        decode = None
        if not totals.num_new:
            if not self._running:
                return None
            decode = self._num_decodes
            self._num_decodes += 1
            num = totals.num_decodes = len(self._running)
            if self._longest is None:
                self._longest = max(r.num_context - r.first_decode for r in self._running.values())
            totals.decode_context = self._offset + num * (decode + 1)
            totals.max_decode_context = self._longest + decode + 1
        self._joining = firsts
        self._free_s = max(self._now_s, self._free_s) + max(predict_s(totals), _LEAST_S)
        return _Batch(self._free_s, firsts, decode)

    def _add_prefills(self, totals: BatchTotals) -> list[_Request]:
        """Those whose prompts are complete by it."""
        firsts: list[_Request] = []
        left, left_input = self._most_chunk, self._most_input
        if self._unfinished is not None:
            request, self._unfinished = self._unfinished, None
            num_new = self._add(request, totals, left)
            left, left_input = left - num_new, left_input - num_new
            if request.num_left:
                self._unfinished = request
            else:
                firsts.append(request)
        waiting = self._waiting
        num_free = self._most_running - len(self._running) - totals.num_prefills
        while waiting and waiting[0].arrival_s <= self._now_s and num_free > 0:
            request = waiting[0]
            if left <= 0 or left_input <= 0:
                break
            if left == math.inf and totals.num_prefills and request.num_left >= left_input:
                break  # where prompts are cut, the budget of a chunk is the only one
            if request.num_left > left and left < self._page_size:
                break
            waiting.popleft()
            if request.is_over:
                continue
            num_new = self._add(request, totals, left)
            left, left_input, num_free = left - num_new, left_input - num_new, num_free - 1
            if request.num_left:
                self._unfinished = request
                break
            firsts.append(request)
        return firsts

    def _add(self, request: _Request, totals: BatchTotals, most: float) -> int:
        num_new = request.num_left
        if num_new > most:
            num_new = int(most) // self._page_size * self._page_size
        totals.add_prefill(num_new, request.num_context)
        request.num_left -= num_new
        request.num_context += num_new
        return num_new

    def _finish(self, batch: _Batch) -> None:
        self._now_s = max(self._now_s, batch.done_s)
        if batch.decode is not None:
            self._num_done += 1
            self._done_s.append(batch.done_s)
            while self._ends and self._ends[0][0] < self._num_done:
                self._end(heappop(self._ends)[2])
        for request in batch.firsts:
            request.first_s = batch.done_s
            if not request.is_over and request.num_output == 1:
                self._end(request)

    def _join(self, request: _Request) -> None:
        if request.is_over:
            return
        request.first_decode = self._num_decodes
        self._last_seen = min(self._last_seen, self._num_decodes - 1)
        request.is_running = True
        self._running[request.rid] = request
        offset = request.num_context - request.first_decode
        self._offset += offset
        if self._longest is not None:
            self._longest = offset if len(self._running) == 1 else max(self._longest, offset)
        if request.num_output is not None:
            self._expect_end(request)

    def _expect_end(self, request: _Request) -> None:
        assert request.num_output is not None, f"{request.rid=}"
        if request.num_output == 1:
            if request.first_s is not None:
                self._end(request)
            return
        if not request.is_running:
            return  # it is expected when it joins
        last = request.first_decode + request.num_output - 2
        if last < self._num_done:
            self._end(request)
        else:
            heappush(self._ends, (last, self._num_ends, request))
            self._num_ends += 1

    def _end(self, request: _Request) -> None:
        self._drop(request)
        assert request.num_output is not None and request.first_s is not None, f"{request.rid=}"
        tpot_s = None
        if request.num_output > 1:
            ago = self._num_done - (request.first_decode + request.num_output - 2)
            if ago > len(self._done_s):
                return  # too long ago
            tpot_s = (self._done_s[-ago] - request.first_s) / (request.num_output - 1)
        self._served.append(
            BaselineLatency(request.rid, request.first_s - request.arrival_s, tpot_s)
        )

    def _drop(self, request: _Request) -> None:
        del self._known[request.rid]
        request.is_over = True
        if self._unfinished is request:
            self._unfinished = None
        if request.is_running:
            request.is_running = False
            del self._running[request.rid]
            offset = request.num_context - request.first_decode
            self._offset -= offset
            if offset == self._longest:
                self._longest = None if self._running else 0
