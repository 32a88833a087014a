"""LoRA adapters for the tiny model, on a machine without a GPU."""

import json

import torch
from safetensors.torch import save_file

SWITCHES = (
    "--enable-lora",
    "--max-lora-rank",
    "4",
    "--lora-target-modules",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "--lora-backend",
    "torch_native",
)


def without_pinning(monkeypatch):
    """SGLang pins host memory for adapters whatever the device; a CPU build of torch cannot."""

    def unpinned(make):
        def call(*args, pin_memory=False, **kwargs):
            return make(*args, **kwargs)

        return call

    for name in ("tensor", "empty", "zeros", "ones", "arange", "full"):
        monkeypatch.setattr(torch, name, unpinned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self)


def make_adapter(folder, *, seed):
    """Random weights of rank 4 on the tiny model's attention; returns the folder."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for name, num_in, num_out in (
            ("q_proj", 64, 128),
            ("k_proj", 64, 128),
            ("v_proj", 64, 128),
            ("o_proj", 128, 64),
        ):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (4, num_in)), ("B", (num_out, 4))):
                key = f"{place}.lora_{part}.weight"
                weights[key] = torch.randn(shape, generator=generator) * 0.05
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": 4,
                "lora_alpha": 8,
                "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
                "lora_dropout": 0.0,
                "bias": "none",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "x",
            }
        )
    )
    return folder


def load_adapters(engine, folder, names):
    """Load an adapter per name into a running scheduler; name -> the id that requests carry."""
    from sglang.srt.lora.lora_registry import LoRARef

    manager = engine.scheduler.tp_worker.model_runner.lora_manager
    for seed, name in enumerate(names):
        path = make_adapter(folder / name, seed=seed)
        result = manager.load_lora_adapter(
            LoRARef(lora_name=name, lora_path=str(path), pinned=False)
        )
        assert result.success, result.error_message
    return {ref.lora_name: lora_id for lora_id, ref in manager.lora_refs.items()}
