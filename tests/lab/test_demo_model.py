"""The demo model: reproducible, servable, and fit to show mistakes in scheduling."""

from __future__ import annotations

import hashlib
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cosched.bootstrap  # noqa: F401  # before transformers: it imports torchvision
from cosched.errors import ConfigError
from cosched.lab.demo_model import SIZES, ensure_demo_model, main


def digests(model: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in model.iterdir()
        if path.suffix in {".safetensors", ".json", ".jinja"}
    }


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def test_another_seed_changes_the_weights_and_nothing_else(tiny_model, tmp_path):
    first = digests(tiny_model)
    other = digests(ensure_demo_model(size="tiny", dir=tmp_path / "other", seed=1, dtype="float32"))
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {"model.safetensors", "cosched_demo_model.json"}


@pytest.mark.long
def test_processes_that_race_all_get_the_whole_model_with_the_same_bytes(tiny_model, tmp_path):
    target = tmp_path / "raced"
    context = multiprocessing.get_context("spawn")
    arguments = ["--size", "tiny", "--out", str(target)]
    processes = [context.Process(target=main, args=(arguments,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert digests(target) == digests(tiny_model)
    assert [path.name for path in tmp_path.iterdir()] == ["raced"]  # nothing left behind


def test_a_directory_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(ConfigError, match="exists and is not the tiny model with seed 0"):
        ensure_demo_model(size="tiny", dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "huge"}, "unknown size 'huge'; choose from demo, tiny"),
        ({"dtype": "int4"}, "unknown dtype 'int4'; choose from bfloat16, float32"),
    ],
)
def test_errors_name_the_value_and_the_choices(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ensure_demo_model(**arguments)


@given(text=st.text())
def test_tokenizer_gives_any_text_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_chat_template_renders_roles_and_the_generation_prompt(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello! "},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin_of_text|>"
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|eot_id|>")) == 2


@pytest.mark.parametrize("size", sorted(SIZES))
def test_config_says_what_sglang_needs(size):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    model = ensure_demo_model(size=size)
    config = AutoConfig.from_pretrained(model)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.max_position_embeddings >= 32768
    assert config.rope_parameters["rope_theta"] == SIZES[size].rope_theta
    assert config.num_key_value_heads % 2 == 0  # so that two tensor-parallel ranks can share
    assert str(config.dtype).endswith(SIZES[size].default_dtype)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == config.vocab_size
    ends = {tokenizer.convert_tokens_to_ids(t) for t in ("<|end_of_text|>", "<|eot_id|>")}
    assert set(config.eos_token_id) == ends
    assert set(GenerationConfig.from_pretrained(model).eos_token_id) == ends
    assert tokenizer.eos_token_id in ends


def test_one_early_token_changes_the_reply(tiny_model):
    """Otherwise a test that compares outputs could not see a wrong KV cache."""
    import torch
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(6, SIZES["tiny"].vocab_size, (8, 120), generator=generator)
    others = prompts.clone()
    others[:, 20] = 6 + prompts[:, 20] % 1000
    ids = torch.cat([prompts, others])
    with torch.inference_mode():
        mask = torch.ones_like(ids)
        output = llama.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    replies = output[:, prompts.shape[1] :].tolist()
    changed = sum(a != b for a, b in zip(replies[:8], replies[8:], strict=True))
    assert changed >= 6
