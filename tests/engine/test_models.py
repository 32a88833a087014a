"""Kinds of models beside plain ones: tiny configurations with random weights, served for real."""

import json

import pytest
import torch

from tests.engine.test_speculative import prompts, submit

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
WINDOWS = {
    "model_type": "mellum",
    "architectures": ["MellumForCausalLM"],
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LATENT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
"""DeepSeek-V3 and Kimi-K2 are of this type."""
ONE_POOL = ("--disable-hybrid-swa-memory",)


def randomize(model):
    """Weights with which the next token depends on all before it. SGLang's are so small that it
    depends on the last one."""
    generator = torch.Generator().manual_seed(7)
    for weight in model.state_dict().values():
        weight.normal_(0, 0.15, generator=generator)


@pytest.mark.parametrize(
    ("model", "switches"),
    [
        pytest.param(MIXTURE, (), id="mixture of experts"),
        pytest.param(WINDOWS, ONE_POOL, id="sliding windows in one pool"),
        pytest.param(LATENT, (), id="latent attention"),
    ],
)
def test_the_same_tokens_as_stock(
    make_engine, forget_experts, monkeypatch, tmp_path, model, switches
):
    monkeypatch.setattr("sglang.srt.model_loader.loader.initialize_dummy_weights", randomize)
    (tmp_path / "config.json").write_text(json.dumps(SIZES | model))
    served = {"model_path": tmp_path, "load_format": "dummy"}
    texts = prompts(16)
    stock = make_engine(policy="sglang", mixed=False, switches=switches, **served)
    expected = submit(stock, texts)
    assert len({tuple(ids) for ids in expected.values()}) == len(texts)
    forget_experts()
    engine = make_engine(policy="cosched", switches=switches, max_total_tokens=700, **served)
    assert submit(engine, texts) == expected
    assert engine.scheduler.cosched.kv is not None
