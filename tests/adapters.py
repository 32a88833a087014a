"""LoRA adapters with random weights for the demo models, and what the CPU needs to run them.

For tests, the soak and the fuzz; as `cosched.lab.demo_model`, for trying out and not for answers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cosched.lab.demo_model import SIZES

_RANK = 4
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
_MAKERS = ("arange", "empty", "full", "ones", "tensor", "zeros")

FLAGS = (
    "--enable-lora",
    *("--max-lora-rank", str(_RANK)),
    *("--lora-target-modules", *_MODULES),
    *("--lora-backend", "torch_native"),
)
"""SGLang flags of a server that runs them on the CPU."""


def make_adapters(folder: Path, names: Iterable[str], *, size: str = "tiny") -> dict[str, Path]:
    """Write an adapter per name for a demo model; name -> its folder."""
    from safetensors.torch import save_file

    spec = SIZES[size]
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "q_proj": (spec.hidden_size, queries),
        "k_proj": (spec.hidden_size, keys),
        "v_proj": (spec.hidden_size, keys),
        "o_proj": (queries, spec.hidden_size),
    }
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": list(_MODULES),
        "lora_dropout": 0.0,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": size,
    }
    folders = {}
    for seed, name in enumerate(names):
        random = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(spec.num_layers):
            for module, (num_in, num_out) in shapes.items():
                stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                down = torch.randn(_RANK, num_in, generator=random)
                up = torch.randn(num_out, _RANK, generator=random)
                weights[f"{stem}.lora_A.weight"] = down * 0.02
                weights[f"{stem}.lora_B.weight"] = up * 0.02
        folders[name] = folder / name
        folders[name].mkdir(parents=True)
        save_file(weights, folders[name] / "adapter_model.safetensors")
        (folders[name] / "adapter_config.json").write_text(json.dumps(config))
    return folders


def unpin_memory() -> None:
    """SGLang's LoRA code pins host memory, which torch can do only beside a GPU: leave it be in
    this process, for as long as it lives."""
    if not torch.cuda.is_available():
        for name in _MAKERS:
            setattr(torch, name, _unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda self, *_, **__: self


@contextlib.contextmanager
def without_pinned_memory() -> Iterator[None]:
    """The same for a while."""
    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        for name in _MAKERS:
            stack.enter_context(mock.patch.object(torch, name, _unpinned(getattr(torch, name))))
        unpinned = mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor)
        stack.enter_context(unpinned)
        yield


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*arguments, **options)

    return made


def load_adapters(scheduler: Any, folders: Mapping[str, Path]) -> dict[str, str]:
    """Load LoRA adapters into a running scheduler; name -> id in requests."""
    from sglang.srt.lora.lora_registry import LoRARef

    manager = scheduler.tp_worker.model_runner.lora_manager
    for name, folder in folders.items():
        loaded = manager.load_lora_adapter(
            LoRARef(lora_name=name, lora_path=str(folder), pinned=False)
        )
        assert loaded.success, loaded.error_message
    return {ref.lora_name: lora_id for lora_id, ref in manager.lora_refs.items()}
