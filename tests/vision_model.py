"""A tiny Qwen2.5-VL with random weights: a model folder that a server can load, and its images."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import cosched.bootstrap  # noqa: F401  # before transformers: it imports torchvision
from tests.engine.tiny_models import SIZES

CONFIG = SIZES | {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "in_chans": 3,
        "tokens_per_second": 2,
    },
}

_START, _END = "<|vision_start|>", "<|vision_end|>"
_IMAGE, _VIDEO = "<|image_pad|>", "<|video_pad|>"
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    f"{_START}{_IMAGE}{_END}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_PIXELS_PER_TOKEN = 28 * 28


def make_vision_model(folder: Path, tiny_model: Path) -> Path:
    """With the tokenizer of the tiny model and tokens for images. Float32, and weights with which
    the next token depends on the image; special tokens are not generated."""
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    others = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(tiny_model, folder, ignore=others)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    num_plain = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([_START, _END, _IMAGE, _VIDEO])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in (_START, _END, _IMAGE, _VIDEO)}
    of_text = json.loads((tiny_model / "config.json").read_text())
    config = CONFIG | {
        "vocab_size": num_plain + 64,
        "dtype": "float32",
        "vision_start_token_id": ids[_START],
        "vision_end_token_id": ids[_END],
        "image_token_id": ids[_IMAGE],
        "video_token_id": ids[_VIDEO],
        **{name: of_text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "size": {"shortest_edge": 4 * _PIXELS_PER_TOKEN, "longest_edge": 1024 * _PIXELS_PER_TOKEN},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    _write(folder / "config.json", config)
    _write(folder / "preprocessor_config.json", processor)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    torch.manual_seed(7)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_dict(config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:  # as `cosched.lab.demo_model`: outputs as large as inputs
                peaked = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
                num_in = 1 if "embed_tokens" in name else weight[0].numel()
                weight.normal_(0, peaked / num_in**0.5)
        model.lm_head.weight *= 3
        model.lm_head.weight[:6] = 0.0
        model.lm_head.weight[num_plain:] = 0.0
    model.save_pretrained(folder)
    _write(folder / "config.json", config)  # as published models have it, not as it is saved
    return folder


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2))


def image_part(seed: int, *, side: int = 112) -> dict[str, Any]:
    """A content part of a chat with an image of coloured squares; a token for 28x28 pixels."""
    from PIL import Image

    colours = random.Random(seed).randbytes(3 * 4 * 4)
    image = Image.frombytes("RGB", (4, 4), colours).resize((side, side), Image.Resampling.NEAREST)
    image.save(file := io.BytesIO(), format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
