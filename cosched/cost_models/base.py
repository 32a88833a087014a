"""What a cost model is, and the part of an iteration that no kernel table holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

from cosched.core.batch import BatchShape
from cosched.errors import ConfigError
from cosched.latency.graphs import GraphSizes

__all__ = ["OVERLAPPED", "SYNCHRONOUS", "CostModel", "CpuOverhead"]


class CostModel(Protocol):
    """Time of one iteration: a simulation's truth. A policy's estimate is a `Predictor`, which
    knows of it only what it was shown.

    `iteration_s` mutates nothing a caller can see, except in a model that says otherwise
    (`NoisyModel` draws a number), and never raises for a valid batch. An empty batch takes no time.
    """

    @property
    def name(self) -> str: ...

    @property
    def graph_sizes(self) -> GraphSizes | None:
        """Sizes to which batches are padded for CUDA graphs; None: they are not."""
        ...

    def iteration_s(self, batch: BatchShape) -> float:
        """Time of one forward pass, CPU time that nothing hides included [s]."""
        ...

    def describe(self) -> dict[str, object]:
        """What the model is, for a results file: plain JSON values only."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOverhead:
    """CPU time of an iteration that is not hidden behind the GPU: fixed_s + per_sequence_s * n [s].

    n is the number of requests in the batch.
    """

    fixed_s: float
    per_sequence_s: float = 0.0

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if not 0 <= value < 1:
                raise ConfigError(f"CpuOverhead.{field} is {value} s; it must be in [0, 1)")


OVERLAPPED = CpuOverhead(fixed_s=0.5e-3)
"""SGLang's overlap scheduler prepares the next batch while this one runs; what is left is the
launch of the graph, the sampler and the hand-over of the sampled tokens. The value is what one
request at a time on an H100 takes beyond its kernels: the SGLang documentation's server log shows
Llama-3.1-8B decoding 144 tokens/s (6.94 ms each) where the kernel tables give 6.5 ms."""

SYNCHRONOUS = CpuOverhead(fixed_s=0.81e-3, per_sequence_s=44e-6)
"""Nothing hidden, in a scheduler written in plain Python: scheduling, preparing inputs, launching
and processing outputs, fitted to Vidur's `cpu_overheads.csv` (A100, vLLM, Llama-2-7B, TP 1,
batches of 8 to 128). An upper bound for SGLang with --disable-overlap-schedule."""
