"""How fast offline work is done: measured, and as earlier batches had it.

Work is counted in tokens: prompt tokens (cached ones too), and each output token as `OUTPUT_TOKEN`
of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from cosched.batch.data import Batch, Status
from cosched.batch.replies import Ended, Running

OUTPUT_TOKEN = 3.0
"""Work of an output token, where that of a prompt token is 1: from 2 to 4 on modelled GPUs, in
iterations that mix both."""
_BUCKET_S = 10.0
_NUM_BUCKETS = 360
_PER_MINUTE = 6
_LEAST_S = 5.0
"""Of measuring, before there is a rate."""
_FEW_MINUTES = 5
_UNKNOWN_SPREAD = 0.5
"""Of a rate that was measured for too short to know: its standard deviation, by its mean."""
_TAIL = 0.5
_NUM_ENDED = 1024
"""Latest lines with an answer, by which the lengths of replies are known."""
_MOST_ONLINE = 0.8
"""Share of the time that the prefill of online prompts is taken to need at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the schedulers of a server say of their work.

    running          offline requests that have begun
    num_iterations   since the start, mean of the schedulers
    num_online       tokens of online prompts computed since the start, mean of the schedulers
    prefill_token_s  predicted time of a prompt token [s]
    decode_s         predicted time of an iteration of decodes when no more offline requests begin
                     and the last ones run beside the online ones; 0: nothing is predicted [s]
    """

    running: Sequence[Running] = ()
    num_iterations: float = 0.0
    num_online: float = 0.0
    prefill_token_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """tokens_per_s   mean work
    spread            standard deviation from one minute to the next, by the mean
    tokens_per_byte   work of the lines that were finished, by their length
    iteration_s       time from one output token of a line to its next [s]; 0, both: not known
    tail_iteration_s  the same when no more offline requests begin [s]
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
    """Sums over some seconds. decode_s: of `Progress.decode_s` times the seconds."""

    seconds: float = 0.0
    tokens: float = 0.0
    num_iterations: float = 0.0
    online_prefill_s: float = 0.0
    decode_s: float = 0.0


class RateMeter:
    """Measures over the last hour in which there was work. Its rate is that of the latest half: a
    job begins with an empty engine. Not for several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds since any moment."""
        self._clock = clock
        self._buckets: deque[_Bucket] = deque(maxlen=_NUM_BUCKETS)
        self._filling = _Bucket()
        self._last_s: float | None = None  # None: not measuring
        self._most_under_way = 0
        self._has_work = False
        self._all_tokens = 0.0
        self._num_prompt = self._num_bytes = 0
        self.progress = Progress()
        """The latest."""
        self.ended: deque[Ended] = deque(maxlen=_NUM_ENDED)
        """The latest lines with an answer."""

    @property
    def prompt_tokens_per_byte(self) -> float:
        """Of the lines that were finished; 0: none was."""
        return self._num_prompt / max(self._num_bytes, 1)

    def finished(self, line: Ended, *, num_bytes: int) -> None:
        """A line has been answered."""
        tokens = work_of(line.num_prompt, line.num_output)
        self.ended.append(line)
        self._all_tokens += tokens
        self._num_prompt += line.num_prompt
        self._num_bytes += num_bytes
        self._add(tokens)

    def progressed(self, progress: Progress) -> None:
        """The schedulers have told of their work; to be called every few seconds."""
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
            # What the first work took lies before the measurement.
            self._last_s = self._clock()

    def look(self, num_under_way: int) -> None:
        """So many lines are under way now; to be called about once a second.

        The tail of the work does not fill the engine: it is left out. That is when no line waits
        at the scheduler, or, where that is not known, when less than half are under way.
        """
        self._most_under_way = max(self._most_under_way, num_under_way)
        if self._last_s is not None:
            now_s = self._clock()
            seconds, self._last_s = now_s - self._last_s, now_s
            self._filling.seconds += seconds
            self._filling.decode_s += self.progress.decode_s * seconds
            if self._filling.seconds >= _BUCKET_S:
                self._buckets.append(self._filling)
                self._filling = _Bucket()
        if self.progress.num_iterations:
            self._has_work = num_under_way > len(self.progress.running)
        else:
            self._has_work = num_under_way >= max(_TAIL * self._most_under_way, 1)
        if not self._has_work:
            self._last_s = None
        if not num_under_way:
            self._most_under_way = 0

    def rate(self) -> Rate | None:
        """None: not known yet, or nothing was ever finished."""
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
    return _Bucket(
        seconds=sum(one.seconds for one in buckets),
        tokens=sum(one.tokens for one in buckets),
        num_iterations=sum(one.num_iterations for one in buckets),
        online_prefill_s=sum(one.online_prefill_s for one in buckets),
        decode_s=sum(one.decode_s for one in buckets),
    )


def _begun(progress: Progress) -> float:
    """Work done on requests that have not ended."""
    return sum(work_of(one.num_prompt, one.num_output) for one in progress.running)


def past_rate(ended: Sequence[Batch]) -> Rate | None:
    """Of batches with answers that have ended, as the store has them: what is known before anything
    is measured. Of all servers that share it; too low where the engine had other work too."""
    spans, num_tokens, num_bytes = [], 0.0, 0.0
    for batch in ended:
        # A second more than it may have been, as times are whole ones.
        end = batch.times.get(Status.CANCELLING) or batch.times[Status.FINALIZING]
        spans.append((batch.times[Status.IN_PROGRESS], end + 1))
        num_tokens += work_of(batch.input_tokens, batch.output_tokens)
        num_bytes += batch.request.num_bytes * batch.completed / batch.total
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
