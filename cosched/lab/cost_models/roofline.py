"""Cost model from data sheets: FLOPs, bytes, and the shares of the peaks that kernels reach."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from cosched.core.batch import BatchShape
from cosched.lab.cost_models.cost_model import OVERLAPPED, CpuOverhead, GpuModel, PrefixReads
from cosched.lab.cost_models.specs import Gemm, GpuSpec, ModelSpec

_Terms = tuple[float, float, float]
"""Of a matrix product: compute per row, reading the weights, memory per row [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peaks (0-1) and the least time of a kernel [s].

    The defaults are round numbers from the aiconfigurator tables of the A100 and the H100: large
    GEMMs reach 0.68 to 0.82 of the FLOPS, small ones 0.62 to 0.84 of the bandwidth; attention of
    4096 tokens 0.65 and 0.55 of the FLOPS, decodes with much KV 0.6 and 0.9 of the bandwidth.
    """

    gemm_flops: float = 0.72
    gemm_bandwidth: float = 0.72
    attention_flops: float = 0.55
    attention_bandwidth: float = 0.72
    elementwise_bandwidth: float = 0.8
    link: float = 0.75
    gemm_floor_s: float = 3e-6
    attention_floor_s: float = 10e-6
    elementwise_floor_s: float = 10e-6
    allreduce_floor_s: float = 5e-6
    sampler_floor_s: float = 25e-6


class RooflineModel(GpuModel):
    """Each GEMM takes the longer of its FLOPs and its bytes; prefill attention the longer of its
    pairs' FLOPs (4 * heads * head_dim each) and reading its keys and values; decode attention reads
    its KV. Needs no files. Right within a factor of 2 of the tables, mostly within 20 %
    (docs/results/cost_models.md); it knows no tiles, CUDA graph sizes or half-filled GPUs.
    """

    name = "roofline"
    graph_sizes = None

    def __init__(
        self,
        *,
        model: ModelSpec,
        gpu: GpuSpec,
        tp: int = 1,
        overhead: CpuOverhead = OVERLAPPED,
        mixed_decode_factor: float = 1.0,
        prefix_reads: PrefixReads = PrefixReads.EACH,
    ) -> None:
        super().__init__(
            model=model,
            gpu=gpu,
            tp=tp,
            overhead=overhead,
            prefix_reads=prefix_reads,
            mixed_decode_factor=mixed_decode_factor,
        )
        self.efficiency = e = Efficiency()
        bandwidth, flops = gpu.bandwidth_bytes_per_s, gpu.flops_per_s

        def gemm_terms(gemm: Gemm) -> _Terms:
            n, k = gemm.n, gemm.k
            per_byte = 1 / (bandwidth * e.gemm_bandwidth)
            compute = 2 * n * k / (flops * e.gemm_flops)
            per_token = (n + k) * model.dtype_bytes * per_byte
            return compute, n * k * gemm.weight_bytes * per_byte, per_token

        self._layers = [
            (kind.num_layers, [*map(gemm_terms, kind.gemms)], [*map(gemm_terms, kind.experts)])
            for kind in model.layers(tp)
        ]
        self._head = gemm_terms(model.lm_head(tp))
        self._elementwise = model.elementwise_bytes_per_token(tp) / (
            bandwidth * e.elementwise_bandwidth
        )
        per_flop = 1 / (flops * e.attention_flops)
        self._pair, self._decode_pair = (one * per_flop for one in model.pair_flops(tp))
        # One layer's share of the KV of a token.
        kv_bytes = model.kv_bytes_per_token(tp) / model.num_layers
        self._kv = kv_bytes / (bandwidth * e.attention_bandwidth)
        ring = 2 * (tp - 1) / tp * model.hidden * model.dtype_bytes
        self._allreduce = ring / (gpu.link_bytes_per_s * e.link)

    def iteration_s(self, batch: BatchShape) -> float:
        prefills, decodes = batch.prefills, batch.decodes
        if not prefills and not decodes:
            return 0.0
        e = self.efficiency
        pairs = 0.0
        num_new = num_keys = 0
        for new, cached in prefills:
            num_new += new
            num_keys += new + cached
            pairs += new * (cached + new / 2)
        tokens = num_new + len(decodes)
        sequences = len(prefills) + len(decodes)
        layer = max(self._elementwise * tokens, e.elementwise_floor_s)
        num_read = sum(decodes)
        reading_s = self.prefix_reads.attention_s(
            num_read * self._kv, (num_read - batch.num_repeated) * self._kv
        )
        layer += max(pairs * self._pair, num_keys * self._kv)
        factor = self.mixed_decode_factor if prefills else 1.0
        layer += max(reading_s, num_read * self._decode_pair) * factor
        layer += e.attention_floor_s
        if self.tp > 1:
            layer += 2 * (e.allreduce_floor_s + self._allreduce * tokens)
        compute, memory, memory_per_token = self._head
        head = max(compute * sequences, memory + memory_per_token * sequences)
        overhead = self.overhead.fixed_s + self.overhead.per_sequence_s * sequences
        total = layer * self.model.num_layers + self._gemms_s(tokens)
        total += self.encoder_s(batch)
        return total + head + e.sampler_floor_s + overhead

    def _gemms_s(self, tokens: int) -> float:
        """Matrix products of all layers [s]. An expert's weights are read once for all its
        tokens."""
        floor_s, experts = self.efficiency.gemm_floor_s, self.model.experts
        total = 0.0
        for num_layers, gemms, of_expert in self._layers:
            layer = 0.0
            for compute, memory, per_token in gemms:
                layer += max(compute * tokens, memory + per_token * tokens, floor_s)
            if experts is not None:
                num_read = experts.distinct(tokens)
                rows = experts.per_token * tokens
                for compute, memory, per_token in of_expert:
                    layer += max(compute * rows, memory * num_read + per_token * rows, floor_s)
            total += num_layers * layer
        return total

    def describe(self) -> dict[str, object]:
        return super().describe() | {"efficiency": asdict(self.efficiency)}
