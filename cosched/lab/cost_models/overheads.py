"""What the launch of an iteration adds to the time of its kernels: ``--device-overheads``.

Kernel tables and rooflines say how long kernels run. Between the call that launches a batch and its
first kernel the host prepares inputs, and some attention backends wait for the device there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from cosched.core.batch import BatchShape
from cosched.errors import ConfigError, choices
from cosched.lab.cost_models.specs import GpuSpec


class LaunchTimes(NamedTuple):
    """Of one launch. Times are the simulation's [s].

    start_s      the first kernel starts
    returned_s   the host can go on; the iteration is not done before
    """

    start_s: float
    returned_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOverheads:
    """Times of a launch beside its kernels, and the price of mixing.

    launch_ms            host time from the launch to the first kernel [ms]
    eager_layer_ms       host time to launch one layer of an iteration with a prefill, whose
                         attention runs outside CUDA graphs [ms]
    no_graph_layer_ms    the same for decodes alone, more than the largest CUDA graph takes [ms]
    prefill_sync_ms      an iteration with a prefill waits until the device is idle, and its first
                         kernel starts so much later; 0: it does not wait [ms]
    fence_ms             of the iteration after a mixed one that waits for all of it: small kernels
                         that would run beside it [ms]
    mixed_decode_factor  factor on the attention time of a decode beside a prefill
    """

    launch_ms: float = 0.0
    eager_layer_ms: float = 0.0
    no_graph_layer_ms: float = 0.0
    prefill_sync_ms: float = 0.0
    fence_ms: float = 0.0
    mixed_decode_factor: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least, most = (1, 10) if name == "mixed_decode_factor" else (0, 1000)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be in [{least}, {most}]")


class Launches:
    """The launches of one simulated GPU, in order."""

    def __init__(
        self,
        overheads: DeviceOverheads | None = None,
        *,
        num_layers: int = 0,
        largest_graph: float = math.inf,
    ) -> None:
        """
        overheads      None: a launch takes no time
        largest_graph  most decodes that run in a CUDA graph
        """
        self._overheads = overheads or DeviceOverheads()
        self._num_layers = num_layers
        self._largest_graph = largest_graph
        self._is_after_mixed = False

    @property
    def prefills_wait(self) -> bool:
        """The launch of a batch with prefills waits for the device."""
        return self._overheads.prefill_sync_ms > 0

    def launch(self, shape: BatchShape, *, now_s: float, device_done_s: float) -> LaunchTimes:
        """The next one, at `now_s`. device_done_s: when what was launched before is done [s]."""
        overheads = self._overheads
        fence_s = overheads.fence_ms / 1e3 if self._is_after_mixed else 0.0
        free_s = device_done_s + fence_s
        ready_s = now_s + overheads.launch_ms / 1e3
        layer_ms = 0.0
        if len(shape.decodes) > self._largest_graph:
            layer_ms = overheads.no_graph_layer_ms
        if shape.prefills:
            layer_ms = overheads.eager_layer_ms
            if overheads.prefill_sync_ms:
                ready_s = max(ready_s, free_s) + overheads.prefill_sync_ms / 1e3
        self._is_after_mixed = bool(shape.prefills and shape.decodes)
        return LaunchTimes(max(ready_s, free_s), ready_s + self._num_layers * layer_ms / 1e3)


_LAUNCH = {"launch_ms": 1.5, "eager_layer_ms": 0.25, "no_graph_layer_ms": 0.67, "fence_ms": 0.2}

OVERHEADS: Mapping[str, DeviceOverheads] = {
    "none": DeviceOverheads(),
    "fa3": DeviceOverheads(**_LAUNCH, mixed_decode_factor=1.0),
    "triton": DeviceOverheads(**_LAUNCH, mixed_decode_factor=9.5),
    "flashinfer": DeviceOverheads(**_LAUNCH, mixed_decode_factor=1.6, prefill_sync_ms=2.0),
}
"""By attention backend. `fa3` and `triton` are measured with SGLang 0.5.23 on one H100
(docs/results/gpu.md): launch 0.9 to 1.4 ms for decodes and 1.7 to 2.5 ms for mixed batches, a layer
beside captured segments 0.23 to 0.31 ms and 0.67 ms without CUDA graphs, the fence 0.1 to 0.2 ms,
the factor 0.9 to 1.1 with FA3 and 7.7 to 10.2 with Triton, which runs decodes in tiles of prefills
there. `flashinfer` is not: its plan of a prefill is an estimate from reading SGLang (1 to 4 ms),
and its factor the lower of what vLLM's FlashAttention-2 shows, 1.6 to 2.0
(docs/results/cost_models.md)."""

AUTO = "auto"
SETTINGS = (AUTO, *OVERHEADS)


def default_attention_backend(gpu: GpuSpec) -> str:
    """SGLang's for a dense model: FlashAttention-3 on Hopper, else FlashInfer."""
    return "fa3" if gpu.tables.startswith("h") else "flashinfer"


def overheads_named(name: str, gpu: GpuSpec) -> DeviceOverheads:
    """ConfigError naming the choices when there are none of that name."""
    if name == AUTO:
        name = default_attention_backend(gpu)
    try:
        return OVERHEADS[name]
    except KeyError:
        raise ConfigError(
            f"unknown device overheads {name!r}; choose from {choices(SETTINGS)}"
        ) from None
