"""A backend of SGLang's becomes one that reads shared prefixes once, where model and device allow.

It is an instance of that backend's class with a few overridden methods: its metadata is always
prepared, so that each layer has the choice.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from cosched.config import Config, SharedPrefixConfig, load_config
from cosched.engine.port.read_once import note_newest, note_none
from cosched.engine.port.shared_prefix import SharedPrefixes, num_q_heads
from cosched.engine.prefix_sharing import FLAG, NAME
from cosched.errors import ConfigError, choices
from cosched_kernels.picker import DeviceModel, read_model

_MAX_HEAD_DIM = 256
_MAX_GROUP = 16  # query heads per KV head: the rows of the lowest tile
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_COMPILED_FOR = (8, 9, 10)  # major compute capabilities


def create(runner: Any) -> Any:
    """The backend ``cosched_shared_prefix`` for a model runner. ConfigError if the inner backend is
    unknown."""
    config = load_config()
    assert config is not None, "the plugin registers nothing without a configuration"
    name = config.shared_prefix.inner or _default_inner(runner)
    if name not in ATTENTION_BACKENDS or name == NAME:
        known = [other for other in ATTENTION_BACKENDS if other != NAME]
        raise ConfigError(f"unknown shared_prefix.inner {name!r}; choose from {choices(known)}")
    return extended(ATTENTION_BACKENDS[name](runner), runner, config, inner=name)


def extended(backend: Any, runner: Any, config: Config, *, inner: str) -> Any:
    """The backend of a model runner, with shared prefixes where the model can have them.
    ConfigError if it cannot and must.

    inner  its name
    """
    settings = config.shared_prefix
    reason = _why_not(runner)
    is_named = runner.prefill_attention_backend_str == NAME
    if reason is None and settings.mode == "auto" and not (is_named or _is_compiled_for(runner)):
        reason = "the kernels were compiled for compute capabilities 8, 9 and 10 only"
    if reason is not None:
        if settings.mode == "on":
            raise ConfigError(f"{FLAG} on is not possible: {reason}")
        note_none(reason)
        return backend
    is_cascade = settings.kernels == "cascade" and runner.device == "cuda"
    if is_cascade and find_spec("flashinfer") is None:
        raise ConfigError("shared_prefix.kernels 'cascade' needs the package flashinfer-python")
    shared = SharedPrefixes(
        runner,
        settings,
        inner=inner,
        device_model=_device_model(runner, settings),
        is_strict=config.strict,
    )
    note_newest(shared)
    backend.__class__ = _class_before(type(backend), shared)
    return backend


def _is_compiled_for(runner: Any) -> bool:
    """Whether `cosched_kernels.compile_table` knows such a device."""
    if runner.device != "cuda":
        return True
    is_nvidia = torch.version.cuda is not None  # else AMD's devices are called cuda
    return is_nvidia and torch.cuda.get_device_capability()[0] in _COMPILED_FOR


def _default_inner(runner: Any) -> str:
    """SGLang's choice for multi-head attention."""
    if runner.device != "cuda":
        return "torch_native"
    major, _ = torch.cuda.get_device_capability()
    if major == 9:
        return "fa3"
    return "flashinfer" if major == 8 else "triton"


def _device_model(runner: Any, settings: SharedPrefixConfig) -> DeviceModel:
    """Measured, or from data sheets. ConfigError if the file is of another device."""
    if settings.device_model is None:
        return DeviceModel()
    name = torch.cuda.get_device_name() if runner.device == "cuda" else "CPU"
    try:
        return read_model(Path(settings.device_model), device_name=name)
    except ValueError as error:
        raise ConfigError(f"shared_prefix.device_model: {error}") from None


def _why_not(runner: Any) -> str | None:
    """Why this model cannot share prefixes; None: it can."""
    model = runner.model_config
    if runner.use_mla_backend:
        return "the model has latent attention (MLA)"
    if runner.sliding_window_size is not None:
        return "the model has layers with a sliding window"
    if model.is_encoder_decoder:
        return "the model is an encoder and a decoder"
    pool = runner.token_to_kv_pool
    if type(pool) is not MHATokenToKVPool or getattr(pool, "is_quantized_kv_cache", False):
        return f"KV memory is a {type(pool).__name__}"
    if getattr(runner.kv_index_translator, "is_translating", False):
        return "KV slots are translated"
    keys, values = pool.get_kv_buffer(pool.start_layer)
    head_dim, group = keys.shape[2], num_q_heads(runner) // keys.shape[1]
    if values.shape[2] != head_dim or head_dim > _MAX_HEAD_DIM:
        return f"heads have {head_dim} numbers in keys, {values.shape[2]} in values"
    if group > _MAX_GROUP:
        return f"{group} query heads share a KV head, more than {_MAX_GROUP}"
    if keys.dtype == torch.float8_e4m3fn and keys.is_cuda:
        major, minor = torch.cuda.get_device_capability(keys.device)
        if (major, minor) < (8, 9):
            return f"compute capability {major}.{minor} has no float8 e4m3; take e5m2"
    if runner.dtype not in _DTYPES:
        return f"queries are {runner.dtype}"
    return None


def _class_before(kind: Any, shared: SharedPrefixes) -> type:
    """A subclass of `kind` whose attention is computed by `shared` if it can."""

    class SharedPrefixBackend(kind):  # type: ignore[misc]
        cosched_shared = shared

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            shared.prepare(forward_batch)

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            super().init_cuda_graph_state(max_bs, max_num_tokens)
            shared.begin_graphs(max_bs)

        def init_forward_metadata_out_graph(
            self, forward_batch: Any, in_capture: bool = False
        ) -> None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            shared.load_for_graph(in_capture=in_capture)

        def forward_decode(self, *args: Any, **kwargs: Any) -> Any:
            return shared.forward(super().forward_decode, *args, **kwargs)

        def forward_extend(self, *args: Any, **kwargs: Any) -> Any:
            return shared.forward(super().forward_extend, *args, **kwargs)

    return SharedPrefixBackend
