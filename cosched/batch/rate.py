"""How fast offline work is done, and how long its replies get.

Work is counted in tokens: each prompt token (also cached) is 1, each output token `OUTPUT_TOKEN`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import fmean, pstdev
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cosched.batch.batch_records import Batch, Status

_Array = NDArray[np.float64]

OUTPUT_TOKEN = 3.0
"""2 to 4 on modelled GPUs, in iterations that mix prefill and decode."""
_BUCKET_S = 10.0
_NUM_BUCKETS = 360
_PER_MINUTE = 6
_LEAST_S = 5.0
"""Least time of measurement for a rate."""
_FEW_MINUTES = 5
_UNKNOWN_SPREAD = 0.5
"""Spread of a rate that was measured too briefly."""
_TAIL = 0.5
_NUM_ENDED = 1024
"""Latest answered lines, for the lengths of replies."""
_MOST_ONLINE = 0.8
"""Most of the time that the prefill of online prompts is assumed to take."""
_GRID: _Array = np.unique(
    np.concatenate([np.arange(0.0, 64.0, 4.0), np.round(np.geomspace(64, 1 << 18, 150))])
)
"""Output tokens at which survival functions are evaluated."""
_PRIOR = 5.0
"""Ended replies of an octave that weigh as much as all other octaves."""
_BEYOND = 1.0
"""Index of the Pareto tail beyond the longest known reply."""
_MOST = 8.0
"""No reply gets longer than this multiple of the longest known one, or than its limit."""


class EndedLine(NamedTuple):
    """A line whose reply has ended: prompt tokens, output tokens."""

    num_prompt: int
    num_output: int


class RunningLine(NamedTuple):
    """A line whose reply is being generated: prompt tokens, output tokens so far and at most."""

    num_prompt: int
    num_output: int
    limit: int


def octave(num_prompt: float) -> int:
    """Prompts of one octave have about the same length."""
    return int(num_prompt).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkProgress:
    """The state of a server's schedulers; counts are since the start, means of the schedulers.

    running          offline requests that have begun
    num_online       online prompt tokens computed
    prefill_token_s  predicted time of a prompt token [s]
    decode_s         predicted time of a decode iteration when the last offline requests run beside
                     the online ones; 0: not predicted [s]
    saturation       what online requests need of the device by their targets, over what there is;
                     None: not known
    """

    running: Sequence[RunningLine] = ()
    num_iterations: float = 0.0
    num_online: float = 0.0
    prefill_token_s: float = 0.0
    decode_s: float = 0.0
    saturation: float | None = None

    def done_of(self, num_in_flight: int) -> float:
        """Mean share of the replies of lines in flight that is generated, of their limits (0 to
        1); those that have not begun have none."""
        done = sum(min(one.num_output / max(one.limit, 1), 1.0) for one in self.running)
        return done / max(num_in_flight, len(self.running), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """tokens_per_s   mean work
    spread            standard deviation from minute to minute, relative to the mean
    tokens_per_byte   work of the finished lines, by their length
    iteration_s       time between two output tokens of a line; 0: not known [s]
    tail_iteration_s  the same once no more offline requests begin; 0: not known [s]
    """

    tokens_per_s: float
    spread: float
    tokens_per_byte: float
    iteration_s: float = 0.0
    tail_iteration_s: float = 0.0


def work_of(num_prompt: float, num_output: float) -> float:
    """Of one line or of many."""
    return num_prompt + OUTPUT_TOKEN * num_output


@dataclass(slots=True)
class _Bucket:
    """Sums over some seconds. `decode_s` sums `WorkProgress.decode_s` times the seconds."""

    seconds: float = 0.0
    tokens: float = 0.0
    num_iterations: float = 0.0
    online_prefill_s: float = 0.0
    decode_s: float = 0.0


class RateMeter:
    """Measures over the last hour with work. The rate is that of the latest half, because a job
    begins with an empty engine. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: deque[_Bucket] = deque(maxlen=_NUM_BUCKETS)
        self._filling = _Bucket()
        self._last_s: float | None = None  # None: not measuring
        self._most_in_flight = 0
        self._has_work = False
        self._all_tokens = 0.0
        self._num_prompt = self._num_bytes = 0
        self.progress = WorkProgress()
        self.ended: deque[EndedLine] = deque(maxlen=_NUM_ENDED)

    @property
    def prompt_tokens_per_byte(self) -> float:
        """Of the finished lines; 0: there are none."""
        return self._num_prompt / max(self._num_bytes, 1)

    def finished(self, line: EndedLine, *, num_bytes: int) -> None:
        """A line was answered."""
        tokens = work_of(line.num_prompt, line.num_output)
        self.ended.append(line)
        self._all_tokens += tokens
        self._num_prompt += line.num_prompt
        self._num_bytes += num_bytes
        self._add(tokens)

    def progressed(self, progress: WorkProgress) -> None:
        """New state of the schedulers; call it every few seconds."""
        before, self.progress = self.progress, progress
        if self._last_s is not None:
            filling = self._filling
            filling.num_iterations += max(progress.num_iterations - before.num_iterations, 0.0)
            num_online = max(progress.num_online - before.num_online, 0.0)
            filling.online_prefill_s += num_online * progress.prefill_token_s
        self._add(_begun(progress) - _begun(before))

    def _add(self, tokens: float) -> None:
        if self._last_s is not None:
            self._filling.tokens += tokens
        elif self._has_work and tokens > 0:
            # The time that the first work took was before the measurement.
            self._last_s = self._clock()

    def look(self, num_in_flight: int) -> None:
        """Lines in flight now; call it about once a second.

        The tail of the work does not fill the engine and is left out: no line waits at the
        scheduler, or, if that is not known, less than half of the most lines are in flight.
        """
        self._most_in_flight = max(self._most_in_flight, num_in_flight)
        if self._last_s is not None:
            now_s = self._clock()
            seconds, self._last_s = now_s - self._last_s, now_s
            self._filling.seconds += seconds
            self._filling.decode_s += self.progress.decode_s * seconds
            if self._filling.seconds >= _BUCKET_S:
                self._buckets.append(self._filling)
                self._filling = _Bucket()
        if self.progress.num_iterations:
            self._has_work = num_in_flight > len(self.progress.running)
        else:
            self._has_work = num_in_flight >= max(_TAIL * self._most_in_flight, 1)
        if not self._has_work:
            self._last_s = None
        if not num_in_flight:
            self._most_in_flight = 0

    def rate(self) -> Rate | None:
        """None: not known yet."""
        buckets = [*self._buckets, self._filling]
        now = _total(buckets[(len(buckets) - 1) // 2 :])
        if now.seconds < _LEAST_S or now.tokens <= 0 or not self._num_bytes:
            return None
        online = min(now.online_prefill_s / now.seconds, _MOST_ONLINE)
        iteration_s = now.seconds / now.num_iterations if now.num_iterations else 0.0
        tail_s = now.decode_s / now.seconds / (1 - online)
        return Rate(
            tokens_per_s=now.tokens / now.seconds,
            spread=self._spread(),
            tokens_per_byte=self._all_tokens / self._num_bytes,
            iteration_s=iteration_s,
            tail_iteration_s=min(tail_s or iteration_s, iteration_s),
        )

    def _spread(self) -> float:
        buckets = list(self._buckets)
        starts = range(len(buckets) % _PER_MINUTE, len(buckets), _PER_MINUTE)
        minutes = [_total(buckets[start : start + _PER_MINUTE]) for start in starts]
        rates = [max(minute.tokens, 0.0) / minute.seconds for minute in minutes]
        if len(rates) < _FEW_MINUTES or not fmean(rates):
            return _UNKNOWN_SPREAD
        return pstdev(rates) / fmean(rates)


def _total(buckets: Sequence[_Bucket]) -> _Bucket:
    names = [field.name for field in fields(_Bucket)]
    return _Bucket(**{name: sum(getattr(one, name) for one in buckets) for name in names})


def _begun(progress: WorkProgress) -> float:
    """Work done on requests that have not ended."""
    return sum(work_of(one.num_prompt, one.num_output) for one in progress.running)


def past_rate(ended: Sequence[Batch]) -> Rate | None:
    """From ended batches with answers, before anything is measured. Of all servers that share the
    store; too low if the engine had other work."""
    spans, num_tokens, num_bytes = [], 0.0, 0.0
    for batch in ended:
        # Up to a second too long, as times are whole seconds.
        end = batch.times.get(Status.CANCELLING) or batch.times[Status.FINALIZING]
        spans.append((batch.times[Status.IN_PROGRESS], end + 1))
        num_tokens += work_of(batch.input_tokens, batch.output_tokens)
        num_bytes += batch.num_bytes * batch.completed / batch.total
    seconds, until = 0, 0
    for start, end in sorted(spans):
        seconds += max(end - max(start, until), 0)
        until = max(until, end)
    if not num_tokens or not num_bytes:
        return None
    return Rate(
        tokens_per_s=num_tokens / seconds,
        spread=_UNKNOWN_SPREAD,
        tokens_per_byte=num_tokens / num_bytes,
    )


class Replies:
    """Survival of reply lengths (Kaplan and Meier, 1958), from ended replies and from running ones,
    which will get longer. The ended ones alone are too short, because long replies end last. The
    more prompts of an octave have ended, the more its own lengths count."""

    def __init__(self, ended: Sequence[EndedLine], running: Sequence[RunningLine]) -> None:
        """`ended` must not be empty."""
        longest = max(one[1] for one in (*ended, *running))
        limit = max((one.limit for one in running), default=longest)
        self._cap = max(min(limit, _MOST * longest), longest)
        self._ended: dict[int, list[int]] = {}
        self._so_far: dict[int, list[int]] = {}
        for line in ended:
            self._ended.setdefault(octave(line.num_prompt), []).append(line.num_output)
        for one in running:
            self._so_far.setdefault(octave(one.num_prompt), []).append(one.num_output)
        self._known: dict[int, _Array] = {}

    @cached_property
    def _all(self) -> _Array:
        ended = [length for lengths in self._ended.values() for length in lengths]
        so_far = [length for lengths in self._so_far.values() for length in lengths]
        return self._survival(ended, so_far)

    def _longer(self, kind: int) -> _Array:
        """Share of an octave's replies that get longer than `_GRID`."""
        found = self._known.get(kind)
        if found is None:
            ended = self._ended.get(kind)
            found = self._all
            if ended:
                share = len(ended) / (len(ended) + _PRIOR)
                own = self._survival(ended, self._so_far.get(kind, []))
                found = share * own + (1 - share) * self._all
            self._known[kind] = found
        return found

    def _survival(self, ended: Sequence[int], so_far: Sequence[int]) -> _Array:
        lengths = np.array([*ended, *so_far], dtype=float)
        is_end = np.arange(len(lengths)) < len(ended)
        order = np.lexsort((~is_end, lengths))
        lengths, num = lengths[order], len(lengths)
        left = np.cumprod(1 - is_end[order] / (num - np.arange(num)))
        # At least half a reply is longer than the longest.
        left = np.maximum(left, 0.5 / num)
        at = np.searchsorted(lengths, _GRID, side="right") - 1
        found = np.where(at < 0, 1.0, left[np.maximum(at, 0)])
        longest = max(lengths[-1], 1.0)
        beyond = left[-1] * (longest / np.maximum(_GRID, longest)) ** _BEYOND
        return np.where(_GRID >= self._cap, 0.0, np.where(_GRID >= longest, beyond, found))

    def length(self, kind: int) -> float:
        """Expected tokens of a reply to a prompt of an octave."""
        return float(_area(self._longer(kind)))

    def left(self) -> float:
        """Expected further tokens of all running replies together."""
        return sum(float(_area(self._outlive(kind, 0.0)).sum()) for kind in self._so_far)

    def _outlive(self, kind: int, num_more: float) -> _Array:
        """For each running reply of an octave: the probability that more than `_GRID` tokens follow
        after `num_more` further tokens."""
        longer = self._longer(kind)
        so_far = np.array(self._so_far[kind], dtype=float)
        now = np.maximum(np.interp(so_far, _GRID, longer), 1e-6)
        lengths = so_far[:, np.newaxis] + num_more + _GRID
        then = np.interp(lengths, _GRID, longer, right=0.0)
        found: _Array = np.minimum(then / now[:, np.newaxis], 1.0)
        return found

    def tail(self, *, num_waiting: Mapping[int, float], num_steps: float, share: float) -> float:
        """Expected tokens of the longest reply after the last line has begun.

        num_waiting  octave -> waiting lines, which begin evenly over the time until then
        num_steps    tokens that a running line gets in that time
        share        of the running replies that belong to the batch
        """
        none = np.zeros_like(_GRID)  # log of the probability that no reply gets that much longer
        for kind in self._so_far:
            none += share * _log_not(self._outlive(kind, num_steps)).sum(axis=0)
        num_steps = max(num_steps, 1.0)
        for kind, num in num_waiting.items():
            # The mean over their begin times, as the difference of an integral.
            each = _log_not(self._longer(kind))
            steps = (each[1:] + each[:-1]) / 2 * np.diff(_GRID)
            beyond = np.append(np.cumsum(steps[::-1])[::-1], 0.0)
            then = np.interp(_GRID + num_steps, _GRID, beyond, right=0.0)
            none += num / num_steps * (beyond - then)
        return float(_area(1 - np.exp(none)))


def _log_not(chance: _Array) -> _Array:
    found: _Array = np.log(np.maximum(1 - chance, 1e-9))
    return found


def _area(curves: _Array) -> _Array:
    found: _Array = ((curves[..., :-1] + curves[..., 1:]) / 2) @ np.diff(_GRID)
    return found
