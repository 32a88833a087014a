"""Kinds of models beside plain ones: tiny configurations with random weights, served for real."""

import json

import pytest

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
ONE_POOL = ("--disable-hybrid-swa-memory",)


@pytest.mark.parametrize(
    ("model", "switches"),
    [
        pytest.param(MIXTURE, (), id="mixture of experts"),
        pytest.param(WINDOWS, ONE_POOL, id="sliding windows in one pool"),
    ],
)
def test_the_same_tokens_as_stock(make_engine, forget_experts, tmp_path, model, switches):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | model))
    served = {"model_path": tmp_path, "load_format": "dummy"}
    texts = prompts(16)
    stock = make_engine(policy="sglang", mixed=False, switches=switches, **served)
    expected = submit(stock, texts)
    forget_experts()
    engine = make_engine(policy="cosched", switches=switches, max_total_tokens=700, **served)
    assert submit(engine, texts) == expected
    assert engine.scheduler.cosched.kv is not None
