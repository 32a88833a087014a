"""The interface of cost models, and the CPU time of an iteration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Protocol

from cosched.core.batch import BatchShape
from cosched.errors import ConfigError
from cosched.lab.cost_models.specs import GpuSpec, ModelSpec
from cosched.predict.fitted import GraphSizes


class PrefixReads(StrEnum):
    """How the decodes of a batch read a shared prefix.

    EACH    each reads its whole context from memory, as SGLang's backends do and as the kernel
            tables were measured
    CACHED  the same, with repeated reads from the device's L2 cache (`L2_SPEEDUP`): upper bound of
            what stock attention gains from shared slots
    ONCE    once for all of them (``cosched_shared_prefix``), with `ONCE_OVERHEAD`; at most the time
            of EACH, because the backend chooses
    """

    EACH = "each"
    CACHED = "cached"
    ONCE = "once"

    def attention_s(self, each_s: float, distinct_s: float) -> float:
        """Time of the decodes' attention [s]. each_s: time of EACH; distinct_s: time of reading the
        distinct KV alone."""
        if self is PrefixReads.ONCE:
            return min(each_s, ONCE_OVERHEAD * distinct_s)
        if self is PrefixReads.CACHED:
            return min(each_s, distinct_s + (each_s - distinct_s) / L2_SPEEDUP)
        return each_s


L2_SPEEDUP = 1.27
"""How much faster Triton's kernel reads a prefix again for other requests than distinct slots:
measured on an H200, median of 48 shapes (docs/results/kernels.md)."""

ONCE_OVERHEAD = 2.4
"""Time of the shared-prefix kernels over that in which Triton's kernel reads each token once:
measured on an H200, median of the same shapes."""


_ENCODER_SHARE = 0.72
"""Of the peaks, as of the GEMMs of `roofline.Efficiency`."""


class CostModel(Protocol):
    """Time of one iteration of the simulated GPU. Policies do not see it; they have a `Predictor`
    that learns from measured iterations.

    `iteration_s` never raises for a valid batch and mutates nothing, except in the models of
    `noise`. An empty batch takes no time.
    """

    @property
    def name(self) -> str: ...

    @property
    def graph_sizes(self) -> GraphSizes | None:
        """Sizes to which batches are padded for CUDA graphs; None: no padding."""
        ...

    def iteration_s(self, batch: BatchShape) -> float:
        """Time of one forward pass, with the CPU time that is not hidden [s]."""
        ...

    def describe(self) -> dict[str, object]:
        """Parameters for a results file: plain JSON values only."""
        ...


class GpuModel:
    """What a cost model of one model on one kind of GPU is made of."""

    name: str

    def __init__(
        self,
        *,
        model: ModelSpec,
        gpu: GpuSpec,
        tp: int,
        overhead: CpuOverhead,
        prefix_reads: PrefixReads,
        mixed_decode_factor: float,
    ) -> None:
        """mixed_decode_factor: how many times longer the attention of a decode takes in a mixed
        batch than among decodes; unknown for SGLang's kernels, 1.6 to 2 in the median for vLLM's
        FlashAttention-2 (docs/results/cost_models.md). ConfigError below 1."""
        if mixed_decode_factor < 1:
            raise ConfigError(
                f"mixed_decode_factor is {mixed_decode_factor}; it must be at least 1"
            )
        model.check_tp(tp)
        self.model = model
        self.gpu = gpu
        self.tp = tp
        self.overhead = overhead
        self.prefix_reads = prefix_reads
        self.mixed_decode_factor = mixed_decode_factor

    def encoder_s(self, batch: BatchShape) -> float:
        """Time of the encoder [s]: 2 FLOPs per parameter and patch at `_ENCODER_SHARE` of the peak,
        or reading the weights. Its attention, which is mostly in windows, is left out."""
        encoder, num_tokens = self.model.encoder, sum(batch.encoded)
        if encoder is None or not num_tokens:
            return 0.0
        flops = 2 * encoder.num_params * encoder.patches * num_tokens
        reading = encoder.num_params * self.model.dtype_bytes
        gpu = self.gpu
        most_s = max(flops / gpu.flops_per_s, reading / gpu.bandwidth_bytes_per_s)
        return most_s / _ENCODER_SHARE / self.tp

    def describe(self) -> dict[str, object]:
        return {
            "cost_model": self.name,
            "model": self.model.name,
            "gpu": self.gpu.name,
            "tp": self.tp,
            "prefix_reads": self.prefix_reads.value,
            "mixed_decode_factor": self.mixed_decode_factor,
            "cpu_overhead": asdict(self.overhead),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOverhead:
    """CPU time of an iteration that the GPU does not hide: fixed_s + per_sequence_s * n [s], with n
    requests in the batch."""

    fixed_s: float
    per_sequence_s: float = 0.0

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if not 0 <= value < 1:
                raise ConfigError(f"CpuOverhead.{field} is {value} s; it must be in [0, 1)")


OVERLAPPED = CpuOverhead(fixed_s=0.5e-3)
"""With SGLang's overlap scheduler: launch of the graph, sampler and hand-over of the tokens. Time
of one request on an H100 beyond its kernels: the server log in SGLang's documentation shows
Llama-3.1-8B decoding 144 tokens/s (6.94 ms each); the kernel tables give 6.5 ms."""

SYNCHRONOUS = CpuOverhead(fixed_s=0.81e-3, per_sequence_s=44e-6)
"""Nothing hidden: scheduling, preparing inputs, launching and processing outputs in plain Python,
fitted to Vidur's `cpu_overheads.csv` (A100, vLLM, Llama-2-7B, TP 1, batches of 8 to 128). An upper
bound for SGLang with --disable-overlap-schedule."""
