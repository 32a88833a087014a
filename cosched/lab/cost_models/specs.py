"""Models and GPUs as far as the time of an iteration depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from cosched.errors import ConfigError, choices


class Gemm(NamedTuple):
    """C[m, n] = A[m, k] B[k, n] on one GPU; m is the number of tokens of the iteration.

    weight_bytes  of a value of B
    """

    name: str
    n: int
    k: int
    weight_bytes: float = 2.0


class LayerKind(NamedTuple):
    """Layers with the same matrix products, on one GPU.

    experts  of one expert; each token goes through some of all
    """

    num_layers: int
    gemms: tuple[Gemm, ...]
    experts: tuple[Gemm, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP.

    number        experts of a layer
    per_token     experts that a token goes through
    intermediate  width of one expert
    shared        width of the experts that every token goes through, together
    dense_layers  layers that have the MLP instead
    weight_bytes  of a value of the experts' weights
    """

    number: int
    per_token: int
    intermediate: int
    shared: int = 0
    dense_layers: int = 0
    weight_bytes: float = 2.0

    def distinct(self, num_tokens: float) -> float:
        """Expected number of experts that `num_tokens` tokens read, if each token chooses evenly
        and on its own: number * (1 - (1 - per_token / number) ** num_tokens)."""
        missed: float = (1 - self.per_token / self.number) ** num_tokens
        return self.number * (1 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): the KV cache holds one latent vector per token, the
    same for all heads and on every GPU.

    rank, rope     width of the latent vector, and of the rotated part of the key beside it
    nope, value    width of the other part of a head's key, and of its value
    query_rank     width between the two query projections; 0: there is one
    """

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A vision transformer before the model. patches: that make a token of the model."""

    num_params: float
    patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, with the values of its config.json.

    intermediate     width of the MLP (of one of the two input projections if it is gated)
    gated_mlp        gate and up projection, as in Llama; False: one input projection, as in OPT
    tied_embeddings  lm_head is the embedding and counted once
    dtype_bytes      of activations, KV cache, embedding and lm_head
    weight_bytes     of a value of the other weights
    experts          None: every layer has the MLP
    latent           None: keys and values of `num_kv_heads` heads are cached
    window_tokens    size of the sliding windows of `window_layers` layers [tokens]
    encoder          of images; None: there is none
    """

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    gated_mlp: bool = True
    tied_embeddings: bool = False
    dtype_bytes: int = 2
    weight_bytes_per_value: float = 2.0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    window_tokens: int = 0
    window_layers: int = 0
    encoder: Encoder | None = None

    def check_tp(self, tp: int) -> None:
        """ConfigError when the model cannot be split over `tp` GPUs."""
        experts = self.experts
        widths = [self.intermediate] if experts is None or experts.dense_layers else []
        if experts is not None:
            widths += [width for width in (experts.intermediate, experts.shared) if width]
        if tp < 1 or self.num_heads % tp or any(width % tp for width in widths):
            shown = " and ".join(map(str, widths))
            raise ConfigError(
                f"tp is {tp}, but {self.name} has {self.num_heads} heads and MLP width "
                f"{shown}: tp must divide {'both' if len(widths) == 1 else 'all'}"
            )

    def heads_per_gpu(self, tp: int) -> tuple[int, int]:
        """(query heads, KV heads) on each GPU. KV heads are repeated when tp exceeds them."""
        return self.num_heads // tp, max(1, self.num_kv_heads // tp)

    def layers(self, tp: int) -> tuple[LayerKind, ...]:
        """The kinds of layers and their matrix products on one GPU."""
        attention = self._attention_gemms(tp)
        experts = self.experts
        if experts is None:
            return (LayerKind(self.num_layers, attention + self._mlp(self.intermediate, tp)),)
        router = Gemm("router", experts.number, self.hidden, self.dtype_bytes)
        shared = self._mlp(experts.shared, tp) if experts.shared else ()
        mixture = LayerKind(
            self.num_layers - experts.dense_layers,
            (*attention, router, *shared),
            tuple(
                gemm._replace(weight_bytes=experts.weight_bytes)
                for gemm in self._mlp(experts.intermediate, tp)
            ),
        )
        if not experts.dense_layers:
            return (mixture,)
        dense = LayerKind(experts.dense_layers, attention + self._mlp(self.intermediate, tp))
        return dense, mixture

    def _attention_gemms(self, tp: int) -> tuple[Gemm, ...]:
        heads, kv_heads = self.heads_per_gpu(tp)
        latent = self.latent
        if latent is None:
            return (
                self._gemm("qkv", (heads + 2 * kv_heads) * self.head_dim, self.hidden),
                self._gemm("o", self.hidden, heads * self.head_dim),
            )
        query = heads * (latent.nope + latent.rope)
        down = self._gemm("q_a", latent.query_rank, self.hidden)
        return (
            *([down] if latent.query_rank else []),
            self._gemm("q", query, latent.query_rank or self.hidden),
            self._gemm("kv_a", latent.rank + latent.rope, self.hidden),
            self._gemm("kv_b", heads * (latent.nope + latent.value), latent.rank),
            self._gemm("o", self.hidden, heads * latent.value),
        )

    def _mlp(self, width: int, tp: int) -> tuple[Gemm, ...]:
        part = width // tp
        name = "gate_up" if self.gated_mlp else "up"
        return (
            self._gemm(name, part * (1 + self.gated_mlp), self.hidden),
            self._gemm("down", self.hidden, part),
        )

    def _gemm(self, name: str, n: int, k: int) -> Gemm:
        return Gemm(name, n, k, self.weight_bytes_per_value)

    def lm_head(self, tp: int) -> Gemm:
        return Gemm("lm_head", -(-self.vocab // tp), self.hidden, self.dtype_bytes)

    def weight_bytes(self, tp: int = 1) -> int:
        """Weights on each GPU; norms and biases, well under 0.1 %, are left out."""

        def num_bytes(gemms: tuple[Gemm, ...]) -> float:
            return sum(gemm.n * gemm.k * gemm.weight_bytes for gemm in gemms)

        number = 0 if self.experts is None else self.experts.number
        layers = sum(
            kind.num_layers * (num_bytes(kind.gemms) + number * num_bytes(kind.experts))
            for kind in self.layers(tp)
        )
        encoder = 0.0
        if self.encoder is not None:
            encoder = self.encoder.num_params * self.dtype_bytes / tp
        return int(layers + encoder + num_bytes((self.lm_head(tp),)) * (2 - self.tied_embeddings))

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """KV cache of one token on each GPU, in all layers."""
        if self.latent is not None:
            width = self.latent.rank + self.latent.rope
        else:
            width = 2 * self.heads_per_gpu(tp)[1] * self.head_dim
        return self.num_layers * width * self.dtype_bytes

    def pair_flops(self, tp: int) -> tuple[int, int]:
        """FLOPs of one (query, key) pair of one layer on each GPU: of a prefill, of a decode."""
        heads, _ = self.heads_per_gpu(tp)
        latent = self.latent
        if latent is None:
            return 4 * heads * self.head_dim, 4 * heads * self.head_dim
        # A decode attends to the latent vectors themselves.
        return (
            2 * heads * (latent.nope + latent.rope + latent.value),
            2 * heads * (2 * latent.rank + latent.rope),
        )

    def elementwise_bytes_per_token(self, tp: int = 1) -> int:
        """Memory traffic per token and layer without GEMMs and attention: two norms with residual
        (read and write), rotary embedding on q and k, the write of k and v, and the activation."""
        heads, kv_heads = self.heads_per_gpu(tp)
        norms = 2 * 4 * self.hidden
        rope_and_store = (2 * heads + 4 * kv_heads) * self.head_dim
        width = self.intermediate
        if self.experts is not None:
            width = self.experts.per_token * self.experts.intermediate + self.experts.shared
        activation = (2 + self.gated_mlp) * width // tp
        return self.dtype_bytes * (norms + rope_and_store + activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """A GPU.

    memory_bytes            as the driver reports it
    bandwidth_bytes_per_s   peak of the device memory
    flops_per_s             peak of dense bfloat16
    link_bytes_per_s        peak of NVLink in one direction
    tables                  beginning of the names of its kernel tables
    tables_bandwidth        memory bandwidth of the GPU of the tables [bytes/s]
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    tables: str
    tables_bandwidth: float

    @property
    def slower_memory(self) -> float:
        """How many times longer memory-bound work takes here than on the tables' GPU."""
        return self.tables_bandwidth / self.bandwidth_bytes_per_s


def _model(
    name: str, layers: int, hidden: int, mlp: int, heads: int, kv: int, vocab: int
) -> ModelSpec:
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden=hidden,
        intermediate=mlp,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=128,
        vocab=vocab,
        gated_mlp=not name.startswith("OPT"),
        tied_embeddings=name.startswith("OPT"),
    )


def _gpu(name: str, mib: int, tbps: float, tflops: float, gbps: float, tables: str) -> GpuSpec:
    return GpuSpec(
        name=name,
        memory_bytes=mib << 20,
        bandwidth_bytes_per_s=tbps * 1e12,
        flops_per_s=tflops * 1e12,
        link_bytes_per_s=gbps * 1e9,
        tables=tables,
        # The A100 tables come from the 80 GB card.
        tables_bandwidth=(2.039 if tables == "a100_sxm" else tbps) * 1e12,
    )


# From each model's config.json: layers, hidden, MLP width, heads, KV heads, vocabulary.
MODELS: Mapping[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _model("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128256),
        _model("Llama-3-70B", 80, 8192, 28672, 64, 8, 128256),
        _model("Llama-2-7B", 32, 4096, 11008, 32, 32, 32000),
        _model("Llama-2-13B", 40, 5120, 13824, 40, 40, 32000),
        _model("Llama-33B", 60, 6656, 17920, 52, 52, 32000),
        _model("OPT-13B", 40, 5120, 20480, 40, 40, 50272),
        _model("OPT-30B", 48, 7168, 28672, 56, 56, 50272),
        _model("OPT-175B", 96, 12288, 49152, 96, 96, 50272),
        _model("Qwen-14B", 40, 5120, 13696, 40, 40, 152064),
        _model("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 152064),
        replace(
            _model("Qwen2.5-VL-7B", 28, 3584, 18944, 28, 4, 152064),
            encoder=Encoder(num_params=675e6, patches=4),
        ),
        _model("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 152064),
        _model("Mistral-7B", 32, 4096, 14336, 32, 8, 32768),
        _model("Yi-34B", 60, 7168, 20480, 56, 8, 64000),
        replace(
            _model("Qwen3-30B-A3B", 48, 2048, 6144, 32, 4, 151936),
            experts=Experts(number=128, per_token=8, intermediate=768),
        ),
    )
}

# From NVIDIA's data sheets; memory as nvidia-smi reports it.
GPUS: Mapping[str, GpuSpec] = {
    spec.name: spec
    for spec in (
        _gpu("A100-40", 40960, 1.555, 312, 300, "a100_sxm"),
        _gpu("A100-80", 81920, 2.039, 312, 300, "a100_sxm"),
        _gpu("H100", 81559, 3.35, 989, 450, "h100_sxm"),
        _gpu("H200", 143771, 4.8, 989, 450, "h200_sxm"),
    )
}


def model_spec(name: str) -> ModelSpec:
    """ConfigError naming the choices when there is no such model."""
    try:
        return MODELS[name]
    except KeyError:
        raise ConfigError(f"unknown model {name!r}; choose from {choices(MODELS)}") from None


def gpu_spec(name: str) -> GpuSpec:
    """ConfigError naming the choices when there is no such GPU."""
    try:
        return GPUS[name]
    except KeyError:
        raise ConfigError(f"unknown GPU {name!r}; choose from {choices(GPUS)}") from None
