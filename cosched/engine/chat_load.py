"""What online requests ask of this scheduler now: how many come, and what each of them takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import msgspec

from cosched.engine import port
from cosched.engine.tracked import TrackedRequest
from cosched.predict.saturation import ChatRates

WINDOW_S = 60.0
"""In which arrivals are counted."""
_LEAST_S = 10.0
"""After the first arrival, before which nothing is said of a rate."""
_RECENT = 1 / 200
"""Weight of a request in the means, where there are many."""


class ChatState(msgspec.Struct, kw_only=True, frozen=True):
    """saturation      what online requests need of the device by their targets, over what there is
                    (`cosched.predict.saturation`)
    requests_per_s  online requests that came in the last minute [1/s]
    """

    saturation: float
    requests_per_s: float


class ChatLoad:
    """Follows the online requests of one scheduler. Arrivals count although they wait: beyond 1.0
    what is served says nothing of what is asked for."""

    def __init__(self) -> None:
        self._begun: deque[tuple[float, float]] = deque()
        """(Arrival, TPOT target) of those with a first token [s]."""
        self._first_s = math.inf
        self._num_begun = self._num_ended = 0
        self._num_new = self._num_cached = self._num_decodes = self._contexts = 0.0
        """Means; the last one of the sum over the decodes of what they attend to."""

    def began(self, tracked: TrackedRequest, tpot_s: float | None) -> None:
        """Its first token is known."""
        num_prompt = tracked.num_prompt_tokens
        num_cached = min(port.num_cached_at_first(tracked.req), num_prompt - 1)
        self._num_begun += 1
        share = max(_RECENT, 1 / self._num_begun)
        self._num_new += share * (num_prompt - num_cached - self._num_new)
        self._num_cached += share * (num_cached - self._num_cached)
        self._begun.append((tracked.arrival_s, math.inf if tpot_s is None else tpot_s))
        self._first_s = min(self._first_s, tracked.arrival_s)

    def ended(self, tracked: TrackedRequest, num_output: int) -> None:
        """It has its whole reply, of so many tokens."""
        num_decodes = num_output - 1
        contexts = num_decodes * (tracked.num_prompt_tokens + num_decodes / 2)
        self._num_ended += 1
        share = max(_RECENT, 1 / self._num_ended)
        self._num_decodes += share * (num_decodes - self._num_decodes)
        self._contexts += share * (contexts - self._contexts)

    def rates(
        self, now_s: float, waiting: Iterable[TrackedRequest], *, tokens_per_decode: float
    ) -> ChatRates | None:
        """waiting: online requests without a first token. None: too few have come and ended to
        tell."""
        start_s = now_s - WINDOW_S
        while self._begun and self._begun[0][0] <= start_s:
            self._begun.popleft()
        if not self._num_ended or now_s - self._first_s < _LEAST_S:
            return None
        num_waiting = sum(one.arrival_s > start_s for one in waiting)
        num = num_waiting + sum(arrival_s > start_s for arrival_s, _ in self._begun)
        return ChatRates(
            requests_per_s=num / min(WINDOW_S, now_s - self._first_s),
            num_new=self._num_new,
            num_cached=self._num_cached,
            num_decodes=self._num_decodes / max(tokens_per_decode, 1.0),
            context=self._contexts / self._num_decodes if self._num_decodes else 1.0,
            tpot_s=min((tpot_s for _, tpot_s in self._begun), default=math.inf),
        )
