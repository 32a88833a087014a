"""What a simulated machine takes for SGLang's defaults is what the installed SGLang chooses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.lab.cost_models.sglang_defaults import (
    default_chunk_tokens,
    default_graph_sizes,
    default_max_running,
    default_mem_fraction,
)
from cosched.lab.cost_models.specs import GPUS


@pytest.fixture
def resolved(tiny_model, monkeypatch):
    """`resolved(gpu, tp)`: SGLang's arguments on such a GPU, as far as its memory decides them."""
    from sglang.srt.arg_groups import cuda_graph_hook, memory_hook
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    def resolve(gpu, tp):
        arguments = prepare_server_args(
            # Without a GPU it would leave prefill graphs out.
            [
                *("--model-path", str(tiny_model), "--device", "cuda", "--tp", str(tp)),
                *("--cuda-graph-backend-prefill", "breakable"),
            ]
        )
        mib = gpu.memory_bytes / 2**20
        monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda device: mib)
        cuda_graph_hook.parse_cuda_graph_config(arguments)
        memory_hook.handle_gpu_memory_settings(arguments)
        return resolving_view(arguments)

    return resolve


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", GPUS)
def test_chunk_graphs_and_memory(resolved, name, tp):
    gpu = GPUS[name]
    theirs, ours = resolved(gpu, tp), default_graph_sizes(gpu, tp)
    assert default_chunk_tokens(gpu.memory_bytes) == theirs.chunked_prefill_size
    assert list(ours.prefill) == theirs.cuda_graph_config.prefill.bs
    assert list(ours.decode) == theirs.cuda_graph_config.decode.bs
    assert default_mem_fraction(gpu, tp) == theirs.mem_fraction_static


@pytest.mark.parametrize("gib", [16, 24, 48, 100, 192])
def test_the_chunk_of_any_gpu(resolved, gib):
    gpu = replace(GPUS["A100-80"], memory_bytes=gib << 30)
    assert default_chunk_tokens(gib << 30) == resolved(gpu, 1).chunked_prefill_size


@pytest.mark.parametrize("kv_tokens", [3000, 440_000, 800_000, 3_000_000])
def test_running_requests(kv_tokens, monkeypatch):
    from sglang.srt.mem_cache import kv_cache_configurator

    schedule = SimpleNamespace(max_running_requests=None)
    monkeypatch.setattr(kv_cache_configurator, "get_schedule", lambda: schedule)
    configurator = SimpleNamespace(
        model_config=SimpleNamespace(context_len=131_072), mambaish_config=None
    )
    resolve = kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs
    assert default_max_running(kv_tokens, 131_072) == resolve(configurator, kv_tokens)
