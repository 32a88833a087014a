"""Host memory in virtual time: copies take time and copy nothing.

SGLang's HiCache runs unchanged, with its queues, locks and events; only `L2TransferEngine`, which
moves the bytes, is replaced. Both directions run in parallel with the model; a copy waits for the
one before it and for the iteration launched before it, as SGLang's streams do. An iteration that
loads KV computes a layer as soon as it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


class _Clock(Protocol):
    def now_s(self) -> float: ...

    def advance_to(self, time_s: float) -> None: ...


class _Event:
    """Done at a virtual time; waiting for it moves the clock there."""

    def __init__(self, clock: _Clock, done_s: float) -> None:
        self._clock = clock
        self._done_s = done_s

    def query(self) -> bool:
        return self._clock.now_s() >= self._done_s

    def synchronize(self) -> None:
        self._clock.advance_to(self._done_s)


class _Completion(NamedTuple):
    """The fields of SGLang's `TransferCompletion`."""

    start_event: _Event
    finish_event: _Event
    timing_enabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The link to host memory (``--enable-hierarchical-cache``).

    s_per_token  time to copy a token's KV in either direction [s]
    num_layers   layers of the simulated model, which are loaded one after the other
    """

    s_per_token: float
    num_layers: int


class VirtualTransfers:
    """In place of an `L2TransferEngine`.

    s_per_token  time of a token's KV in either direction [s]
    gpu_free_s   when the simulated GPU has finished what was launched
    """

    def __init__(
        self,
        *,
        clock: _Clock,
        s_per_token: float,
        num_layers: int,
        gpu_free_s: Callable[[], float],
    ) -> None:
        self.device_to_host_stream = torch.cpu.Stream()
        self.host_to_device_stream = torch.cpu.Stream()
        self._clock = clock
        self._s_per_token = s_per_token
        self._num_layers = num_layers
        self._gpu_free_s = gpu_free_s
        self._to_host_s = self._to_device_s = 0.0
        """End of the latest copy in each direction."""

    def submit_device_to_host(self, transfers: list[Any]) -> _Completion:
        start_s = self._start_s(self._to_host_s)
        self._to_host_s = start_s + self._seconds(transfers)
        return self._completion(start_s, self._to_host_s)

    def submit_host_to_device(self, transfers: list[Any], **options: Any) -> _Completion:
        start_s = self._start_s(self._to_device_s)
        self._to_device_s = start_s + self._seconds(transfers)
        return self._completion(start_s, self._to_device_s)

    def iteration_s(self, start_s: float, compute_s: float) -> float:
        """Time of an iteration that needs KV that is being loaded: the first layer waits for its
        part, the last one for all."""
        loading_s = max(self._to_device_s - start_s, 0.0)
        layers = self._num_layers
        return max(loading_s / layers + compute_s, loading_s + compute_s / layers)

    def next_done_s(self) -> float | None:
        """End of the next unfinished copy [s]."""
        now_s = self._clock.now_s()
        ends = [end_s for end_s in (self._to_host_s, self._to_device_s) if end_s > now_s]
        return min(ends, default=None)

    def _start_s(self, before_s: float) -> float:
        return max(self._clock.now_s(), before_s, self._gpu_free_s())

    def _seconds(self, transfers: list[Any]) -> float:
        return len(transfers[0].device_indices) * self._s_per_token

    def _completion(self, start_s: float, done_s: float) -> _Completion:
        assert math.isfinite(done_s), f"{done_s=}"
        return _Completion(_Event(self._clock, start_s), _Event(self._clock, done_s))
