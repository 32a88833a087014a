"""A tiny Qwen2.5-VL and a tiny Qwen2-Audio with random weights: model folders that a server can
load, and images and sounds for them."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
import wave
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

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

AUDIO_CONFIG = {
    "model_type": "qwen2_audio",
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_token_index": 5,
    "text_config": SIZES | {"model_type": "qwen2", "tie_word_embeddings": False},
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "d_model": 64,
    },
}

_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_AUDIO_TOKENS = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'MEDIA' or 'MEDIA' in part or 'MEDIA_url' in part %}PLACE"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_PIXELS_PER_TOKEN = 28 * 28
_SAMPLE_RATE = 16_000
_SAMPLES_PER_TOKEN = _SAMPLE_RATE // 25


def make_vision_model(folder: Path, tiny_model: Path) -> Path:
    """With the tokenizer of the tiny model and tokens for images."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    start, end, image, video = ids = _copy_with_tokens(tiny_model, folder, _VISION_TOKENS)
    config = CONFIG | {
        **_of_text(tiny_model, ids),
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "size": {"shortest_edge": 4 * _PIXELS_PER_TOKEN, "longest_edge": 1024 * _PIXELS_PER_TOKEN},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    _write(folder / "preprocessor_config.json", processor)
    place = "{0}{2}{1}".format(*_VISION_TOKENS)
    (folder / "chat_template.jinja").write_text(_template("image", place))
    _save(Qwen2_5_VLForConditionalGeneration, config, folder, num_plain=start)
    return folder


def make_audio_model(folder: Path, tiny_model: Path) -> Path:
    """The same for sound: a clip of up to 30 s, which the encoder fills up with silence."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2AudioForConditionalGeneration

    start, _, audio = ids = _copy_with_tokens(tiny_model, folder, _AUDIO_TOKENS)
    of_text = _of_text(tiny_model, ids)
    config = AUDIO_CONFIG | {
        "dtype": "float32",
        "audio_token_index": audio,
        "text_config": AUDIO_CONFIG["text_config"] | of_text,
    }
    processor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen2AudioProcessor",
        "feature_size": AUDIO_CONFIG["audio_config"]["num_mel_bins"],
        "return_attention_mask": True,
    }
    _write(folder / "preprocessor_config.json", processor)
    place = "{0}{2}{1}".format(*_AUDIO_TOKENS)
    (folder / "chat_template.jinja").write_text(_template("audio", place))
    _save(Qwen2AudioForConditionalGeneration, config, folder, num_plain=start)
    weights = load_file(folder / "model.safetensors")
    published = {name.replace(".model.model.", ".model."): each for name, each in weights.items()}
    save_file(published, folder / "model.safetensors")  # transformers doubles a part of the names
    return folder


def _copy_with_tokens(tiny_model: Path, folder: Path, tokens: Sequence[str]) -> list[int]:
    """Copy all but the model, with more tokens; their ids, which come last."""
    from tokenizers import Tokenizer

    others = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(tiny_model, folder, ignore=others)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    return [tokenizer.token_to_id(token) for token in tokens]


def _of_text(tiny_model: Path, ids: Sequence[int]) -> dict[str, Any]:
    of_text = json.loads((tiny_model / "config.json").read_text())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "vocab_size": min(ids) + 64,
        "dtype": "float32",
        **{name: of_text[name] for name in names},
    }


def _template(kind: str, place: str) -> str:
    return _TEMPLATE.replace("MEDIA", kind).replace("PLACE", place)


def _save(kind: Any, config: dict[str, Any], folder: Path, *, num_plain: int) -> None:
    """With weights with which the next token depends on what is seen or heard; special tokens are
    not generated."""
    import torch

    torch.manual_seed(7)
    model = kind(kind.config_class.from_dict(deepcopy(config)))
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:  # as `cosched.lab.demo_model`: outputs as large as inputs
                peaked = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
                num_in = 1 if "embed_tokens" in name else weight[0].numel()
                weight.normal_(0, peaked / num_in**0.5)
        head *= 3
        head[:6] = 0.0
        head[num_plain:] = 0.0
    model.save_pretrained(folder)
    _write(folder / "config.json", config)  # as published models have it, not as it is saved


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


def sound_item(seed: int, begin: int, *, num_tokens: int, num_frames: int) -> Any:
    """Random features of a sound, as SGLang's processor gives them to the scheduler; its tokens
    begin at `begin` of the prompt."""
    import torch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    num_mels = AUDIO_CONFIG["audio_config"]["num_mel_bins"]
    random = torch.Generator().manual_seed(seed)
    return MultimodalDataItem(
        modality=Modality.AUDIO,
        feature=torch.randn(1, num_mels, num_frames, generator=random),
        model_specific_data={"audio_feature_lens": torch.tensor([num_tokens])},
        offsets=[(begin, begin + num_tokens - 1)],
    )


def audio_part(seed: int, *, num_tokens: int) -> dict[str, Any]:
    """A content part of a chat with a sound of random tones, 40 ms for a token; at most 750."""
    tones = random.Random(seed)
    samples = np.concatenate(
        [np.sin(np.arange(_SAMPLES_PER_TOKEN) * tones.uniform(0.02, 1)) for _ in range(num_tokens)]
    )
    with wave.open(file := io.BytesIO(), "wb") as clip:
        clip.setparams((1, 2, _SAMPLE_RATE, 0, "NONE", ""))
        clip.writeframes((samples * 0x4000).astype("<i2").tobytes())
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
