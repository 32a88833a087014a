"""``cosched demo-model``: a Llama model with random weights and a real tokenizer.

Serving, tests and the quick start need a model that no one has to download. Two sizes: ``tiny`` for
tests (ready in seconds) and ``demo``, heavy enough that a 512-token prefill takes some tens of
milliseconds on two CPU cores, so that scheduling decisions can be seen.

The weights are random, but not careless: attention is peaked, so the next token depends on the
whole prompt and a wrong KV cache shows; the logits are spread out, so greedy decoding has clear
winners; and the end-of-text tokens have no advantage, so replies run to ``max_tokens``. Requests
to the ``demo`` size that name no limit get 512 tokens, unless they have ``ignore_eos``.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from platformdirs import user_cache_path

from cosched.cli import new_app, run
from cosched.errors import ConfigError, choices
from cosched.files import DEMO_MODEL_STAMP
from cosched.lab.demo_corpus import demo_corpus
from cosched.wire import MAX_TOKENS_KEY

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

DTYPES = ("bfloat16", "float32")

_BOS, _END_OF_TEXT = "<|begin_of_text|>", "<|end_of_text|>"
_START_HEADER, _END_HEADER = "<|start_header_id|>", "<|end_header_id|>"
_EOT, _PAD = "<|eot_id|>", "<|pad|>"
# Their ids are their places in this tuple: the trainer numbers special tokens first.
_SPECIAL_TOKENS = (_BOS, _END_OF_TEXT, _START_HEADER, _END_HEADER, _EOT, _PAD)

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    f"{{{{ '{_START_HEADER}' + message['role'] + '{_END_HEADER}\\n\\n' }}}}"
    f"{{{{ message['content'] | trim + '{_EOT}' }}}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    f"{{{{ '{_START_HEADER}assistant{_END_HEADER}\\n\\n' }}}}"
    "{% endif %}"
)

# What a byte that is no character by itself decodes to.
_LONE_BYTE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModelSpec:
    """Shape of a demo model. Everything that decides its bytes, besides this package's code."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int  # of the tokenizer too: every token id has text
    default_dtype: str
    head_dim: int = 64  # what GPU attention kernels support
    max_position_embeddings: int = 32768
    rope_theta: float = 500_000.0
    default_max_tokens: int | None = None


SIZES = {
    "tiny": DemoModelSpec(
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        vocab_size=2048,
        default_dtype="float32",  # tests compare outputs token by token
    ),
    "demo": DemoModelSpec(
        hidden_size=256,
        intermediate_size=768,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=4096,
        default_dtype="bfloat16",  # four times as fast as float16 on a CPU with AVX-512
        # It rarely ends by itself: a client that names no limit would wait for the whole context.
        default_max_tokens=512,
    ),
}


def ensure_demo_model(
    *, size: str = "demo", dir: Path | None = None, seed: int = 0, dtype: str | None = None
) -> Path:
    """Return the folder of a demo model; make the model first if it does not exist.

    Several processes may call this at once: a model appears whole or not at all. SGLang serves a
    float32 model as float16 unless it gets ``--dtype float32``. ConfigError if `size` or `dtype` is
    unknown, or `dir` holds anything but this model.

    dir    default: a folder in the user's cache, named after what is in it
    dtype  default: that of the size
    """
    if size not in SIZES:
        raise ConfigError(f"unknown size {size!r}; choose from {choices(SIZES)}")
    dtype = SIZES[size].default_dtype if dtype is None else dtype
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; choose from {choices(DTYPES)}")
    stamp = _stamp(SIZES[size], seed=seed, dtype=dtype)
    target = (
        dir if dir is not None else user_cache_path("cosched") / f"{size}-{stamp['digest'][:12]}"
    )
    if _is_made(target, stamp):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is atomic within one file system only.
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        _write_model(temporary, SIZES[size], seed=seed, dtype=dtype)
        _write_json(temporary / DEMO_MODEL_STAMP, stamp)
        temporary.chmod(0o755)  # mkdtemp's 0700 would hide the model from other users
        try:
            temporary.rename(target)
        except OSError as error:
            # Another process may have been faster, which is as good.
            if not _is_made(target, stamp):
                raise ConfigError(
                    f"{target} exists and is not the {size} model with seed {seed} and dtype "
                    f"{dtype}; name another directory, or remove it"
                ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _stamp(spec: DemoModelSpec, *, seed: int, dtype: str) -> dict[str, Any]:
    """What was made, and a digest of it and of the code that makes it."""
    made = {"spec": asdict(spec), "seed": seed, "dtype": dtype}
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode())
    for source in ("demo_model.py", "demo_corpus.py"):
        digest.update(Path(__file__).with_name(source).read_bytes())
    return {**made, "digest": digest.hexdigest()}


def _is_made(target: Path, stamp: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((target / DEMO_MODEL_STAMP).read_text()) == stamp)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_model(target: Path, spec: DemoModelSpec, *, seed: int, dtype: str) -> None:
    from safetensors.torch import save_file

    tokenizer = _train_tokenizer(spec.vocab_size)
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    weights = dict(_weights(spec, tokenizer, seed=seed, dtype=dtype))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    for name, value in _config_files(spec, dtype=dtype).items():
        _write_json(target / name, value)


def _config_files(spec: DemoModelSpec, *, dtype: str) -> dict[str, dict[str, Any]]:
    ids = {token: index for index, token in enumerate(_SPECIAL_TOKENS)}
    token_ids = {
        "bos_token_id": ids[_BOS],
        "eos_token_id": [ids[_END_OF_TEXT], ids[_EOT]],
        "pad_token_id": ids[_PAD],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **token_ids,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS,
        "eos_token": _EOT,
        "pad_token": _PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_position_embeddings,
    }
    default_length = (
        {} if spec.default_max_tokens is None else {MAX_TOKENS_KEY: spec.default_max_tokens}
    )
    return {
        "config.json": config,
        "generation_config.json": token_ids | default_length,
        "tokenizer_config.json": tokenizer_config,
    }


def _train_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text in, the same text out.

    No BOS is added to plain prompts, so that prompts with nothing in common share no prefix.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(demo_corpus(), trainer)
    found = tokenizer.get_vocab_size()
    assert found == vocab_size, f"the corpus gave {found} tokens, {vocab_size=}"
    return tokenizer


def _weights(
    spec: DemoModelSpec, tokenizer: Tokenizer, *, seed: int, dtype: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in a fixed order; the random numbers depend on that order."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]

    def matrix(num_out: int, num_in: int, *, gain: float = 1.0) -> torch.Tensor:
        """Entries of standard deviation ``gain / sqrt(num_in)``: outputs as large as inputs."""
        # Uniform, not normal: rand() gives the same bits whatever vector instructions a CPU has.
        values = torch.rand((num_out, num_in), generator=generator) - 0.5
        return (values * (math.sqrt(12 / num_in) * gain)).to(kind)

    ones = torch.ones(spec.hidden_size, dtype=kind)
    num_q, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield (
        "model.embed_tokens.weight",
        matrix(spec.vocab_size, spec.hidden_size, gain=math.sqrt(spec.hidden_size)),
    )
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones.clone()
        # Scores of deviation 4: a few positions win, instead of an average that forgets them all.
        yield f"{prefix}.self_attn.q_proj.weight", matrix(num_q, spec.hidden_size, gain=2.0)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(num_kv, spec.hidden_size, gain=2.0)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(num_kv, spec.hidden_size)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(spec.hidden_size, num_q)
        yield f"{prefix}.post_attention_layernorm.weight", ones.clone()
        yield f"{prefix}.mlp.gate_proj.weight", matrix(spec.intermediate_size, spec.hidden_size)
        yield f"{prefix}.mlp.up_proj.weight", matrix(spec.intermediate_size, spec.hidden_size)
        yield f"{prefix}.mlp.down_proj.weight", matrix(spec.hidden_size, spec.intermediate_size)
    yield "model.norm.weight", ones.clone()
    # Logits of deviation 3: the best of some thousand is about e^10 times as likely as a zero one.
    head = matrix(spec.vocab_size, spec.hidden_size, gain=3.0)
    head[_token_ids_without_text(tokenizer)] = 0.0
    yield "lm_head.weight", head


def _token_ids_without_text(tokenizer: Tokenizer) -> list[int]:
    """Ids that must not be generated: special tokens, lone bytes of a character, control codes.

    A server holds streamed text back until a character is complete, so a reply made of lone bytes
    would look late to any measurement.
    """
    num_special = len(_SPECIAL_TOKENS)
    texts = ((index, tokenizer.decode([index])) for index in range(tokenizer.get_vocab_size()))
    return [
        index
        for index, text in texts
        if index < num_special or not text.replace("\n", " ").isprintable() or _LONE_BYTE in text
    ]


app = new_app("demo-model", "Make a small Llama model with random weights; print its folder.")
main = partial(run, "demo-model")

_SHAPES = "; ".join(
    f"{size}: {spec.num_layers} layers, hidden size {spec.hidden_size}, {spec.default_dtype}"
    for size, spec in sorted(SIZES.items())
)


@app.default
@dataclass(kw_only=True)
class DemoModel:
    size: Annotated[str, Parameter(choices=sorted(SIZES), help=_SHAPES)] = "demo"
    out: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """the folder; default: one in the user's cache"""
    seed: int = 0
    """seed of the random weights"""
    dtype: Annotated[str | None, Parameter(choices=DTYPES)] = None
    """default: the one named at --size"""

    def __call__(self) -> None:
        print(ensure_demo_model(size=self.size, dir=self.out, seed=self.seed, dtype=self.dtype))


if __name__ == "__main__":
    sys.exit(main())
