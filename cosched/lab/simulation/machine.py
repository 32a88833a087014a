"""The simulated machine: a model on a GPU, and SGLang's settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cosched.errors import ConfigError
from cosched.lab.cost_models.sglang_defaults import (
    default_chunk_tokens,
    default_max_running,
    kv_capacity_tokens,
)
from cosched.lab.cost_models.specs import ModelSpec, gpu_spec, model_spec
from cosched.lab.simulation.tiny_model import DP_ATTENTION, STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The simulated machine. These are the help texts of its options; "default:" explains None.

    model                 the served model
    model_config          the served model, by its Hugging Face config.json or the folder of it, in
                          place of --model
    gpu                   the simulated GPU
    tp                    number of GPUs (tensor parallelism)
    dp_ranks              ranks of DP attention: each is such a machine, and all step together.
                          SGLang divides the budget of tokens and the running requests among them
    kv_tokens             KV capacity [tokens]; default: what fits beside the model's weights
    page_size             tokens per KV page
    chunk_tokens          token budget of an iteration; -1: prompts are never split; default: that
                          of SGLang for the GPU
    max_prefill_tokens    SGLang's ``--max-prefill-tokens``
    max_running_requests  maximum number of running requests, of all ranks; default: that of SGLang,
                          2048 or more for each rank
    mixed_chunk           prefill and decode in one iteration; default: as the policy requires, but
                          not with ``--device-overheads triton`` (as on a server)
    schedule_policy       order of stock scheduling
    overlap               SGLang's overlap scheduler
    radix_cache           keep the KV of prefixes for later requests; only stock scheduling can do
                          without
    host_kv_tokens        KV capacity of host memory (HiCache) [tokens]; 0: none
    host_bandwidth_gb_s   bandwidth of copies to and from host memory, per GPU [GB/s]
    host_write_policy     what is copied to host memory; default: what cosched values, or SGLang's
                          default if SGLang decides
    drafts                tokens drafted for each decode (speculative decoding, a chain as of EAGLE
                          or MTP); 0: none. Without the overlap scheduler
    state_slots           slots for the states of linear-attention layers, of which a request takes
                          five with the overlap scheduler and three without; 0: no such layers.
                          Times are the model's without them
    acceptance            probability that a drafted token is right if those before it are
    acceptance_spread     most by which that of a request differs from it
    window_tokens         size of sliding windows in half of the layers, whose KV has a pool of its
                          own [tokens]; 0: no windows
    window_kv_tokens      capacity of that pool [tokens]; default: 0.8 of the other one
    """

    model: str = "Llama-3.1-8B"
    model_config: ModelSpec | None = None
    gpu: str = "A100-80"
    tp: int = 1
    dp_ranks: int = 1
    kv_tokens: int | None = None
    page_size: int = 1
    chunk_tokens: int | None = None
    max_prefill_tokens: int = 16384
    max_running_requests: int | None = None
    context_length: int = 131_072
    mixed_chunk: bool | None = None
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    overlap: bool = True
    radix_cache: bool = True
    host_kv_tokens: int = 0
    host_bandwidth_gb_s: float = 20.0
    host_write_policy: str | None = None
    drafts: int = 0
    state_slots: int = 0
    acceptance: float = 0.7
    acceptance_spread: float = 0.0
    window_tokens: int = 0
    window_kv_tokens: int | None = None

    @property
    def served(self) -> ModelSpec:
        return self.model_config or model_spec(self.model)

    @property
    def window(self) -> tuple[int, float]:
        """(size of the sliding windows [tokens], share of the layers that have one)."""
        if self.window_tokens:
            return self.window_tokens, 0.5
        served = self.served
        return served.window_tokens, served.window_layers / served.num_layers

    def capacity(self) -> int:
        """KV tokens, whole pages."""
        if self.kv_tokens is not None:
            if self.kv_tokens < self.page_size:
                raise ConfigError(f"kv_tokens is {self.kv_tokens}, less than one page")
            return self.kv_tokens // self.page_size * self.page_size
        gpu = gpu_spec(self.gpu)
        return kv_capacity_tokens(self.served, gpu, self.tp, page_size=self.page_size)

    def chunk(self) -> int:
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        return default_chunk_tokens(gpu_spec(self.gpu).memory_bytes)

    def slots(self) -> int:
        """Running requests at most, of a rank."""
        if self.max_running_requests is None:
            return default_max_running(self.capacity(), self.context_length)
        return max(self.max_running_requests // self.dp_ranks, 1)

    def flags(self) -> list[str]:
        """SGLang's command line flags."""
        capacity = self.capacity()
        values: dict[str, Any] = {
            "max-total-tokens": capacity,
            "page-size": self.page_size,
            "chunked-prefill-size": self.chunk(),
            "max-prefill-tokens": self.max_prefill_tokens,
            "max-running-requests": self.slots() * self.dp_ranks,
            "context-length": self.context_length,
            "schedule-policy": self.schedule_policy,
            "schedule-conservativeness": self.schedule_conservativeness,
        }
        flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        if self.dp_ranks > 1:
            if self.host_kv_tokens:
                raise ConfigError("ranks of DP attention have no host memory in the simulation")
            flags += ["--tp", str(self.dp_ranks), DP_ATTENTION, str(self.dp_ranks)]
        if self.mixed_chunk:
            flags.append("--enable-mixed-chunk")
        if self.drafts:
            flags += ["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"]
            flags += ["--speculative-num-steps", str(self.drafts)]
            flags += ["--speculative-num-draft-tokens", str(self.drafts + 1)]
        if self.state_slots:
            flags += [STATES, str(self.state_slots)]
        if not self.overlap or self.drafts:
            flags.append("--disable-overlap-schedule")
        if self.window_kv_tokens is not None:
            flags += ["--swa-full-tokens-ratio", str(self.window_kv_tokens / capacity)]
        if not self.radix_cache:
            flags.append("--disable-radix-cache")
        if self.host_kv_tokens:
            # SGLang's own size is in bytes of the tiny model.
            ratio = self.host_kv_tokens / capacity
            flags += ["--enable-hierarchical-cache", "--hicache-ratio", str(ratio)]
            flags += ["--hicache-size", "0"]
            if self.host_write_policy is not None:
                flags += ["--hicache-write-policy", self.host_write_policy]
        return flags

    @property
    def host_s_per_token(self) -> float:
        """To copy a token's KV to host memory or back [s]."""
        num_bytes = self.served.kv_bytes_per_token(self.tp)
        return num_bytes / (self.host_bandwidth_gb_s * 1e9)

    def describe(self) -> dict[str, Any]:
        described = asdict(self) | {"kv_tokens": self.capacity(), "chunk_tokens": self.chunk()}
        if self.model_config is None:
            del described["model_config"]
        else:
            described["model"] = self.model_config.name
        return described
