"""A model by its config.json: sizes as published, and what an iteration reads and computes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Annotated

import pytest
from cyclopts import Parameter

from cosched.cli import parse
from cosched.core.batch import BatchShape, Prefill
from cosched.errors import ConfigError
from cosched.lab.cost_models.kernel_table import KernelTableModel
from cosched.lab.cost_models.model_config import read_model_config
from cosched.lab.cost_models.roofline import RooflineModel
from cosched.lab.cost_models.sglang_defaults import kv_capacity_tokens
from cosched.lab.cost_models.specs import GPUS, MODELS, Experts
from cosched.lab.simulation.options import MachineOptions, machine_of
from tests.lab.cost_models.synthetic import GPU, MODEL


@dataclass(kw_only=True)
class Options:
    machine: Annotated[MachineOptions, Parameter(name="*")] = field(default_factory=MachineOptions)


def config(layers, hidden, heads, kv_heads, vocab, **keys):
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    } | keys


# As published by Meta, Qwen, OpenAI, Mistral and DeepSeek.
LLAMA_8B = config(32, 4096, 32, 8, 128256, intermediate_size=14336)
LLAMA_70B = config(80, 8192, 64, 8, 128256, intermediate_size=28672)
QWEN_30B_A3B = config(
    *(48, 2048, 32, 4, 151936),
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
GPT_OSS_120B = config(
    *(36, 2880, 64, 8, 201088),
    head_dim=64,
    intermediate_size=2880,
    num_local_experts=128,
    num_experts_per_tok=4,
    layer_types=["sliding_attention", "full_attention"] * 18,
    sliding_window=128,
    quantization_config={"quant_method": "mxfp4"},
)
MIXTRAL = config(
    *(32, 4096, 32, 8, 32000),
    intermediate_size=14336,
    num_local_experts=8,
    num_experts_per_tok=2,
)
DEEPSEEK_V3 = config(
    *(61, 7168, 128, 128, 129280),
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    moe_layer_freq=1,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    quantization_config={"quant_method": "fp8"},
)


@pytest.fixture
def read(tmp_path):
    def from_keys(keys, name="model"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(keys))
        return read_model_config(path)

    return from_keys


def test_a_dense_model_is_the_same_as_by_its_name(read):
    for keys, name in ((LLAMA_8B, "Llama-3.1-8B"), (LLAMA_70B, "Llama-3-70B")):
        assert read(keys, name) == MODELS[name]


@pytest.mark.parametrize(
    ("keys", "num_bytes"),
    [
        (LLAMA_8B, 16.06e9),
        (LLAMA_70B, 141.1e9),
        (QWEN_30B_A3B, 61.1e9),
        (GPT_OSS_120B, 65.2e9),
        (MIXTRAL, 93.4e9),
        (DEEPSEEK_V3, 671e9 + 1.85e9),  # one byte of each; embedding and lm_head have two
    ],
    ids=["8b", "70b", "qwen3-moe", "gpt-oss", "mixtral", "deepseek-v3"],
)
def test_the_weights_have_the_published_size(read, keys, num_bytes):
    assert read(keys).weight_bytes() == pytest.approx(num_bytes, rel=0.01)


def test_a_vision_model_is_its_text_part_and_a_folder_gives_the_name(tmp_path):
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vision": {}, "text_config": LLAMA_8B}))
    assert read_model_config(folder) == MODELS["Llama-3.1-8B"]


@pytest.mark.parametrize("key", [key for key in DEEPSEEK_V3 if key not in (
    "num_key_value_heads", "q_lora_rank", "n_shared_experts", "moe_layer_freq", "kv_lora_rank",
    "first_k_dense_replace", "quantization_config", "n_routed_experts", "moe_intermediate_size",
)])  # fmt: skip
def test_a_missing_key_is_named(read, key):
    without = {name: value for name, value in DEEPSEEK_V3.items() if name != key}
    with pytest.raises(ConfigError, match=rf"model\.json: .*{key}.* is missing"):
        read(without)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": "4096"}, "hidden_size is '4096', not a whole number"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True: it has an encoder"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types has 'linear_attention'"),
        ({"quantization_config": {"quant_method": "awq"}}, "is 'awq'; choose from fp8, mxfp4"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "8 experts per token are more than all 4"),
        ({"interleave_moe_layer_step": 2}, "with and without experts alternate"),
    ],
)
def test_what_cannot_be_read_is_named(read, keys, message):
    with pytest.raises(ConfigError, match=message):
        read(LLAMA_8B | keys)


def test_files_that_are_none_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nothing"):
        read_model_config(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_model_config(tmp_path)


def test_a_batch_reads_the_experts_that_its_tokens_choose():
    experts = Experts(number=128, per_token=8, intermediate=768)
    assert experts.distinct(1) == pytest.approx(8)
    assert experts.distinct(2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert experts.distinct(4096) == pytest.approx(128)


def test_one_token_takes_the_time_of_its_active_weights_and_many_that_of_all(read):
    """With all experts chosen the model is the dense one of that width."""
    spec = read(QWEN_30B_A3B)
    model = RooflineModel(model=spec, gpu=GPUS["H100"])
    active = 3.3e9 - 151936 * 2048  # published; the embedding is not read
    rate = 3.35e12 * 0.72
    one = model.iteration_s(BatchShape(decodes=[1]))
    floors = 48 * (1e-5 + 1e-5 + 3 * 3e-6) + 25e-6 + 0.5e-3
    assert one == pytest.approx(2 * active / rate + floors, rel=0.25)
    assert model.iteration_s(BatchShape(decodes=[1] * 256)) > spec.weight_bytes() / rate * 0.98
    all_chosen = Experts(number=4, per_token=4, intermediate=1024)
    dense = replace(MODEL, intermediate=4096)
    chosen = replace(dense, experts=all_chosen)
    for batch in (BatchShape(decodes=[1] * 40), BatchShape(prefills=[Prefill(4000, 0)])):
        by_name = (RooflineModel(model=one, gpu=GPU).iteration_s(batch) for one in (chosen, dense))
        assert next(by_name) == pytest.approx(next(by_name), rel=0.1)


def test_kernel_tables_take_experts_as_one_wide_product(table_dir):
    dense = replace(MODEL, intermediate=4096)
    chosen = replace(dense, experts=Experts(number=4, per_token=4, intermediate=1024))
    few = replace(dense, experts=Experts(number=64, per_token=4, intermediate=1024))
    times = {
        name: [
            KernelTableModel(model=spec, gpu=GPU, data_dir=table_dir).iteration_s(batch)
            for batch in (BatchShape(decodes=[9] * 2), BatchShape(prefills=[Prefill(8000, 0)]))
        ]
        for name, spec in (("dense", dense), ("chosen", chosen), ("few", few))
    }
    assert times["chosen"] == pytest.approx(times["dense"], rel=0.1)
    assert times["few"][1] < 1.5 * times["dense"][1], "it computes as much per token"
    assert times["few"][0] > 1.2 * times["dense"][0], "two tokens read twice as many experts"


def test_quantized_weights_are_read_faster_and_computed_as_before(table_dir):
    def times(bytes_):
        spec = replace(MODEL, weight_bytes_per_value=bytes_)
        model = KernelTableModel(model=spec, gpu=GPU, data_dir=table_dir)
        return [
            model.iteration_s(batch)
            for batch in (BatchShape(decodes=[9]), BatchShape(prefills=[Prefill(8000, 0)]))
        ]

    whole, half = times(2.0), times(1.0)
    assert half[0] < 0.8 * whole[0] and half[1] == pytest.approx(whole[1], rel=0.02)


def test_latent_attention_caches_one_vector_and_has_no_tables(read, table_dir):
    spec = read(DEEPSEEK_V3)
    assert spec.kv_bytes_per_token(1) == spec.kv_bytes_per_token(8) == 61 * 576 * 2
    with pytest.raises(ConfigError, match="latent attention, of which there is no table"):
        KernelTableModel(model=spec, gpu=GPU, data_dir=table_dir, tp=8)
    decodes = BatchShape(decodes=[4000] * 32)
    times = [
        RooflineModel(model=spec, gpu=GPUS["H200"], tp=tp).iteration_s(decodes) for tp in (4, 8)
    ]
    assert times[1] < times[0]


def test_tp_divides_heads_and_every_width(read):
    spec = read(QWEN_30B_A3B)
    spec.check_tp(4)
    with pytest.raises(ConfigError, match="32 heads and MLP width 768: tp must divide both"):
        spec.check_tp(5)


def test_layers_with_windows_need_less_kv(read):
    spec = read(GPT_OSS_120B)
    assert (spec.window_tokens, spec.window_layers) == (128, 18)
    full = replace(spec, window_layers=0)
    ratio = kv_capacity_tokens(spec, GPUS["H100"]) / kv_capacity_tokens(full, GPUS["H100"])
    assert ratio == pytest.approx(1 / (0.5 + 0.5 * 0.8), rel=1e-3)


def test_the_option_makes_the_machine(tmp_path):
    path = tmp_path / "gpt-oss-120b.json"
    path.write_text(json.dumps(GPT_OSS_120B))
    words = ["--model-config", str(path), "--gpu", "H100", "--tp", "2"]
    machine = machine_of(parse(Options, words).machine)
    assert machine.served == read_model_config(path)
    assert machine.window == (128, 0.5)
    described = machine.describe()
    assert described["model"] == "gpt-oss-120b"
    assert described["model_config"]["experts"]["number"] == 128
    assert json.dumps(described)
    with pytest.raises(ConfigError, match=r"--model-config.*hidden_size is missing"):
        path.write_text('{"num_hidden_layers": 2}')
        parse(Options, words)
