"""The virtual clock, its CUDA events, and a host without disturbances."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from cosched.lab.simulation.host_time import NoHostTime


class VirtualClock:
    """Seconds since the simulation began. Only the simulation moves it."""

    def __init__(self, after_wait_s: float = NoHostTime.after_wait_s) -> None:
        """after_wait_s: as of `HostTime`."""
        self._now_s = 0.0
        self._after_wait_s = after_wait_s
        self.ready_s = 0.0
        """When the host has finished its work before a launch."""
        self.device_done_s = 0.0
        """When the simulated GPU has finished what was launched."""

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Never goes back: a time in the past changes nothing."""
        self._now_s = max(self._now_s, time_s)

    def launches_in(self, seconds: float) -> None:
        """The host works for `seconds` before the next launch, beside `after_wait_s`."""
        self.ready_s = max(self.ready_s, self._now_s) + seconds

    def wait_until(self, time_s: float, is_over: Callable[[], bool]) -> bool:
        """Wait until `time_s` or `device_done_s`, whichever is first; True for the latter. Work
        follows each wait, until `ready_s`."""
        self.advance_to(min(time_s, self.device_done_s))
        self.ready_s = self._now_s + self._after_wait_s
        return self.device_done_s <= time_s


class VirtualEvent(NamedTuple):
    """The CUDA event that SGLang records behind a batch. done_s: when the device reaches it."""

    clock: VirtualClock
    done_s: float

    def record(self, *_: Any) -> None:
        """Nothing to do: it is created behind the batch."""

    def synchronize(self) -> None:
        """Nothing to do: the caller moves the clock."""

    def query(self) -> bool:
        """True if the device has reached it when the host is ready."""
        return max(self.clock.now_s(), self.clock.ready_s) >= self.done_s


@contextlib.contextmanager
def quiet_host() -> Iterator[None]:
    """Keeps torch's threads and the garbage collector out of a loop of many tiny operations:
    collections in it are rare. `LocalEngine` has frozen the modules."""
    num_threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        torch.set_num_threads(num_threads)
