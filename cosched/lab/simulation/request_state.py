"""State of simulated requests."""

from __future__ import annotations

from array import array
from itertools import takewhile
from typing import Any

from cosched.engine import port
from cosched.engine.tracked import TrackedRequest
from cosched.errors import ConfigError
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.simulation.arrivals import Arrival
from cosched.memory.reuse import BLOCK, block_hashes
from cosched.wire import (
    BEHIND_KEY,
    HINT_KEY,
    NAME_KEY,
    PARAMS_KEY,
    SERVER_KEY,
    params_of_slo,
)


def too_many_open(num: int, num_tokens: int, most_tokens: int, *, now_s: float) -> ConfigError:
    """Unanswered requests have more prompt tokens than fit in memory."""
    return ConfigError(
        f"{num:,} requests with {num_tokens:,} prompt tokens are unanswered after {now_s:.3g} s of "
        f"virtual time, and this machine's memory holds {most_tokens:,} tokens: lower the rate, "
        "the number of offline requests or the duration"
    )


def custom_params(arrival: Arrival, *, tells_length: bool) -> dict[str, Any] | None:
    """What a server's front end adds to a request."""
    params: dict[str, float] = dict(params_of_slo(arrival.slo))
    if tells_length:
        params[HINT_KEY] = arrival.num_output_tokens
    custom: dict[str, Any] = {PARAMS_KEY: params} if params else {}
    told = {NAME_KEY: arrival.tenant, BEHIND_KEY: arrival.num_behind}
    if any(told.values()):
        custom[SERVER_KEY] = told
    return custom or None


class RequestState:
    """A request that was sent and has not ended."""

    __slots__ = (
        "admitted_s",
        "arrival",
        "furthest",
        "num_cached",
        "num_computed",
        "num_known",
        "pauses",
        "token_times",
    )

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.admitted_s: float | None = None
        self.num_cached: int | None = None
        self.num_computed = 0
        self.num_known = 0
        """First prompt tokens that had been computed before its admission, in whole blocks."""
        self.furthest = 0
        """First tokens that have ever been computed."""
        self.pauses: list[tuple[float, float | None]] = []
        self.token_times: array[float] = array("d")

    def record(self, req: Any | None, finish_s: float | None) -> RequestRecord:
        """Its record so far. `req` is None for a request that never ran."""
        arrival = self.arrival
        reason = None
        if req is not None and finish_s is not None:
            reason = str(req.finished_reason.to_json()["type"])
        tracked = None if req is None else TrackedRequest.of(req)
        return RequestRecord(
            rid=arrival.rid,
            request_class=arrival.request_class,
            arrival_s=arrival.arrival_s,
            num_prompt_tokens=len(arrival.input_ids),
            num_output_tokens=len(self.token_times),
            admitted_s=self.admitted_s,
            first_token_s=self.token_times[0] if self.token_times else None,
            finish_s=finish_s,
            token_times=self.token_times,
            num_cached_tokens=self.num_cached,
            num_lost_tokens=self._num_lost(),
            num_recomputed_tokens=self._num_recomputed(),
            num_preemptions=0 if req is None else port.num_retractions(req),
            pauses=tuple(self.pauses),
            finish_reason=reason,
            ok=reason != "abort",
            tenant=arrival.tenant,
            device_s=tracked.device_s if tracked is not None else None,
            slo=arrival.slo,
            priority=arrival.priority,
        )

    def runs(self, time_s: float) -> None:
        """It is in an iteration that starts at `time_s`."""
        if self.pauses and self.pauses[-1][1] is None:
            self.pauses[-1] = self.pauses[-1][0], time_s

    def computed(self, start: int, end: int) -> int:
        """Its tokens ``[start, end)`` were computed. Returns how many of them had been computed
        before."""
        num_again = max(min(end, self.furthest) - start, 0)
        self.furthest = max(self.furthest, end)
        return num_again

    def _num_lost(self) -> int | None:
        return None if self.num_cached is None else max(self.num_known - self.num_cached, 0)

    def _num_recomputed(self) -> int:
        """Prefill tokens beyond those of the first admission."""
        first = len(self.arrival.input_ids) - (self.num_cached or 0)
        return max(self.num_computed - first, 0)


class ComputedPrefixes:
    """Block hashes of all prompts and replies that were ever computed: an infinite prefix cache."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def add(self, token_ids: array[int]) -> None:
        self._blocks.update(block_hashes(token_ids))

    def num_known(self, token_ids: array[int]) -> int:
        """First tokens of a prompt that were computed before, in whole blocks; its last token is
        always computed again."""
        known = takewhile(self._blocks.__contains__, block_hashes(token_ids[:-1]))
        return BLOCK * sum(1 for _ in known)
