"""LoRA adapters with random weights for the demo models."""

from __future__ import annotations

import json
from pathlib import Path

from cosched.demo_model import SIZES

RANK = 4
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapters(folder: Path, *, size: str, names: tuple[str, ...]) -> list[str]:
    """Write one adapter per name; values for ``--lora-paths``."""
    import torch
    from safetensors.torch import save_file

    spec = SIZES[size]
    hidden = spec.hidden_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
    }
    rng = torch.Generator().manual_seed(0)
    for name in names:
        weights = {}
        for layer in range(spec.num_layers):
            for module in MODULES:
                num_in, num_out = shapes[module]
                stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{stem}.lora_A.weight"] = torch.randn(RANK, num_in, generator=rng) * 0.02
                weights[f"{stem}.lora_B.weight"] = torch.randn(num_out, RANK, generator=rng) * 0.02
        (folder / name).mkdir(parents=True)
        save_file(weights, folder / name / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": size,
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(MODULES),
        }
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
    return [f"{name}={folder / name}" for name in names]
