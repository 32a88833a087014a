"""A model's ``config.json``, as Hugging Face has it, read for cost models.

Read are dense models, mixtures of experts, latent attention, sliding windows, and weights in
bfloat16, fp8 or mxfp4. What cannot be read is an error that names the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosched.errors import ConfigError, choices
from cosched.lab.cost_models.specs import Experts, LatentAttention, ModelSpec

_UNGATED = ("gpt_neox", "nemotron", "opt", "phi", "starcoder2")
"""Values of ``model_type`` with one input projection in the MLP."""

_WEIGHT_BYTES = {"fp8": 1.0, "mxfp4": 17 / 32}
"""``quantization_config.quant_method`` -> bytes of a quantized value, scales included."""

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")

_NOT_MODELLED = {
    "is_encoder_decoder": (False, "it has an encoder"),
    "linear_num_value_heads": (0, "it has linear attention"),
    "mamba_d_state": (0, "it has Mamba layers"),
    "ssm_state_size": (0, "it has Mamba layers"),
    "interleave_moe_layer_step": (1, "its layers with and without experts alternate"),
}
"""Key -> its value in a model without that, and what it says otherwise."""


def read_model_config(path: Path | str) -> ModelSpec:
    """The model of a ``config.json``, or of the folder that holds one. ConfigError."""
    path = Path(path)
    if path.is_dir():
        path /= "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object")
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    # Of a model that sees or hears too, the part that is scheduled.
    inner = found.get("text_config")
    return _Reader(found | inner if isinstance(inner, dict) else found, path).model(name)


class _Reader:
    def __init__(self, keys: Mapping[str, Any], path: Path) -> None:
        self._keys = keys
        self._path = path

    def model(self, name: str) -> ModelSpec:
        for key, (absent, why) in _NOT_MODELLED.items():
            if self._keys.get(key) not in (None, absent):
                raise self._wrong(f"{key} is {self._keys[key]!r}: {why}, which is not modelled")
        num_layers, hidden = self._number("num_hidden_layers"), self._number("hidden_size")
        num_heads = self._number("num_attention_heads")
        method, is_quantized = self._quantization()
        experts = self._experts(num_layers, is_quantized)
        has_mlp = experts is None or experts.dense_layers
        window_tokens, window_layers = self._windows(num_layers)
        return ModelSpec(
            name=name,
            num_layers=num_layers,
            hidden=hidden,
            intermediate=self._number("intermediate_size", "ffn_dim") if has_mlp else 0,
            num_heads=num_heads,
            num_kv_heads=self._number("num_key_value_heads", default=num_heads),
            head_dim=self._number("head_dim", default=max(hidden // num_heads, 1)),
            vocab=self._number("vocab_size"),
            gated_mlp=self._keys.get("model_type") not in _UNGATED,
            tied_embeddings=bool(self._keys.get("tie_word_embeddings", False)),
            # mxfp4 is a format of experts' weights only.
            weight_bytes_per_value=is_quantized if method == "fp8" else 2.0,
            experts=experts,
            latent=self._latent(),
            window_tokens=window_tokens,
            window_layers=window_layers,
        )

    def _quantization(self) -> tuple[str | None, float]:
        """The method, and bytes of a value of quantized weights."""
        config = self._keys.get("quantization_config")
        if not config:
            return None, 2.0
        method = config.get("quant_method") if isinstance(config, dict) else config
        if method not in _WEIGHT_BYTES:
            raise self._wrong(
                f"quantization_config.quant_method is {method!r}; choose from "
                f"{choices(_WEIGHT_BYTES)}, or take the config of the model before quantization"
            )
        return method, _WEIGHT_BYTES[method]

    def _experts(self, num_layers: int, weight_bytes: float) -> Experts | None:
        if all(self._keys.get(key) in (None, 0, 1) for key in _EXPERT_KEYS):
            return None
        width = self._number("moe_intermediate_size", "intermediate_size")
        shared = self._number("shared_expert_intermediate_size", default=0)
        dense = self._number("first_k_dense_replace", default=0)
        step = self._number("decoder_sparse_step", "moe_layer_freq", default=1)
        dense += len(
            {
                layer
                for layer in range(dense, num_layers)
                if (layer + 1) % step or layer in self._keys.get("mlp_only_layers", ())
            }
        )
        number = self._number(*_EXPERT_KEYS)
        per_token = self._number("num_experts_per_tok", "experts_per_token")
        if not per_token <= number:
            raise self._wrong(f"{per_token} experts per token are more than all {number}")
        if dense >= num_layers:
            return None
        return Experts(
            number=number,
            per_token=per_token,
            intermediate=width,
            shared=shared or self._number("n_shared_experts", default=0) * width,
            dense_layers=dense,
            weight_bytes=weight_bytes,
        )

    def _latent(self) -> LatentAttention | None:
        if self._keys.get("kv_lora_rank") is None:
            return None
        return LatentAttention(
            rank=self._number("kv_lora_rank"),
            rope=self._number("qk_rope_head_dim"),
            nope=self._number("qk_nope_head_dim"),
            value=self._number("v_head_dim"),
            query_rank=self._number("q_lora_rank", default=0),
        )

    def _windows(self, num_layers: int) -> tuple[int, int]:
        """(tokens, layers with such a window)."""
        kinds = self._keys.get("layer_types")
        pattern = self._number("sliding_window_pattern", default=0)
        if kinds is None and pattern > 1:  # one layer of each `pattern` has none
            kinds = ["full_attention", *["sliding_attention"] * (pattern - 1)] * num_layers
        counted = list(kinds or ())[:num_layers]
        for kind in counted:
            if kind not in ("full_attention", "sliding_attention"):
                raise self._wrong(f"layer_types has {kind!r}, which is not modelled")
        num_sliding = counted.count("sliding_attention")
        return (self._number("sliding_window"), num_sliding) if num_sliding else (0, 0)

    def _number(self, *keys: str, default: int | None = None) -> int:
        """The value of the first of `keys` that is there."""
        for key in keys:
            value = self._keys.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self._wrong(f"{key} is {value!r}, not a whole number")
            if value == 0 and default is None:
                raise self._wrong(f"{key} is 0")
            return value
        if default is None:
            raise self._wrong(f"{' or '.join(keys)} is missing")
        return default

    def _wrong(self, text: str) -> ConfigError:
        return ConfigError(f"{self._path}: {text}")
