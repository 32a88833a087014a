"""Attention that reads a shared prefix once, in SGLang's registry of attention backends: as a
backend of its own name, ``cosched_shared_prefix``, and in place of those that it can extend.

`cosched.engine.port.extend_attention` and the kernels are imported when a backend is extended, so
that other backends pay nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)

from cosched.config import Config, load_config
from cosched.engine.port.read_once import note_none, shared_runs, why_none
from cosched.engine.prefix_sharing import EXTENDED, NAME, why_not_shared


def prefills_wait(scheduler: Any) -> bool:
    """Whether the launch of a batch with prefills waits until the device is idle. FlashInfer plans
    it from what it copies from the device; FlashAttention-3 and Triton do not."""
    prefill, _ = attention_backends_of(resolving_view(scheduler.server_args))
    return bool(prefill == "flashinfer")


def register() -> None:
    """Add the backend to ``--attention-backend``, and have those that it can extend ask for it.
    Idempotent."""
    if NAME in ATTENTION_BACKENDS:
        return
    choices.add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)
    for name in EXTENDED:
        register_attention_backend(name)(partial(_extended, name, ATTENTION_BACKENDS[name]))


def describe_sharing(server_args: Any) -> str:
    """One line of what was built: whether attention reads a shared prefix once, and why not."""
    runs = shared_runs()
    if runs is not None:
        return f"shared-prefix attention on, beside {runs.beside}, where the batch gains from it"
    config = load_config()
    assert config is not None
    reason = why_none() or _why_not_shared(server_args, config)
    return f"shared-prefix attention off: {reason}"


def _why_not_shared(server_args: Any, config: Config) -> str | None:
    resolved = resolving_view(server_args)
    return why_not_shared(resolved, config, attention_backends_of(resolved))


def _create(runner: Any) -> Any:
    from cosched.engine.port.extend_attention import create

    return create(runner)


def _extended(name: str, stock: Callable[[Any], Any], runner: Any) -> Any:
    """SGLang's backend, extended where the configuration says so."""
    backend, config = stock(runner), load_config()
    used = {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
    if config is None or runner.is_draft_worker or used != {name}:
        return backend  # not the only one of the model: nothing is shared, or `_create` extends it
    note_none()
    if _why_not_shared(runner.server_args, config) is not None:
        return backend
    from cosched.engine.port.extend_attention import extended

    return extended(backend, runner, config, inner=name)
