"""What the demo's client saw of each request, and the numbers that follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "OfflineRecord",
    "OfflineSummary",
    "OnlineRecord",
    "OnlineSummary",
    "Percentiles",
    "summarize_offline",
    "summarize_online",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineRecord:
    """One online request. Times are seconds into the window.

    arrival_s   when the trace says it comes; the client may be later by the difference to `sent_s`
    chunks_s    when each piece of streamed text came; the first is the first token
    error       why it has no whole answer; None when it has
    """

    arrival_s: float
    sent_s: float
    chunks_s: tuple[float, ...]
    num_output_tokens: int
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """From arrival to first token, so that a client that falls behind hides nothing."""
        return self.chunks_s[0] - self.arrival_s if self.chunks_s else None

    @property
    def tpot_s(self) -> float | None:
        """None for a reply of one token, and for one that is not whole."""
        if self.error is not None or self.num_output_tokens < 2 or len(self.chunks_s) < 2:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.num_output_tokens - 1)

    @property
    def tbt_s(self) -> tuple[float, ...]:
        """Gaps between the pieces of text: the pauses a reader sees."""
        return tuple(
            late - early for early, late in zip(self.chunks_s, self.chunks_s[1:], strict=False)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRecord:
    """One answered or failed offline request. `finished_s` is seconds into the window; requests
    that are answered before it begins have a negative one."""

    finished_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of some number of values. Interpolated between neighbours (numpy's default)."""

    count: int
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None when there is no value."""
        if not values:
            return None
        p50, p99 = np.percentile(values, [50, 99])
        return cls(count=len(values), p50=float(p50), p99=float(p99))


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSummary:
    """The online class in one scenario. `num_failed` requests count in no TPOT; those that began to
    answer count in TTFT."""

    num_requests: int
    num_failed: int
    first_error: str | None
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    tbt_ms: Percentiles | None
    max_client_delay_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSummary:
    """The offline job in one scenario: rates within the window, and how far it came.

    requests_per_s, tokens_per_s  of requests that were answered within the window; tokens of prompt
                                  and reply, whether the server computed or cached them
    num_done                      answered by the end of the window, those before it included
    job_ended_s                   when the whole job was done, if it was within the window: from
                                  then on the online requests were alone
    """

    num_prompts: int
    num_done: int
    num_failed: int
    first_error: str | None
    requests_per_s: float
    tokens_per_s: float
    output_tokens_per_s: float
    job_ended_s: float | None


def summarize_online(records: Sequence[OnlineRecord]) -> OnlineSummary:
    errors = [record.error for record in records if record.error is not None]
    return OnlineSummary(
        num_requests=len(records),
        num_failed=len(errors),
        first_error=errors[0] if errors else None,
        ttft_ms=_milliseconds(record.ttft_s for record in records),
        tpot_ms=_milliseconds(record.tpot_s for record in records),
        tbt_ms=_milliseconds(gap for record in records for gap in record.tbt_s),
        max_client_delay_ms=1e3 * max((r.sent_s - r.arrival_s for r in records), default=0.0),
    )


def summarize_offline(
    records: Sequence[OfflineRecord], *, num_prompts: int, window_s: float
) -> OfflineSummary:
    """The job as of the end of the window [0, window_s)."""
    done = [record for record in records if record.finished_s < window_s]
    answered = [record for record in done if record.error is None]
    errors = [record.error for record in done if record.error is not None]
    inside = [record for record in answered if record.finished_s >= 0]
    num_output = sum(record.num_output_tokens for record in inside)
    num_prompt = sum(record.num_prompt_tokens for record in inside)
    ended = len(done) == num_prompts and num_prompts > 0
    return OfflineSummary(
        num_prompts=num_prompts,
        num_done=len(answered),
        num_failed=len(errors),
        first_error=errors[0] if errors else None,
        requests_per_s=len(inside) / window_s,
        tokens_per_s=(num_prompt + num_output) / window_s,
        output_tokens_per_s=num_output / window_s,
        job_ended_s=max(record.finished_s for record in done) if ended else None,
    )


def _milliseconds(values: Iterable[float | None]) -> Percentiles | None:
    return Percentiles.of([1e3 * value for value in values if value is not None])
