"""What a cost model is, and the part of an iteration that no kernel table holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Protocol

from cosched.core.batch import BatchShape
from cosched.errors import ConfigError
from cosched.predict.fitted import GraphSizes


class PrefixReads(StrEnum):
    """How the decodes of a batch read KV that several of them have in common.

    EACH    each reads its whole context from memory: what SGLang's backends ask for, and the kernel
            tables hold
    CACHED  the same, and what another one has just read comes from the device's L2 cache: the most
            that stock attention can gain from slots that are shared, `L2_SPEEDUP`
    ONCE    read once for all of them (``cosched_shared_prefix``), at `ONCE_OVERHEAD`; at most the
            time of EACH, for the backend picks
    """

    EACH = "each"
    CACHED = "cached"
    ONCE = "once"

    def attention_s(self, each_s: float, distinct_s: float) -> float:
        """Time of the decodes' attention [s]. each_s: as EACH has it; distinct_s: if there were no
        more KV than there is without what is repeated."""
        if self is PrefixReads.ONCE:
            return min(each_s, ONCE_OVERHEAD * distinct_s)
        if self is PrefixReads.CACHED:
            return min(each_s, distinct_s + (each_s - distinct_s) / L2_SPEEDUP)
        return each_s


L2_SPEEDUP = 2.0
"""Bandwidth of the L2 cache over that of the memory: assumed, 8 over 4.3 TB/s on an H200. Whatever
fits; one layer's KV of 10,000 tokens of an 8B model is 41 MB, as large as the cache of an A100."""

ONCE_OVERHEAD = 1.1
"""Bytes of the shared-prefix plan over each token once: 3 to 9 % more are counted
(docs/kernels.md). The kernel itself is not measured on a GPU yet."""


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
