"""Small configurations of kinds of models, and weights for them."""

import torch

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DENSE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MIXTURE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
WINDOWS = {
    "model_type": "mellum",
    "architectures": ["MellumForCausalLM"],
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
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
INDEXED = {
    **LATENT,
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 64,
}
"""DeepSeek-V3.2: an indexer chooses what is attended to. Its kernels need a GPU."""
HYBRID = {
    **SIZES,
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 0,
}


def randomize(model):
    """Weights with which the next token depends on all before it. SGLang's are so small that it
    depends on the last one. In place of its `initialize_dummy_weights`."""
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.state_dict().items():
        scale = 2.0 if name.endswith(("A_log", "dt_bias")) else 0.15
        weight.normal_(0, scale, generator=generator)
