"""LoRA adapters with random weights, made on the spot, and what the CPU needs to run them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from sglang.srt.lora.lora_registry import LoRARef

from cosched.demo_model import SIZES
from cosched.soak.traffic import ADAPTERS

__all__ = ["FLAGS", "MAX_PER_BATCH", "load_adapters", "make_adapters", "without_pinned_memory"]

MAX_PER_BATCH = 2
_RANK = 4
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")

FLAGS = (
    "--enable-lora",
    *("--max-lora-rank", str(_RANK)),
    *("--lora-target-modules", *_MODULES),
    *("--max-loras-per-batch", str(MAX_PER_BATCH)),
    *("--lora-backend", "torch_native"),
)


def make_adapters(folder: Path) -> dict[str, Path]:
    """Directory of each adapter."""
    size = SIZES["tiny"]
    shapes = {name: (size.hidden_size, size.num_heads * size.head_dim) for name in _MODULES[:3]}
    shapes["o_proj"] = (size.num_heads * size.head_dim, size.hidden_size)
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": list(_MODULES),
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
    }
    folders = {}
    for seed, name in enumerate(ADAPTERS):
        random = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(size.num_layers):
            for module, (inner, outer) in shapes.items():
                stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                down = torch.randn(_RANK, inner, generator=random)
                up = torch.randn(outer, _RANK, generator=random)
                weights[f"{stem}.lora_A.weight"] = down * 0.02
                weights[f"{stem}.lora_B.weight"] = up * 0.02
        folders[name] = folder / name
        folders[name].mkdir(parents=True)
        save_file(weights, folders[name] / "adapter_model.safetensors")
        (folders[name] / "adapter_config.json").write_text(json.dumps(config))
    return folders


def load_adapters(scheduler: Any, folders: dict[str, Path]) -> dict[str, str]:
    """The id of each adapter, now that the scheduler has it."""
    manager = scheduler.tp_worker.model_runner.lora_manager
    for name, folder in folders.items():
        loaded = manager.load_lora_adapter(
            LoRARef(lora_name=name, lora_path=str(folder), pinned=False)
        )
        assert loaded.success, loaded.error_message
    return {ref.lora_name: lora_id for lora_id, ref in manager.lora_refs.items()}


@contextlib.contextmanager
def without_pinned_memory() -> Iterator[None]:
    """SGLang's LoRA code pins host memory, which torch can do only beside a GPU."""
    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in ("tensor", "empty", "zeros", "ones", "arange", "full"):
            stack.enter_context(mock.patch.object(torch, name, _unpinned(getattr(torch, name))))
        unpinned = mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor)
        stack.enter_context(unpinned)
        yield


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*arguments, **options)

    return made
