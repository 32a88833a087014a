"""Cost model from measured times of SGLang's kernels on a real GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cosched.core.batch import BatchShape
from cosched.errors import ConfigError
from cosched.lab.cost_models.cost_model import OVERLAPPED, CpuOverhead, GpuModel, PrefixReads
from cosched.lab.cost_models.kernels import (
    AllReduceTable,
    Cells,
    ContextAttention,
    GemmTable,
    GenerationAttention,
    attention_cells,
)
from cosched.lab.cost_models.sglang_defaults import default_graph_sizes, padded_sizes
from cosched.lab.cost_models.specs import Gemm, GpuSpec, ModelSpec
from cosched.lab.cost_models.tables import find_tables, read_table
from cosched.predict.fitted import FloatArray, GraphSizes

MAX_TOKENS = 16384
"""Largest iteration of the lookup table; larger ones grow in proportion."""

KERNEL_FLOOR_S = 2.5e-6
"""Least time of an elementwise kernel inside a CUDA graph (LLMServingSim `dense` tables: norms,
rotary embedding and activation of one token take 2.4 to 2.7 us)."""

BANDWIDTH_RATIO = 0.8
"""Share of the peak memory bandwidth that elementwise kernels reach (aiconfigurator's
`mem_bw_empirical_scaling_factor`)."""

_TABLE_BYTES = 2  # of a value in the tables: bfloat16

_EXPERT_POINTS = 80
"""Numbers of tokens at which products of experts are computed; straight lines between."""

ELEMENTWISE_KERNELS = 4  # per layer: two norms, rotary embedding with the KV write, activation

SAMPLER_FLOOR_S = 25e-6
SAMPLER_BYTES = 6
"""Sampler: LLMServingSim `per_sequence` tables, 25 us for one sequence, then logits read as
bfloat16 and written as float32 once."""


class KernelTableModel(GpuModel):
    """Iteration time = layers * (GEMMs + all-reduces + elementwise + attention) + lm_head +
    sampler + CPU overhead, all from tables except elementwise and sampler (bandwidth).

    What depends on the number of tokens only is looked up. SGLang runs an iteration in the next
    larger CUDA graph, so GEMMs see the padded number of tokens (`graphs`); attention does not. A
    batch of prefills costs at least reading its longest context. A mixed batch costs the attention
    of its prefills plus that of its decodes, less one launch: SGLang runs both in one call of the
    prefill kernel, for which there is no table.
    """

    name = "kernel-table"

    def __init__(
        self,
        *,
        model: ModelSpec,
        gpu: GpuSpec,
        data_dir: Path,
        tp: int = 1,
        overhead: CpuOverhead = OVERLAPPED,
        graphs: bool = True,
        mixed_decode_factor: float = 1.0,
        prefix_reads: PrefixReads = PrefixReads.EACH,
    ) -> None:
        """ConfigError when the tables are missing, broken, or lack the model's shapes.

        graphs               pad to CUDA graph sizes, as SGLang does by default
        mixed_decode_factor  of `GpuModel`
        prefix_reads         how decodes read shared prefixes; the tables are those of EACH
        """
        super().__init__(
            model=model,
            gpu=gpu,
            tp=tp,
            overhead=overhead,
            prefix_reads=prefix_reads,
            mixed_decode_factor=mixed_decode_factor,
        )
        self.graph_sizes: GraphSizes | None = None
        self._paths = paths = find_tables(data_dir, gpu.tables)
        if model.latent is not None:
            raise ConfigError(
                f"{model.name} has latent attention, of which there is no table; choose "
                "--cost-model roofline"
            )
        heads = (*model.heads_per_gpu(tp), model.head_dim)

        def cells(kind: str) -> Cells:
            return attention_cells(read_table(paths[kind], kind), *heads)

        gemms = GemmTable(read_table(paths["gemm"], "gemm"))
        self.context = ContextAttention(cells("context_attention"))
        self.generation = GenerationAttention(cells("generation_attention"))
        allreduces = None
        if tp > 1:
            if "allreduce" not in paths:
                raise ConfigError(
                    f"tp is {tp}, but there is no all-reduce table beside {paths['gemm']}"
                )
            allreduces = AllReduceTable(read_table(paths["allreduce"], "allreduce"))

        tokens = np.arange(MAX_TOKENS + 1, dtype=np.float64)
        body = self._body(tokens, gemms, allreduces)
        head = self._head(tokens, gemms)
        prefill = decode = np.arange(MAX_TOKENS + 1)
        if graphs:
            self.graph_sizes = sizes = default_graph_sizes(gpu, tp)
            prefill = np.array(padded_sizes(sizes.prefill, MAX_TOKENS))
            decode = np.array(padded_sizes(sizes.decode, MAX_TOKENS))
        self._prefill_s: list[float] = body[prefill].tolist()
        self._decode_s: list[float] = (body + head)[decode].tolist()
        self._head_s: list[float] = head.tolist()

    def _body(
        self, tokens: FloatArray, gemms: GemmTable, allreduces: AllReduceTable | None
    ) -> FloatArray:
        """All layers without attention, by number of tokens [s]."""
        model, gpu, tp = self.model, self.gpu, self.tp
        total = np.zeros_like(tokens)
        for kind in model.layers(tp):
            for gemm in kind.gemms:
                total += kind.num_layers * self._gemm(gemm, tokens, gemms)
            for gemm in kind.experts:
                total += kind.num_layers * self._experts(gemm, tokens, gemms)
        traffic_s = model.elementwise_bytes_per_token(tp) / (
            gpu.bandwidth_bytes_per_s * BANDWIDTH_RATIO
        )
        layer = np.maximum(ELEMENTWISE_KERNELS * KERNEL_FLOOR_S, tokens * traffic_s)
        if allreduces is not None:
            layer += 2 * allreduces.seconds(tp, tokens * model.hidden)
        total += layer * model.num_layers
        return total

    def _experts(self, gemm: Gemm, tokens: FloatArray, gemms: GemmTable) -> FloatArray:
        """One product of all experts that `tokens` go through, by number of tokens [s]: that of one
        matrix as wide as these experts together, with the tokens that each of them has. It reads
        the same weights and does the same work; there is no table of grouped products."""
        experts = self.model.experts
        assert experts is not None
        sizes = np.unique(np.geomspace(1, max(tokens[-1], 1), _EXPERT_POINTS).round())
        seconds = []
        for size in sizes.tolist():
            num_read = experts.distinct(size)
            wide = gemm._replace(n=round(num_read * gemm.n))
            rows = np.array([experts.per_token * size / num_read])
            seconds.append(float(self._gemm(wide, rows, gemms)[0]))
        of_all: FloatArray = np.interp(tokens, sizes, np.maximum.accumulate(np.array(seconds)))
        return of_all

    def _head(self, sequences: FloatArray, gemms: GemmTable) -> FloatArray:
        """lm_head and sampler, by number of sequences [s]."""
        traffic_s = SAMPLER_BYTES * self.model.vocab / self.gpu.bandwidth_bytes_per_s
        sampler = np.maximum(SAMPLER_FLOOR_S, sequences * traffic_s)
        return sampler + self._gemm(self.model.lm_head(self.tp), sequences, gemms)

    def _gemm(self, gemm: Gemm, ms: FloatArray, gemms: GemmTable) -> FloatArray:
        seconds = gemms.seconds(gemm.n, gemm.k, np.maximum(ms, 1.0))
        if self.gpu.slower_memory == 1 and gemm.weight_bytes == _TABLE_BYTES:
            return seconds
        # What is bound by memory takes longer here than there if the tables' GPU has faster memory,
        # and less long if the weights are quantized. Quantized weights are computed as bfloat16.
        flops_s = 2 * ms * gemm.n * gemm.k / self.gpu.flops_per_s
        beside = _TABLE_BYTES * ms * (gemm.n + gemm.k)
        here = beside + gemm.weight_bytes * gemm.n * gemm.k
        there = beside + _TABLE_BYTES * gemm.n * gemm.k
        here_s = np.maximum(flops_s, here / self.gpu.bandwidth_bytes_per_s)
        there_s = np.maximum(flops_s, there / self.gpu.tables_bandwidth)
        return seconds * here_s / there_s

    def iteration_s(self, batch: BatchShape) -> float:
        prefills, decodes = batch.prefills, batch.decodes
        num_sequences = len(decodes) + len(prefills)
        if not num_sequences:
            return 0.0
        attention = self._decode_attention(batch) * self.gpu.slower_memory if decodes else 0.0
        if prefills:
            num_new = longest = 0
            for new, cached in prefills:
                num_new += new
                if new + cached > longest:
                    longest = new + cached
            if decodes:
                attention = attention * self.mixed_decode_factor - self.generation.floor_s
            reading = self.generation.equal_s(1, longest) * self.gpu.slower_memory
            attention += max(self.context.seconds(prefills, num_new), reading)
            total = _lookup(self._prefill_s, num_new + len(decodes))
            total += _lookup(self._head_s, num_sequences)
        else:
            total = _lookup(self._decode_s, len(decodes))
        overhead = self.overhead.fixed_s + self.overhead.per_sequence_s * num_sequences
        return total + attention * self.model.num_layers + self.encoder_s(batch) + overhead

    def _decode_attention(self, batch: BatchShape) -> float:
        """Of one layer on the GPU of the tables [s]."""
        decodes = batch.decodes
        seconds = self.generation.seconds(decodes)
        if not batch.num_repeated:
            return seconds
        distinct = (sum(decodes) - batch.num_repeated) / len(decodes)
        return self.prefix_reads.attention_s(
            seconds, self.generation.equal_s(len(decodes), distinct)
        )

    def describe(self) -> dict[str, object]:
        return super().describe() | {
            "tables": [path.name for path in self._paths.values()],
            "cuda_graphs": self.graph_sizes is not None,
        }


def _lookup(seconds: list[float], size: int) -> float:
    last = len(seconds) - 1
    return seconds[size] if size <= last else seconds[last] * size / last
