"""The ledger of one iteration: every second, token, page and slot a plan spends goes through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cosched.core.batch import BatchTotals, IntArray
from cosched.core.kv_state import Match
from cosched.core.plan import SkipReason
from cosched.core.request import Request, RequestClass, num_tokens_left, num_tokens_of
from cosched.core.view import View
from cosched.schedule.forecast import KvForecast
from cosched.schedule.side_ledger import side_ledgers


class Ledger:
    """The rest of the token, memory, slot, adapter and chunk limits of a growing plan, and the
    predicted time of its iteration.

    Two memory rules hold. The engine's own (SGLang's `PrefillAdder`): a request is admitted if its
    uncached prompt, its reserved output (at most `EngineCaps.max_reserved_tokens`) and one page of
    rounding are below the headroom. It then holds its chunk; the output stays reserved once its
    prefill is complete. The second is the memory of the iteration itself: its chunks in whole pages
    beside the next step of all decodes, which the engine does not check in a mixed batch.

    Limits count the decodes of all running requests from the start; pausing and preempting refund
    them (`refund_pauses`, `refund_preemption`). Time counts those that `add_decodes` names.

    Memory beside the KV has ledgers of its own (`cosched.schedule.side_ledger`).
    """

    __slots__ = (
        "_adapters",
        "_caps",
        "_forecast",
        "_free_slots",
        "_most_tokens",
        "_num_admitted",
        "_num_prefills",
        "_running",
        "_side",
        "_stopped",
        "_view",
        "available",
        "headroom",
        "offline_headroom",
        "prefills_mix",
        "promises",
        "slots",
        "tokens",
        "totals",
        "unfinished",
    )

    def __init__(self, view: View, *, forecast: KvForecast | None = None) -> None:
        """forecast: replaces the KV that is set aside for admitted requests."""
        caps = view.caps
        kv = view.kv
        num_running = len(view.running)
        num_mixed = num_running if caps.mixed_batches else 0
        limit = caps.max_prefill_tokens
        if caps.max_chunk_tokens is not None:
            limit = min(limit, caps.max_chunk_tokens)
        self._caps = caps
        self._forecast = forecast
        self._view = view
        self._num_admitted = 0
        self._num_prefills = 0
        self._running: frozenset[str] | None = None
        self._stopped: frozenset[str] = frozenset()
        self._side = side_ledgers(view)
        self._most_tokens = limit
        self.tokens = limit - num_mixed
        """Prefill tokens left."""
        self.headroom = kv.headroom - num_mixed
        """KV tokens for new requests and their output; may be negative."""
        self.available = kv.free + kv.evictable - kv.next_step
        """KV tokens for chunks of this iteration beside the decodes; may be negative."""
        self.offline_headroom: int | None = None
        """KV tokens that offline requests may take beside the online reservation (`KvState.kept`);
        None: any number, as for the first one, or a large request would never run."""
        if kv.kept and kv.offline_held and _runs_offline(view):
            self.offline_headroom = kv.total - kv.kept - kv.offline_held
        self.slots = view.free_slots
        """Requests that may still be admitted."""
        self._free_slots = self.slots
        self.unfinished = caps.max_unfinished_prefills
        """Requests whose prefill may still end unfinished."""
        self.prefills_mix = True
        """All that is prefilled may share an iteration with decodes."""
        self.promises: dict[str, int] = {}
        """rid -> output tokens, generated ones included, for which this plan sets KV aside."""
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
        other.promises = self.promises.copy()
        if self._adapters is not None:
            other._adapters = self._adapters.copy()
        if self._forecast is not None:
            other._forecast = self._forecast.fork()
        other._side = tuple(side.fork() for side in self._side)
        return other

    def seconds(self) -> float:
        """Predicted time of the iteration [s]."""
        return self._view.predictor.predict_s(self.totals)

    def seconds_with(self, num_tokens: int, num_cached: int) -> float:
        """The same with one more prefill [s]."""
        trial = self.totals.copy()
        trial.add_prefill(num_tokens, num_cached)
        return self._view.predictor.predict_s(trial)

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
        if not self.fits(request, match):
            return SkipReason.MEMORY_BUDGET
        if any(side.refuses(request, match) for side in self._side):
            return SkipReason.MEMORY_BUDGET
        if (
            self.offline_headroom is not None
            and request.request_class is RequestClass.OFFLINE
            and self._new_tokens(request, match) > self.offline_headroom
        ):
            return SkipReason.ONLINE_RESERVE
        if self.tokens <= 0 and request.traits.can_cut:
            return SkipReason.TOKEN_BUDGET
        if self.chunk(request, match.cached, at_most=at_most, num_loaded=match.host) <= 0:
            if self._chunk_headroom(match.host) <= 0:
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

    def _chunk_headroom(self, num_loaded: int = 0) -> int:
        """KV tokens of one more chunk: the engine may need a page more for it."""
        return self.available - self._caps.page_size - num_loaded

    def fits(self, request: Request, match: Match, *, spare: int = 0) -> bool:
        """True if there is memory for a waiting request and `spare` more KV tokens; cheaper than
        `shortfall`."""
        missing = self._missing(request, match)
        if self._forecast is not None and missing <= 0:
            return self._forecast.fits(request, match, spare=spare)
        return missing <= -spare

    def shortfall(self, request: Request, match: Match) -> int:
        """KV tokens missing to admit a waiting request; <= 0 when it fits."""
        missing = self._missing(request, match)
        if self._forecast is not None and missing <= 0:
            missing = self._forecast.shortfall(request, match)
        return missing

    def _missing(self, request: Request, match: Match) -> int:
        """KV tokens by which the engine's headroom is too small; the engine wants one to be
        left."""
        need = self._new_tokens(request, match) + self._reserve(request) + self._caps.page_size
        return need + 1 - self.headroom

    def chunk(
        self,
        request: Request,
        num_cached: int,
        *,
        at_most: int | None = None,
        num_loaded: int = 0,
    ) -> int:
        """Prompt tokens of this request that fit the token budget and the memory that is available
        at once, no more than `at_most`: all that remain, or a chunk of whole units
        (`EngineCaps.chunk_unit`) when a prefill may stay unfinished, or 0.

        num_loaded: tokens of its cached prefix that must be loaded from the host
        """
        remaining = num_tokens_of(request) - num_cached
        available = self._chunk_headroom(num_loaded)
        for side in self._side:
            most = side.most_tokens(request, num_cached)
            available = available if most is None else min(available, most)
        if not request.traits.can_cut:
            # The first one may use the tokens that are counted for decodes.
            limit = self.tokens if self._num_prefills else self._most_tokens
            if at_most is not None and remaining > at_most:
                return 0
            return remaining if self._caps.ceil_to_page(remaining) <= min(limit, available) else 0
        tokens = min(self.tokens, available)
        if self._caps.max_chunk_tokens is None and self._num_prefills:
            tokens = min(self.tokens - 1, available)  # the engine asks for strictly less
        if self._caps.ceil_to_page(remaining) <= tokens and (
            at_most is None or remaining <= at_most
        ):
            return remaining
        if self._caps.max_chunk_tokens is None:
            if (at_most is not None and remaining > at_most) or remaining > available:
                return 0
            # Without chunked prefill the engine runs the first prompt whole, whatever its length.
            limit = self._caps.max_prefill_tokens
            return remaining if self.tokens >= limit - len(self._view.running) else 0
        if self.unfinished <= 0:
            return 0
        if at_most is not None:
            tokens = min(tokens, at_most)
        page, unit = self._caps.page_size, self._caps.chunk_unit
        if unit == page:
            return max((num_cached + tokens) // page * page - num_cached, 0)
        return max(tokens // unit * unit, 0)

    @property
    def has_forecast(self) -> bool:
        """Requests are admitted by the expected lengths of outputs."""
        return self._forecast is not None

    def set_aside(self, request: Request, match: Match) -> None:
        """From now on requests are admitted only if they fit beside this one, which waits for
        memory. Only with a forecast."""
        assert self._forecast is not None
        self._forecast.add(request, match)

    def charge_admission(self, request: Request, match: Match, num_tokens: int) -> None:
        """Spend what admitting `num_tokens` of a waiting request takes."""
        self._num_admitted += 1
        self.slots -= request.traits.num_rows
        self.headroom -= match.evictable + match.host
        self.available -= match.evictable + match.host
        if self._forecast is not None:
            self._forecast.add(request, match)
            self.promises[request.rid] = request.num_output_tokens
        if request.request_class is RequestClass.OFFLINE:
            self._charge_offline(self._new_tokens(request, match))
        if self._adapters is not None:
            self._adapters[request.traits.adapter] += 1
        if match.host:
            self.totals.add_load(match.host)
        for side in self._side:
            side.charge_admission(request, match, num_tokens)
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
        num_tokens = self.chunk(request, request.num_computed_tokens, at_most=at_most)
        if num_tokens <= 0 or not self.may_continue:
            return 0
        if unreserved:
            return num_tokens
        need = self._caps.ceil_to_page(num_tokens) + self._caps.page_size
        if request.num_computed_tokens + num_tokens == num_tokens_of(request):
            need += self._reserve(request)
        return num_tokens if need <= self.headroom else 0

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
        if self._forecast is not None and self._view.promised(request) != request.num_output_tokens:
            # It was admitted by another rule, such as the safe one.
            self.promises[request.rid] = request.num_output_tokens
        for side in self._side:
            side.charge_continuation(request, num_tokens)
        self._charge_prefill(request, request.num_computed_tokens, num_tokens)

    def promise(self, request: Request, num_tokens: int) -> None:
        """Set KV aside for `num_tokens` output tokens of a request, generated ones included, from
        now on, in place of the engine's rule or an earlier promise. `headroom` may become
        negative."""
        self.headroom -= self.price(request, num_tokens)
        self.promises[request.rid] = num_tokens

    def price(self, request: Request, num_tokens: int) -> int:
        """KV tokens of headroom that such a promise takes beyond what is reserved for the request
        already, and, for a guest, what it has taken of its host's. 0 for a waiting request, which
        is charged at admission."""
        if not self._runs(request):
            return 0
        return self._promised(request, num_tokens) - self._kept_for(request)

    def _kept_for(self, request: Request) -> int:
        """Tokens of headroom that are reserved for the output of a running request."""
        promise = self.promises.get(request.rid)
        if promise is None or not self._runs(request):
            return self._view.reserve_of(request)
        return self._promised(request, promise)

    def _runs(self, request: Request) -> bool:
        if self._running is None:
            self._running = frozenset(running.rid for running in self._view.running)
        return request.rid in self._running and request.rid not in self._stopped

    def _promised(self, request: Request, num_tokens: int) -> int:
        num_left = max(num_tokens - request.num_output_tokens, 0)
        return promised_tokens(num_left * request.traits.num_rows)

    def refund_preemption(self, request: Request) -> None:
        """Refund what preempting a running request or an unfinished prefill frees."""
        gain = self._view.preemption_gain(request)
        self.slots += request.traits.num_rows
        self._free_slots += request.traits.num_rows
        reserve = self._kept_for(request)
        self._stopped |= {request.rid}
        self.headroom += gain + reserve
        self.available += gain
        for side in self._side:
            side.refund_preemption(request)
        is_unfinished = any(r.rid == request.rid for r in self._view.unfinished)
        if self._forecast is not None:
            self._forecast.drop(request, num_tokens_left(request) if is_unfinished else 0)
        if request.request_class is RequestClass.OFFLINE:
            self._charge_offline(-gain)
        if self._adapters is not None:
            self._adapters[request.traits.adapter] -= 1
        if not is_unfinished:
            self.refund_pauses((request,))

    def refund_pauses(self, requests: Sequence[Request]) -> None:
        """Refund the decodes of running requests that pause."""
        num_tokens = self.steps_of(requests)
        self.available += num_tokens
        for side in self._side:
            side.refund_pauses(num_tokens)
        if self._caps.mixed_batches:
            self.tokens += len(requests)
            self.headroom += len(requests)

    def charge_pause(self, request: Request) -> None:
        """The inverse of `refund_pauses`."""
        num_tokens = self.steps_of((request,))
        self.available -= num_tokens
        for side in self._side:
            side.refund_pauses(-num_tokens)
        if self._caps.mixed_batches:
            self.tokens -= 1
            self.headroom -= 1

    def decodes_fit(self) -> bool:
        """True if the decodes that are in have memory, beside the prefills that are."""
        return self.available >= 0 and all(side.decodes_fit() for side in self._side)

    def can_decode(self, request: Request) -> bool:
        """True if a paused request can decode beside the prefills."""
        if self._caps.mixed_batches and min(self.tokens, self.headroom) < 1:
            return False
        if not self._side:
            return self.available >= self.steps_of((request,))
        trial = self.fork()
        trial.charge_pause(request)
        return trial.decodes_fit()

    def steps_of(self, requests: Sequence[Request]) -> int:
        """KV tokens that the next decodes of running requests take."""
        page = self._caps.page_size
        if page > 1:
            requests = [r for r in requests if r.num_computed_tokens % page == 0]
        return page * sum([request.traits.num_rows for request in requests])

    def _charge_prefill(self, request: Request, num_cached: int, num_tokens: int) -> None:
        assert num_tokens > 0, f"{num_tokens=} {request.rid=}"
        caps = self._caps
        self._num_prefills += 1
        self.prefills_mix = self.prefills_mix and request.traits.can_mix
        self.totals.add_prefill(num_tokens, num_cached)
        self.tokens -= caps.ceil_to_page(num_tokens)
        self.headroom -= caps.ceil_to_page(num_tokens) + caps.page_size
        self.available -= caps.ceil_to_page(num_tokens) + caps.page_size
        if num_cached + num_tokens < num_tokens_of(request):
            assert self.unfinished > 0, f"second unfinished prefill {request.rid=}"
            self.unfinished -= 1
        else:
            # Its whole output, also after a preemption: the engine subtracts generated tokens when
            # it asks for memory, not when it takes it.
            self.headroom -= min(self._most_output(request), caps.max_reserved_tokens)

    def _new_tokens(self, request: Request, match: Match) -> int:
        """KV tokens of its prompt that no request holds."""
        return num_tokens_of(request) - match.cached + match.host + match.evictable

    def _charge_offline(self, num_tokens: int) -> None:
        kv = self._view.kv
        if self.offline_headroom is not None:
            self.offline_headroom -= num_tokens
        elif kv.kept:
            self.offline_headroom = kv.total - kv.kept - kv.offline_held - num_tokens

    def _reserve(self, request: Request) -> int:
        remaining = self._most_output(request) - request.num_output_tokens
        return min(max(remaining, 0), self._caps.max_reserved_tokens)

    def _most_output(self, request: Request) -> int:
        """Output tokens, generated ones included, for which admission requires memory."""
        promise = self.promises.get(request.rid)
        if promise is None and self._forecast is not None:
            promise = request.num_output_tokens
        elif promise is None:
            promise = self._view.promised(request)
        return request.max_new_tokens if promise is None else promise


def promised_tokens(num_left: int, num_requests: int = 1) -> int:
    """KV tokens set aside for running requests that were promised `num_left` more output tokens in
    all their slots: SGLang counts one more for each request."""
    return num_left + num_requests


def _runs_offline(view: View) -> bool:
    """True if an offline request runs: otherwise what they hold belongs to an idle session."""
    offline = RequestClass.OFFLINE
    return bool(view.running_of(offline).requests) or any(
        request.request_class is offline for request in view.unfinished
    )
