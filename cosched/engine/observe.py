"""How long iterations really take: the shape of each batch and its measured time.

The time of an iteration is what it adds to the token gap of a running request: from the end of the
iteration before it, or from its launch when the scheduler was idle in between, until its result is
there. That is the device's time and the host's, as far as the one does not hide the other. With the
overlap scheduler the host learns of a result only after it has launched the next iteration; the
device's own event tells when it was done.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cosched.core.batch import BatchShape
from cosched.engine.clock import Clock
from cosched.engine.guard import Guard
from cosched.engine.parts import LineFile, switched_off
from cosched.engine.shape import shape_of
from cosched.errors import ConfigError

__all__ = ["IterationLogFile", "IterationObserver", "StepResult"]

logger = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """One iteration that is done.

    start_s     when the one before it ended, or when it was launched after idle time [s]
    duration_s  from then until its result was there [s]
    """

    shape: BatchShape
    start_s: float
    duration_s: float


class _Launched(NamedTuple):
    """An iteration on its way.

    follows  the scheduler was not idle before it
    done_s   when it was over; None: not known yet
    """

    shape: BatchShape
    start_s: float
    follows: bool
    done_s: float | None


class IterationObserver:
    """Watches a scheduler run batches and tells its listeners.

    `launch` and `finish` stand around SGLang's `run_batch` and before `process_batch_result`.
    """

    def __init__(self, scheduler: Any, *, clock: Clock, guard: Guard) -> None:
        """guard: what fails here is left out; the batch runs all the same."""
        self._scheduler = scheduler
        self._guard = guard
        self._clock = clock
        self._is_synchronous = scheduler.device == "cpu"
        self._is_virtual = False
        self._listeners: list[Callable[[StepResult], None]] = []
        self._in_flight: deque[_Launched] = deque()
        self._last_done_s = 0.0
        self.busy_s = 0.0
        """Time that the device has spent on iterations [s]."""
        self.num_iterations = 0
        """Iterations whose result is there."""

    @property
    def num_launched(self) -> int:
        """Iterations launched, those on their way included."""
        return self.num_iterations + len(self._in_flight)

    def use_virtual_clock(self, clock: Clock) -> None:
        """Time is virtual: an iteration is done when the clock says so, not when the call ends."""
        self._clock = clock
        self._is_synchronous = False
        self._is_virtual = True

    def add_listener(self, listener: Callable[[StepResult], None]) -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[StepResult], None]) -> None:
        self._listeners.remove(listener)

    def launch(self, run: Callable[[], Any], batch: Any) -> Any:
        """Run the batch through `run` and remember when it was launched."""
        if batch.forward_mode.is_idle() or batch.forward_mode.is_prebuilt():
            return run()
        shape = BatchShape()
        with self._guard.watching("timing"):
            shape = shape_of(batch)
        follows = not self._scheduler._sched_idled and self.num_iterations > 0
        start_s = self._clock.now_s()
        result = run()
        # On a CPU the forward pass itself has run by now; on a GPU it has only been queued.
        done_s = self._clock.now_s() if self._is_synchronous else None
        self._in_flight.append(_Launched(shape, start_s, follows, done_s))
        return result

    def expected_end_s(self, now_s: float, predict_s: Callable[[BatchShape], float]) -> float:
        """When what has been launched will be done, as predicted; `now_s` when nothing is under
        way [s]."""
        end_s = now_s
        begun_s = self._last_done_s
        for launched in self._in_flight:
            begun_s = max(begun_s, launched.start_s) + predict_s(launched.shape)
            end_s = max(now_s, begun_s)
        return end_s

    def finish(self, batch: Any, result: Any) -> None:
        """Called when the result of the oldest batch in flight is wanted; waits for it."""
        if not self._in_flight or batch.forward_mode.is_idle():
            return
        launched = self._in_flight.popleft()
        done_s = launched.done_s
        if done_s is None:
            event = getattr(result, "copy_done", None)
            if event is not None:
                event.synchronize()
            elif not self._is_virtual:
                # Without the overlap scheduler nothing has waited for the device yet.
                _wait_for(self._scheduler.device)
            done_s = self._clock.now_s()
        on_device_s = max(launched.start_s, self._last_done_s)
        begun_s = self._last_done_s if launched.follows else on_device_s
        self.busy_s += done_s - on_device_s
        self._last_done_s = done_s
        step = StepResult(launched.shape, begun_s, done_s - begun_s)
        self.num_iterations += 1
        for listener in self._listeners:
            with self._guard.watching("timing"):
                listener(step)


def _wait_for(device: str) -> None:
    torch.get_device_module(device).current_stream().synchronize()


class IterationLogFile:
    """Writes one JSON line per iteration: ``{"start_s", "seconds", "prefills", "decodes"}``.

    A line that cannot be written switches it off for good.
    """

    def __init__(self, path: Path) -> None:
        """ConfigError when the file cannot be written."""
        self._path = path
        self.is_off = False
        try:
            self._file = LineFile(path)
        except OSError as error:
            raise ConfigError(f"cannot write the log {str(path)!r}: {error.strerror}") from None

    def __call__(self, step: StepResult) -> None:
        if self.is_off:
            return
        entry = {
            "start_s": round(step.start_s, 6),
            "seconds": round(step.duration_s, 7),
            "prefills": _pairs(step.shape.prefills),
            "decodes": list(step.shape.decodes),
        }
        try:
            self._file.write(json.dumps(entry, separators=(",", ":")).encode())
        except OSError as error:
            self.is_off = True
            self._file.close()
            logger.warning("cosched: %s", switched_off("iteration log", self._path, error))


def _pairs(prefills: Sequence[tuple[int, int]]) -> list[list[int]]:
    return [list(prefill) for prefill in prefills]
