"""How long iterations really take: the shape of each batch and its measured time.

The time of an iteration is the time the device spends on it, from when it could begin (launched,
and the one before it done) until its result is there. With the overlap scheduler the host learns of
a result only after it has launched the next iteration; the device's own event tells when it was
done.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from cosched.core.batch import BatchShape
from cosched.engine.clock import Clock
from cosched.engine.shape import shape_of

__all__ = ["IterationLogFile", "IterationObserver", "StepResult"]


class StepResult(NamedTuple):
    """One iteration that is done.

    start_s, duration_s  on the observer's clock [s]
    """

    shape: BatchShape
    start_s: float
    duration_s: float


class IterationObserver:
    """Watches a scheduler run batches and tells its listeners.

    `launch` and `finish` stand around SGLang's `run_batch` and before `process_batch_result`.
    """

    def __init__(self, scheduler: Any, *, clock: Clock) -> None:
        self._clock = clock
        self._is_synchronous = scheduler.device == "cpu"
        self._listeners: list[Callable[[StepResult], None]] = []
        self._in_flight: deque[tuple[BatchShape, float, float | None]] = deque()
        self._last_done_s = 0.0
        self.busy_s = 0.0
        self.num_iterations = 0

    def use_virtual_clock(self, clock: Clock) -> None:
        """Time is virtual: an iteration is done when the clock says so, not when the call ends."""
        self._clock = clock
        self._is_synchronous = False

    def add_listener(self, listener: Callable[[StepResult], None]) -> None:
        self._listeners.append(listener)

    def launch(self, run: Callable[[], Any], batch: Any) -> Any:
        """Run the batch through `run` and remember when it was launched."""
        if batch.forward_mode.is_idle() or batch.forward_mode.is_prebuilt():
            return run()
        shape = shape_of(batch)
        start_s = self._clock.now_s()
        result = run()
        # On a CPU the forward pass itself has run by now; on a GPU it has only been queued.
        done_s = self._clock.now_s() if self._is_synchronous else None
        self._in_flight.append((shape, start_s, done_s))
        return result

    def finish(self, batch: Any, result: Any) -> None:
        """Called when the result of the oldest batch in flight is wanted; waits for it."""
        if not self._in_flight or batch.forward_mode.is_idle():
            return
        shape, start_s, done_s = self._in_flight.popleft()
        if done_s is None:
            event = getattr(result, "copy_done", None)
            if event is not None:
                event.synchronize()
            done_s = self._clock.now_s()
        begun_s = max(start_s, self._last_done_s)
        self._last_done_s = done_s
        step = StepResult(shape, begun_s, done_s - begun_s)
        self.busy_s += step.duration_s
        self.num_iterations += 1
        for listener in self._listeners:
            listener(step)


class IterationLogFile:
    """Writes one JSON line per iteration: ``{"start_s", "seconds", "prefills", "decodes"}``."""

    def __init__(self, path: Path) -> None:
        # Line by line: a server mostly ends by a signal, and what it ran last is of interest.
        self._file: IO[str] = path.open("w", encoding="utf-8", buffering=1)

    def __call__(self, step: StepResult) -> None:
        entry = {
            "start_s": round(step.start_s, 6),
            "seconds": round(step.duration_s, 7),
            "prefills": _pairs(step.shape.prefills),
            "decodes": list(step.shape.decodes),
        }
        self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")


def _pairs(prefills: Sequence[tuple[int, int]]) -> list[list[int]]:
    return [list(prefill) for prefill in prefills]
