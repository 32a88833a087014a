"""The ledger of one iteration: every second, token, page and slot a plan spends goes through it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from cosched.core.batch import BatchTotals, IntArray
from cosched.core.kv_state import Match
from cosched.core.memories import Memory
from cosched.core.plan import SkipReason
from cosched.core.request import Request, num_encoded, num_tokens_of
from cosched.core.view import View
from cosched.memory.kv_forecast import KvForecast
from cosched.memory.kv_memory import KvMemory


class Ledger:
    """The rest of the token, memory, slot, adapter and chunk limits of a growing plan, and the
    predicted time of its iteration.

    Limits count the decodes of all running requests from the start; pausing and preempting refund
    them (`refund_pauses`, `refund_preemption`). Time counts those that `add_decodes` names.

    What each kind of memory limits it says itself (`cosched.core.memories.Memory`): a request is
    admitted if none refuses it, with as many tokens as the scarcest has room for.
    """

    __slots__ = (
        "_adapters",
        "_caps",
        "_free_slots",
        "_most_tokens",
        "_num_admitted",
        "_num_prefills",
        "_view",
        "kv",
        "memories",
        "prefills_mix",
        "slots",
        "tokens",
        "totals",
        "unfinished",
    )

    def __init__(self, view: View, *, forecast: KvForecast | None = None) -> None:
        """forecast: replaces the KV that is set aside for admitted requests."""
        caps = view.caps
        limit = caps.max_prefill_tokens
        if caps.max_chunk_tokens is not None:
            limit = min(limit, caps.max_chunk_tokens)
        self._caps = caps
        self._view = view
        self._num_admitted = 0
        self._num_prefills = 0
        self._most_tokens = limit
        self.kv = KvMemory(view, forecast)
        self.memories: tuple[Memory, ...] = (*(m.fork() for m in view.memories), self.kv)
        """All kinds, that of KV last."""
        self.tokens = limit - (len(view.running) if caps.mixed_batches else 0)
        """Prefill tokens left."""
        self.slots = view.free_slots
        """Requests that may still be admitted."""
        self._free_slots = self.slots
        self.unfinished = caps.max_unfinished_prefills
        """Requests whose prefill may still end unfinished."""
        self.prefills_mix = True
        """All that is prefilled may share an iteration with decodes."""
        self.totals = BatchTotals()
        """Prefills and decodes that are in."""
        self._adapters: Counter[str | None] | None = None
        if caps.max_adapters is not None:
            self._adapters = Counter(r.traits.adapter for r in (*view.running, *view.unfinished))

    def fork(self) -> Ledger:
        """A copy for a trial."""
        other = object.__new__(Ledger)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.totals = self.totals.copy()
        if self._adapters is not None:
            other._adapters = self._adapters.copy()
        other.kv = self.kv.fork()
        other.memories = (*(m.fork() for m in self.memories[:-1]), other.kv)
        return other

    def seconds(self) -> float:
        """Predicted time of the iteration [s]."""
        return self._view.predictor.predict_s(self.totals)

    def seconds_with(self, num_tokens: int, num_cached: int, *, encoded: int = 0) -> float:
        """The same with one more prefill, and so many tokens of its media [s]."""
        trial = self.totals.copy()
        trial.add_prefill(num_tokens, num_cached)
        trial.add_encoded(encoded)
        return self._view.predictor.predict_s(trial)

    def most_prefill(self, num_cached: int, limit_s: float, limit: int, encoded: int = 0) -> int:
        """`Predictor.max_prefill` beside what is in, and so many tokens of its media."""
        totals = self.totals
        if encoded:
            totals = totals.copy()
            totals.add_encoded(encoded)
        return self._view.predictor.max_prefill(totals, num_cached, limit_s, limit)

    def seconds_with_decodes(self, contexts: Sequence[int] | IntArray) -> float:
        """The same with more decodes [s]."""
        trial = self.totals.copy()
        trial.add_decodes(contexts)
        return self._view.predictor.predict_s(trial)

    def add_decodes(self, contexts: Sequence[int] | IntArray) -> None:
        """Count the time of decodes; contexts: tokens that each attends to."""
        self.totals.add_decodes(contexts)

    def drop_decode(self, context: int) -> None:
        """Take back the time of a counted decode. The longest context is not updated, so the time
        is an upper bound."""
        self.totals.num_decodes -= 1
        self.totals.decode_context -= context

    def refusal(
        self, request: Request, match: Match, *, at_most: int | None = None
    ) -> SkipReason | None:
        """Why a waiting request cannot be admitted now with up to `at_most` prompt tokens (None:
        any number), or None. Hard limits only."""
        if not self._has_slots(request):
            return SkipReason.REQUEST_SLOTS
        if not self._has_adapter(request):
            return SkipReason.ADAPTERS
        for memory in self.memories:
            reason = memory.refuses(request, match)
            if reason is not None:
                return reason
        if self.tokens <= 0 and request.traits.can_cut:
            return SkipReason.TOKEN_BUDGET
        if self.chunk(request, match, at_most=at_most) <= 0:
            if self._room(request, match) <= 0:
                return SkipReason.MEMORY_BUDGET
            return (
                SkipReason.UNFINISHED_PREFILL if self.unfinished <= 0 else SkipReason.TOKEN_BUDGET
            )
        return None

    def _has_slots(self, request: Request) -> bool:
        num_rows = request.traits.num_rows
        most = self._caps.max_prefills
        if self.slots < num_rows or (most is not None and self._num_prefills >= most):
            return False
        # With beams the engine counts each request before them as many times.
        return num_rows == 1 or self._num_prefills < self._free_slots // num_rows

    def _has_adapter(self, request: Request) -> bool:
        adapters = self._adapters
        if adapters is None or adapters[request.traits.adapter] > 0:
            return True
        assert self._caps.max_adapters is not None
        return sum(1 for count in adapters.values() if count > 0) < self._caps.max_adapters

    def chunk(self, request: Request, match: Match | None, *, at_most: int | None = None) -> int:
        """Prompt tokens of a request that fit the token budget and the memory that is available at
        once, no more than `at_most`: all that remain, or a chunk of whole units
        (`EngineCaps.chunk_unit`) when a prefill may stay unfinished, or 0. match: of a waiting
        request; None: it is an unfinished prefill."""
        num_cached = request.num_computed_tokens if match is None else match.cached
        remaining = num_tokens_of(request) - num_cached
        available = self._room(request, match)
        if not request.traits.can_cut or self._caps.max_chunk_tokens is None:
            if at_most is not None and remaining > at_most:
                return 0
            return remaining if self._fits_whole(request, remaining, available) else 0
        tokens = min(self.tokens, available)
        if self._caps.ceil_to_page(remaining) <= tokens and (
            at_most is None or remaining <= at_most
        ):
            return remaining
        if self.unfinished <= 0:
            return 0
        if at_most is not None:
            tokens = min(tokens, at_most)
        page, unit = self._caps.page_size, self._caps.chunk_unit
        if unit == page:
            return max((num_cached + tokens) // page * page - num_cached, 0)
        return max(tokens // unit * unit, 0)

    def _fits_whole(self, request: Request, num_tokens: int, available: int) -> bool:
        """True if a prompt that cannot be cut fits, or any prompt without chunked prefill."""
        num_kv = self._caps.ceil_to_page(num_tokens)
        if not request.traits.can_cut:
            # The first one may use the tokens that are counted for decodes.
            return num_kv <= min(
                self.tokens if self._num_prefills else self._most_tokens, available
            )
        # After the first one the engine asks for strictly less.
        if num_kv <= min(self.tokens - bool(self._num_prefills), available):
            return True
        # It runs the first one whatever its length.
        limit = self._caps.max_prefill_tokens - len(self._view.running)
        return num_tokens <= available and self.tokens >= limit

    def _room(self, request: Request, match: Match | None) -> int:
        """Prompt tokens for which there is memory in this iteration."""
        room = sys.maxsize
        for memory in self.memories:  # no comprehension: plans ask thousands of times
            room = min(room, memory.most_tokens(request, match))
        return room

    def charge_admission(self, request: Request, match: Match, num_tokens: int) -> None:
        """Spend what admitting `num_tokens` of a waiting request takes."""
        self._num_admitted += 1
        self.slots -= request.traits.num_rows
        if self._adapters is not None:
            self._adapters[request.traits.adapter] += 1
        if match.to_load:
            self.totals.add_load(match.to_load)
        for memory in self.memories:
            memory.admit(request, match, num_tokens)
        self._charge_prefill(request, match.cached, num_tokens)

    @property
    def may_continue(self) -> bool:
        """True if no admitted request has taken the slot of an unfinished prefill."""
        return self.slots > 0 or not self._num_admitted

    def continuation(
        self, request: Request, *, at_most: int | None = None, unreserved: bool = False
    ) -> int:
        """Prompt tokens that an unfinished prefill may compute, at most `at_most`; 0: it cannot
        continue.

        It has a request slot; but the engine counts it among the requests that it admits, so it
        must not take the slot of a request that this plan admitted before it.

        unreserved: memory for the chunk is enough; none is needed for its output
        """
        num_tokens = self.chunk(request, None, at_most=at_most)
        if num_tokens <= 0 or not self.may_continue:
            return 0
        if unreserved or self.kv.may_proceed(request, num_tokens):
            return num_tokens
        return 0

    def why_it_stops(self, request: Request) -> SkipReason | None:
        """Why an unfinished prefill cannot continue by one token; None: only the caller's limit."""
        if not self.may_continue:
            return SkipReason.REQUEST_SLOTS
        if self.continuation(request) > 0:
            return None
        return SkipReason.TOKEN_BUDGET if self.tokens <= 0 else SkipReason.MEMORY_BUDGET

    def charge_continuation(self, request: Request, num_tokens: int) -> None:
        """Spend what `num_tokens` more of an unfinished prefill take."""
        self.slots -= 1
        for memory in self.memories:
            memory.proceed(request, num_tokens)
        self._charge_prefill(request, request.num_computed_tokens, num_tokens)

    def refund_preemption(self, request: Request) -> None:
        """Refund what preempting a running request or an unfinished prefill frees."""
        self.slots += request.traits.num_rows
        self._free_slots += request.traits.num_rows
        for memory in self.memories:
            memory.preempt(request)
        if self._adapters is not None:
            self._adapters[request.traits.adapter] -= 1
        if not any(r.rid == request.rid for r in self._view.unfinished):
            self.refund_pauses((request,))

    def refund_pauses(self, requests: Sequence[Request]) -> None:
        """Refund the decodes of running requests that pause."""
        self._pause(len(requests), self.steps_of(requests))

    def charge_pause(self, request: Request) -> None:
        """The inverse of `refund_pauses`."""
        self._pause(-1, -self.steps_of((request,)))

    def _pause(self, num_requests: int, num_tokens: int) -> None:
        for memory in self.memories:
            memory.pause(num_requests, num_tokens)
        if self._caps.mixed_batches:
            self.tokens += num_requests

    def decodes_fit(self) -> bool:
        """True if the decodes that are in have memory, beside the prefills that are."""
        return all(memory.can_decode() for memory in self.memories)

    def can_decode(self, request: Request) -> bool:
        """True if a paused request can decode beside the prefills."""
        if self._caps.mixed_batches and self.tokens < 1:
            return False
        num_tokens = self.steps_of((request,))
        return all(memory.can_decode(1, num_tokens) for memory in self.memories)

    def steps_of(self, requests: Sequence[Request]) -> int:
        """KV tokens that the next decodes of running requests take."""
        page = self._caps.page_size
        if page > 1:
            requests = [r for r in requests if r.num_computed_tokens % page == 0]
        return page * sum([request.traits.num_rows for request in requests])

    def _charge_prefill(self, request: Request, num_cached: int, num_tokens: int) -> None:
        assert num_tokens > 0, f"{num_tokens=} {request.rid=}"
        self._num_prefills += 1
        self.prefills_mix = self.prefills_mix and request.traits.can_mix
        self.totals.add_prefill(num_tokens, num_cached)
        self.totals.add_encoded(num_encoded(request, num_cached, num_tokens))
        self.tokens -= self._caps.ceil_to_page(num_tokens)
        if num_cached + num_tokens < num_tokens_of(request):
            assert self.unfinished > 0, f"second unfinished prefill {request.rid=}"
            self.unfinished -= 1
