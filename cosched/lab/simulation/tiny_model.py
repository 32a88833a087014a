"""The model that a simulated scheduler loads: one tiny layer, no weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cosched.engine.identity import STANDS_FOR
from cosched.lab.simulation import windows
from cosched.lab.simulation.arrivals import VOCAB_SIZE
from cosched.predict.profile_file import EngineIdentity

EOS_ID = 2


STATES = "--max-mamba-cache-size"
"""The flag of a model with state slots."""

DP_ATTENTION = "--attn-dp-size"
"""SGLang wants a mixture of experts with it."""

_MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
}

_STATES = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 0,
}
"""One of its layers keeps a state."""


def write_model_config(
    folder: Path,
    identity: EngineIdentity | None,
    flags: Sequence[str] = (),
    *,
    window_tokens: int = 0,
) -> None:
    """A one-layer model without weights (SGLang fills them with ``--load-format dummy``), or one of
    two layers where `flags` ask for state slots. window_tokens: of a second layer, with sliding
    windows; 0: there is none."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **windows.config_of(window_tokens),
    }
    if DP_ATTENTION in flags:
        config |= _MIXTURE
    if STATES in flags:
        config |= _STATES
    if identity is not None:
        config[STANDS_FOR] = asdict(identity)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def draft_model_flags(folder: str, flags: Sequence[str]) -> Sequence[str]:
    """The draft model where `flags` ask for speculative decoding: SGLang wants one to be named; it
    is not loaded."""
    if "--speculative-algorithm" not in flags:
        return ()
    return ("--speculative-draft-model-path", folder)
