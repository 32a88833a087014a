"""Clients that send requests, in virtual time and live."""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from cosched.core.request import RequestClass
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.simulation.arrivals import VOCAB_SIZE, Arrival
from cosched_traces.workload import TraceRequest


def online_client(
    requests: Sequence[TraceRequest], *, vocab_size: int = VOCAB_SIZE
) -> OpenLoopClient | SessionClient:
    """Sessions if some requests wait for the replies to others, else an open loop."""
    if any(request.after is not None for request in requests):
        return SessionClient(requests, vocab_size=vocab_size)
    return OpenLoopClient(requests, vocab_size=vocab_size)


def arrivals_of(
    requests: Iterable[TraceRequest], *, vocab_size: int = VOCAB_SIZE
) -> Iterator[Arrival]:
    """Requests with their tokens, made lazily."""
    for request in requests:
        yield _arrival_of(request, request.prompt(vocab_size=vocab_size))


def _arrival_of(request: TraceRequest, input_ids: array[int]) -> Arrival:
    return Arrival(
        rid=request.rid,
        arrival_s=request.arrival_s,
        request_class=request.request_class,
        input_ids=input_ids,
        num_output_tokens=request.num_output_tokens,
        max_new_tokens=request.max_new_tokens or request.num_output_tokens,
        tenant=request.tenant,
        slo=request.slo,
        priority=request.priority,
        media=request.media,
    )


class OpenLoopClient:
    """Sends each request at its arrival time."""

    def __init__(self, requests: Sequence[TraceRequest], *, vocab_size: int = VOCAB_SIZE) -> None:
        self._requests = requests
        self._vocab_size = vocab_size
        self._next = 0

    def due(self, now_s: float) -> Iterator[Arrival]:
        first = self._next
        while self._next < len(self._requests) and self._requests[self._next].arrival_s <= now_s:
            self._next += 1
        due = itertools.islice(self._requests, first, self._next)
        return arrivals_of(due, vocab_size=self._vocab_size)

    def next_s(self) -> float | None:
        if self._next == len(self._requests):
            return None
        return self._requests[self._next].arrival_s

    def on_finish(self, record: RequestRecord, output_ids: Sequence[int] | None = None) -> None:
        pass


class SessionClient:
    """Sends first turns at their arrival times, later ones a think time after the reply before.

    If the next prompt continues this prompt by at least the length of the reply, the simulated
    reply consists of these tokens, so that their KV can be reused. Where a trace leaves out the
    model's reasoning, it is computed again. The reply of a live server replaces these tokens."""

    def __init__(self, requests: Sequence[TraceRequest], *, vocab_size: int = VOCAB_SIZE) -> None:
        self._vocab_size = vocab_size
        self._followers: dict[str, list[TraceRequest]] = defaultdict(list)
        self._prompts: dict[str, array[int]] = {}
        self._answered: set[str] = set()
        """Requests whose prompts contain live replies."""
        self._answers: dict[str, slice] = {}
        """Place of the reply before in these prompts."""
        self._due: list[tuple[float, int, TraceRequest]] = []
        self._num_pushed = itertools.count()
        for request in requests:
            if request.after is None:
                self._push(request.arrival_s, request)
            else:
                self._followers[request.after].append(request)

    def due(self, now_s: float) -> Iterator[Arrival]:
        while self._due and self._due[0][0] <= now_s:
            time_s, _, request = heapq.heappop(self._due)
            yield self._arrival(request, time_s)

    def next_s(self) -> float | None:
        return self._due[0][0] if self._due else None

    def on_finish(self, record: RequestRecord, output_ids: Sequence[int] | None = None) -> None:
        assert record.finish_s is not None, f"{record.rid} has no end"
        for follower in self._followers.pop(record.rid, ()):
            answer = self._answers.pop(follower.rid, None)
            if answer is not None and output_ids:
                self._prompts[follower.rid][answer] = array("q", output_ids)
            if answer is not None and (output_ids or record.rid in self._answered):
                self._answered.add(follower.rid)
            self._push(record.finish_s + follower.think_s, follower)

    def _push(self, time_s: float, request: TraceRequest) -> None:
        heapq.heappush(self._due, (time_s, next(self._num_pushed), request))

    def _arrival(self, request: TraceRequest, time_s: float) -> Arrival:
        prompt = self._prompts.pop(request.rid, None)
        prompt = prompt or request.prompt(vocab_size=self._vocab_size)
        output_ids: Sequence[int] = ()
        for follower in self._followers.get(request.rid, ()):
            later = follower.prompt(vocab_size=self._vocab_size)
            self._prompts[follower.rid] = later
            if request.rid in self._answered:
                # Earlier live replies stay in the context.
                traced = request.prompt(vocab_size=self._vocab_size)
                if later[: len(traced)] == traced:
                    later = self._prompts[follower.rid] = prompt + later[len(traced) :]
            begin, end = len(prompt), len(prompt) + request.num_output_tokens
            if end <= len(later) and later[:begin] == prompt:
                output_ids = later[begin:end]
                self._answers[follower.rid] = slice(begin, end)
        arrival = _arrival_of(request, prompt)
        return replace(arrival, arrival_s=time_s, output_ids=output_ids)


class ClosedLoopClient:
    """Keeps at most `concurrency` requests in flight, as a gateway with a static cap or a batch
    runner does. A request arrives when it is sent."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        *,
        concurrency: int,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        assert concurrency >= 0, f"{concurrency=}"
        self._vocab_size = vocab_size
        self.concurrency = concurrency
        self._requests = iter(requests)
        self._rids = frozenset(request.rid for request in requests)
        self._num_in_flight = 0
        self._now_s = 0.0

    def due(self, now_s: float) -> Iterator[Arrival]:
        self._now_s = now_s
        num_free = max(self.concurrency - self._num_in_flight, 0)
        free = itertools.islice(self._requests, num_free)
        for arrival in arrivals_of(free, vocab_size=self._vocab_size):
            self._num_in_flight += 1
            yield replace(arrival, arrival_s=now_s)

    def next_s(self) -> float | None:
        return None

    def on_finish(self, record: RequestRecord, output_ids: Sequence[int] | None = None) -> None:
        if record.rid in self._rids:
            self._num_in_flight -= 1


class WaveClient(ClosedLoopClient):
    """Sends `size` requests at once, and the next wave when all of them have ended (BROS §7.1:
    "periodically submitted in a batch manner"). A request arrives when it is sent."""

    def __init__(
        self, requests: Sequence[TraceRequest], *, size: int, vocab_size: int = VOCAB_SIZE
    ) -> None:
        assert size >= 1, f"{size=}"
        super().__init__(requests, concurrency=size, vocab_size=vocab_size)

    def due(self, now_s: float) -> Iterator[Arrival]:
        return iter(()) if self._num_in_flight else super().due(now_s)


class AimdClient(ClosedLoopClient):
    """A gateway with additive increase and multiplicative decrease of its cap.

    Every `period_s` the cap is halved if more than the share `max_missed` of the online requests
    that ended since missed a target; otherwise it grows by one, up to `max_concurrency`.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        *,
        is_missed: Callable[[RequestRecord], bool],
        period_s: float = 1.0,
        max_missed: float = 0.05,
        max_concurrency: int = 256,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        super().__init__(requests, concurrency=1, vocab_size=vocab_size)
        self._is_missed = is_missed
        self._period_s = period_s
        self._max_missed = max_missed
        self._max_concurrency = max_concurrency
        self._tick_s = period_s
        self._num_ended = 0
        self._num_missed = 0

    def due(self, now_s: float) -> Iterator[Arrival]:
        while self._tick_s <= now_s:
            self._adjust()
            self._tick_s += self._period_s
        return super().due(now_s)

    def next_s(self) -> float | None:
        return self._tick_s if self._num_in_flight or self._has_more() else None

    def on_finish(self, record: RequestRecord, output_ids: Sequence[int] | None = None) -> None:
        super().on_finish(record, output_ids)
        if record.request_class is RequestClass.ONLINE:
            self._num_ended += 1
            self._num_missed += self._is_missed(record)

    def _adjust(self) -> None:
        if self._num_missed > self._max_missed * self._num_ended:
            self.concurrency = max(math.floor(self.concurrency / 2), 1)
        else:
            self.concurrency = min(self.concurrency + 1, self._max_concurrency)
        self._num_ended = self._num_missed = 0

    def _has_more(self) -> bool:
        head = next(self._requests, None)
        if head is None:
            return False
        self._requests = itertools.chain([head], self._requests)
        return True
