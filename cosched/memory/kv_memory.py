"""The KV of full attention, while a plan grows."""

from __future__ import annotations

from typing import Self

from cosched.core.kv_state import Match
from cosched.core.memories import Memory
from cosched.core.plan import SkipReason
from cosched.core.request import Request, RequestClass, num_tokens_left, num_tokens_of
from cosched.core.view import View
from cosched.memory.kv_forecast import KvForecast


class KvMemory(Memory):
    """Two rules hold. The engine's own (SGLang's `PrefillAdder`): a request is admitted if its
    uncached prompt, its reserved output (at most `EngineCaps.max_reserved_tokens`) and one page of
    rounding are below the headroom. It then holds its chunk; the output stays reserved once its
    prefill is complete. The second is the memory of the iteration itself: its chunks in whole pages
    beside the next step of all decodes, which the engine does not check in a mixed batch.
    """

    name = "kv"

    def __init__(self, view: View, forecast: KvForecast | None = None) -> None:
        """forecast: replaces the KV that is set aside for admitted requests."""
        kv = view.kv
        self._caps = view.caps
        self._forecast = forecast
        self._view = view
        self._running: frozenset[str] | None = None
        self._stopped: frozenset[str] = frozenset()
        self.headroom = kv.headroom - (len(view.running) if view.caps.mixed_batches else 0)
        """Tokens for new requests and their output; may be negative."""
        self.available = kv.free + kv.evictable - kv.next_step
        """Tokens for chunks of this iteration beside the decodes; may be negative."""
        self.offline_headroom: int | None = None
        """Tokens that offline requests may take beside the online reservation (`KvState.kept`);
        None: any number, as for the first one, or a large request would never run."""
        if kv.kept and kv.offline_held and _runs_offline(view):
            self.offline_headroom = kv.total - kv.kept - kv.offline_held
        self.promises: dict[str, int] = {}
        """rid -> output tokens, generated ones included, for which this plan sets KV aside."""

    def fork(self) -> Self:
        other = super().fork()
        other.promises = self.promises.copy()
        if self._forecast is not None:
            other._forecast = self._forecast.fork()
        return other

    # --- What fits ---

    def refuses(self, request: Request, match: Match) -> SkipReason | None:
        if not self.fits(request, match):
            return SkipReason.MEMORY_BUDGET
        if (
            self.offline_headroom is not None
            and request.request_class is RequestClass.OFFLINE
            and self._new_tokens(request, match) > self.offline_headroom
        ):
            return SkipReason.ONLINE_RESERVE
        return None

    def fits(self, request: Request, match: Match, *, spare: int = 0) -> bool:
        """True if there is memory for a waiting request and `spare` more tokens; cheaper than
        `shortfall`."""
        missing = self._missing(request, match)
        if self._forecast is not None and missing <= 0:
            return self._forecast.fits(request, match, spare=spare)
        return missing <= -spare

    def shortfall(self, request: Request, match: Match) -> int:
        """Tokens missing to admit a waiting request; <= 0 when it fits."""
        missing = self._missing(request, match)
        if self._forecast is not None and missing <= 0:
            missing = self._forecast.shortfall(request, match)
        return missing

    def _missing(self, request: Request, match: Match) -> int:
        """Tokens by which the engine's headroom is too small; the engine wants one to be left."""
        need = self._new_tokens(request, match) + self._reserve(request) + self._caps.page_size
        return need + 1 - self.headroom

    def most_tokens(self, request: Request, match: Match | None) -> int:
        """The engine may need a page more for a chunk."""
        return self.available - self._caps.page_size - (0 if match is None else match.to_load)

    def may_proceed(self, request: Request, num_tokens: int) -> bool:
        """True if there is headroom for so many more tokens of an unfinished prefill, and for its
        output if they are the last."""
        need = self._caps.ceil_to_page(num_tokens) + self._caps.page_size
        if request.num_computed_tokens + num_tokens == num_tokens_of(request):
            need += self._reserve(request)
        return need <= self.headroom

    def can_decode(self, num_requests: int = 0, num_tokens: int = 0) -> bool:
        if num_requests and self._caps.mixed_batches and self.headroom < num_requests:
            return False
        return self.available >= num_tokens

    # --- What is spent ---

    def admit(self, request: Request, match: Match, num_tokens: int) -> None:
        self.headroom -= match.evictable + match.to_load
        self.available -= match.evictable + match.to_load
        if self._forecast is not None:
            self._forecast.add(request, match)
            self.promises[request.rid] = request.num_output_tokens
        if request.request_class is RequestClass.OFFLINE:
            self._charge_offline(self._new_tokens(request, match))
        self._charge(request, match.cached, num_tokens)

    def proceed(self, request: Request, num_tokens: int) -> None:
        if self._forecast is not None and self._view.promised(request) != request.num_output_tokens:
            # It was admitted by another rule, such as the safe one.
            self.promises[request.rid] = request.num_output_tokens
        self._charge(request, request.num_computed_tokens, num_tokens)

    def _charge(self, request: Request, num_cached: int, num_tokens: int) -> None:
        num_held = self._caps.ceil_to_page(num_tokens) + self._caps.page_size
        self.headroom -= num_held
        self.available -= num_held
        if num_cached + num_tokens >= num_tokens_of(request):
            # Its whole output, also after a preemption: the engine subtracts generated tokens when
            # it asks for memory, not when it takes it.
            self.headroom -= min(self._most_output(request), self._caps.max_reserved_tokens)

    def preempt(self, request: Request) -> None:
        gain, reserve = self._view.preemption_gain(request), self._kept_for(request)
        self._stopped |= {request.rid}
        self.headroom += gain + reserve
        self.available += gain
        if self._forecast is not None:
            is_unfinished = any(r.rid == request.rid for r in self._view.unfinished)
            self._forecast.drop(request, num_tokens_left(request) if is_unfinished else 0)
        if request.request_class is RequestClass.OFFLINE:
            self._charge_offline(-gain)

    def pause(self, num_requests: int, num_tokens: int) -> None:
        self.available += num_tokens
        if self._caps.mixed_batches:
            self.headroom += num_requests

    # --- Promises ---

    @property
    def has_forecast(self) -> bool:
        """Requests are admitted by the expected lengths of outputs."""
        return self._forecast is not None

    def set_aside(self, request: Request, match: Match) -> None:
        """From now on requests are admitted only if they fit beside this one, which waits for
        memory. Only with a forecast."""
        assert self._forecast is not None
        self._forecast.add(request, match)

    def promise(self, request: Request, num_tokens: int) -> None:
        """Set KV aside for `num_tokens` output tokens of a request, generated ones included, from
        now on, in place of the engine's rule or an earlier promise. `headroom` may become
        negative."""
        self.headroom -= self.price(request, num_tokens)
        self.promises[request.rid] = num_tokens

    def price(self, request: Request, num_tokens: int) -> int:
        """Tokens of headroom that such a promise takes beyond what is reserved for the request
        already, and, for a borrower, what it has taken of its lender's. 0 for a waiting request,
        which is charged at admission."""
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

    def _new_tokens(self, request: Request, match: Match) -> int:
        """Tokens of its prompt that no request holds."""
        return num_tokens_of(request) - match.cached + match.to_load + match.evictable

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
