"""What the fields of a request may be: one bound for each, or the reason why there is none.

`TABLE` names every field of the structs in which SGLang carries a request. The bounds hold at three
places: at the HTTP door, for the lines of a batch, and where the scheduler receives a request.
Beyond them a value would end the scheduler (``top_k`` of 2^32 does not fit its tensor,
``top_logprobs_num`` above the vocabulary has no such logits) or stall it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from reprlib import Repr
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np

from cosched.errors import RequestError
from cosched.limits.grammars import (
    MOST_DEPTH,
    MOST_DOCUMENT_BYTES,
    MOST_ENTRIES,
    MOST_RULE_BYTES,
    grammar_fault,
)
from cosched.limits.patterns import MOST_PATTERN_BYTES, MOST_PATTERN_ITEMS, pattern_fault

INT64 = 2**63 - 1
INT32 = 2**31 - 1
WHOLE_VOCABULARY = 1 << 30
"""SGLang's ``top_k`` for no limit, beside -1."""

MOST_SAMPLES = 128
"""Sequences that one prompt may ask for, as with OpenAI. They are served in the order in which they
came: 1,024 of one online request kept all others waiting for 100 iterations and more."""

MOST_STOPS, MOST_STOP_CHARS = 32, 1024
MOST_NAME_CHARS = 1024
MOST_JSON_BYTES = 64 * 1024
MOST_BIASES = 1024
MOST_BIAS = 1e30
"""Far above any use, and far below what float32 holds: infinite logits have no probabilities."""

MOST_TEMPERATURE = 1e6

MOST_LOGPROBS = 1 << 22
"""Log probabilities of one answer: positions times those of each position."""

_repr = Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxlist = _repr.maxdict = 3
_repr.maxlevel = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What bounds depend on.

    chars_per_token   a text with more characters for each token of the context is refused before it
                      is tokenized
    max_input_tokens  of the longest prompt that fits the KV memory; None: as the context
    max_offline_tokens  of the longest offline prompt; None: as any other
    """

    vocab_size: int = INT32
    context_len: int = INT32
    hidden_size: int = INT32
    chars_per_token: int = 16
    max_input_tokens: int | None = None
    max_offline_tokens: int | None = None

    @property
    def max_chars(self) -> int:
        """Of one text."""
        return self.chars_per_token * self.context_len


ANY_MODEL = Scope()
"""Where the model is not known, the bounds that hold for all."""

Level = int | float | Callable[[Scope], int]


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    try:
        return _repr.repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of more than 4,300 digits"


def vocabulary(scope: Scope) -> int:
    return scope.vocab_size


def last_token(scope: Scope) -> int:
    return scope.vocab_size - 1


def half_vocabulary(scope: Scope) -> int:
    return min(MOST_SAMPLES, scope.vocab_size // 2)


def context(scope: Scope) -> int:
    return scope.context_len


def characters(scope: Scope) -> int:
    return scope.max_chars


def hidden(scope: Scope) -> int:
    return scope.hidden_size


_NAMES: Mapping[Callable[[Scope], int], str] = {
    vocabulary: "vocabulary size",
    last_token: "last token id",
    half_vocabulary: f"half the vocabulary, at most {MOST_SAMPLES}",
    context: "context length",
    characters: "as many as a text may have characters",
    hidden: "hidden size",
}


def _at(level: Level, scope: Scope) -> int | float:
    return level(scope) if callable(level) else level


def _named(level: Level) -> str:
    if callable(level):
        return _NAMES[level]
    powers: dict[int | float, str] = {
        2**63 - 1: "2^63-1",
        -(2**63): "-2^63",
        2**31 - 1: "2^31-1",
        -(2**31): "-2^31",
    }
    return powers.get(level) or (f"{level:g}" if isinstance(level, float) else f"{level:,}")


def _above(value: Any, level: Level, scope: Scope) -> str:
    limit = _at(level, scope)
    name = f" ({_named(level)})" if callable(level) else ""
    return f"{shown(value)} is above {limit:{'g' if isinstance(limit, float) else ''}}{name}"


class Bound(Protocol):
    """What one field may be."""

    def fault(self, value: Any, scope: Scope) -> str | None:
        """What is wrong with a value, which is not None; None: nothing."""

    def described(self) -> str:
        """For the table in docs/api.md."""


@dataclass(frozen=True, slots=True)
class Free:
    """No bound, and why."""

    reason: str

    def fault(self, value: Any, scope: Scope) -> str | None:
        return None

    def described(self) -> str:
        return f"none: {self.reason}"


@dataclass(frozen=True, slots=True)
class Flag:
    def fault(self, value: Any, scope: Scope) -> str | None:
        return None if isinstance(value, bool) else f"must be true or false, not {shown(value)}"

    def described(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[Any, ...]

    def fault(self, value: Any, scope: Scope) -> str | None:
        if isinstance(value, bool | int | str) and value in self.values:
            return None
        return f"must be one of {', '.join(map(str, self.values))}, not {shown(value)}"

    def described(self) -> str:
        return " or ".join(f"`{value}`".lower() for value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """is_above: `low` itself is no value. also: values outside that are taken too."""

    low: Level
    high: Level
    is_whole: bool = True
    is_above: bool = False
    also: tuple[int, ...] = ()

    def fault(self, value: Any, scope: Scope) -> str | None:
        kinds = (int,) if self.is_whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            kind = "a whole number" if self.is_whole else "a number"
            return f"must be {kind}, not {shown(value)}"
        if value in self.also:
            return None
        if isinstance(value, float) and math.isnan(value):
            return "must be a number, not NaN"
        low = _at(self.low, scope)
        if value < low or (self.is_above and value == low):
            return f"{shown(value)} is {'not above' if self.is_above else 'below'} {low}"
        return _above(value, self.high, scope) if value > _at(self.high, scope) else None

    def described(self) -> str:
        kind = "whole number" if self.is_whole else "number"
        start = "above " if self.is_above else ""
        also = "".join(f", or {_named(value)}" for value in self.also)
        return f"{kind}, {start}{_named(self.low)} to {_named(self.high)}{also}"


@dataclass(frozen=True, slots=True)
class Text:
    most_chars: int = MOST_NAME_CHARS

    def fault(self, value: Any, scope: Scope) -> str | None:
        if not isinstance(value, str):
            return f"must be a string, not {shown(value)}"
        if len(value) > self.most_chars:
            return f"{len(value)} characters are above {self.most_chars}"
        return None

    def described(self) -> str:
        return f"string, at most {self.most_chars:,} characters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A string, or a list of them."""

    most: int
    most_chars: int = MOST_NAME_CHARS

    def fault(self, value: Any, scope: Scope) -> str | None:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            return f"must be a string or a list of strings, not {shown(value)}"
        if len(texts) > self.most:
            return f"{len(texts)} strings are above {self.most}"
        faults = (Text(self.most_chars).fault(text, scope) for text in texts)
        return next(filter(None, faults), None)

    def described(self) -> str:
        return f"at most {self.most} strings of {self.most_chars:,} characters"


@dataclass(frozen=True, slots=True)
class Patterns:
    def fault(self, value: Any, scope: Scope) -> str | None:
        fault = Texts(most=MOST_STOPS).fault(value, scope)
        return fault or pattern_fault([value] if isinstance(value, str) else value)

    def described(self) -> str:
        return (
            f"at most {MOST_STOPS} patterns of {MOST_PATTERN_BYTES} bytes, and together "
            f"{MOST_PATTERN_ITEMS} characters and classes with repetitions written out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A list of whole numbers from 0 on."""

    most: Level
    high: Level
    depth: ClassVar[int] = 1

    def fault(self, value: Any, scope: Scope) -> str | None:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            return f"must be a list of whole numbers, not {shown(value)}"
        if isinstance(value, array):  # of integers; so the scheduler has the tokens of a prompt
            return self._range_fault(np.asarray(value), scope)
        values = list(value)
        wrong = next((each for each in values if type(each) is not int), None)
        if wrong is not None or None in values:
            return f"must be a list of whole numbers; {shown(wrong)} is none"
        return self._range_fault(values, scope)

    def _range_fault(self, values: Any, scope: Scope) -> str | None:
        most = _at(self.most, scope)
        if len(values) > most:
            return f"{len(values)} numbers are above {most}"
        if not len(values):
            return None
        is_array = isinstance(values, np.ndarray)
        lowest = int(values.min()) if is_array else min(values)
        highest = int(values.max()) if is_array else max(values)
        if lowest < 0:
            return f"{shown(lowest)} is below 0"
        return _above(highest, self.high, scope) if highest > _at(self.high, scope) else None

    def described(self) -> str:
        return f"at most {_named(self.most)} whole numbers, 0 to {_named(self.high)}"


@dataclass(frozen=True, slots=True)
class Vectors:
    """Embeddings in place of tokens."""

    depth: ClassVar[int] = 2

    def fault(self, value: Any, scope: Scope) -> str | None:
        if not isinstance(value, list) or not value:
            return "must be a list of vectors"
        if len(value) > scope.context_len:
            return f"{len(value)} vectors are above {scope.context_len} (context length)"
        for row in value:
            if not isinstance(row, list) or (
                scope.hidden_size != INT32 and len(row) != scope.hidden_size
            ):
                return f"each vector must have {scope.hidden_size} numbers (hidden size)"
            if not all(type(x) in (int, float) and abs(x) < MOST_BIAS for x in row):
                return "each number must be finite"
        return None

    def described(self) -> str:
        return "at most context length vectors of hidden size finite numbers"


@dataclass(frozen=True, slots=True)
class Biases:
    def fault(self, value: Any, scope: Scope) -> str | None:
        if not isinstance(value, Mapping):
            return f"must be an object, not {shown(value)}"
        if len(value) > MOST_BIASES:
            return f"{len(value)} entries are above {MOST_BIASES}"
        for token, bias in value.items():
            if not isinstance(token, str) or not (token.isascii() and token.isdigit()):
                return f"{shown(token)} is no token id"
            if len(token) > 10 or int(token) >= scope.vocab_size:
                return f"{shown(token)} is no token id; the model's are 0 to {last_token(scope)}"
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                return f"the bias of token {token} must be a number, not {shown(bias)}"
            if not -MOST_BIAS <= bias <= MOST_BIAS:
                return f"{shown(bias)} for token {token} is beyond {MOST_BIAS:g}"
        return None

    def described(self) -> str:
        return f"at most {MOST_BIASES:,} token ids of the vocabulary, each with at most 1e30"


@dataclass(frozen=True, slots=True)
class Grammar:
    name: str

    def fault(self, value: Any, scope: Scope) -> str | None:
        if not isinstance(value, str):
            return f"must be a string, not {shown(value)}"
        return grammar_fault(self.name, value) if value else None

    def described(self) -> str:
        if self.name in ("regex", "ebnf"):
            return f"at most {MOST_RULE_BYTES:,} bytes"
        return f"at most {MOST_DOCUMENT_BYTES:,} bytes, {MOST_ENTRIES:,} enum entries"


@dataclass(frozen=True, slots=True)
class Json:
    """An object or a list, as JSON."""

    most_bytes: int = MOST_JSON_BYTES

    def fault(self, value: Any, scope: Scope) -> str | None:
        if not isinstance(value, dict | list):
            return f"must be an object or a list, not {shown(value)}"
        if _depth(value) > MOST_DEPTH:
            return f"nested more than {MOST_DEPTH} levels deep"
        try:
            num_bytes = len(msgspec.json.encode(value))
        except (TypeError, ValueError, OverflowError) as error:
            return f"is not JSON: {error}"
        return (
            f"{num_bytes} bytes are above {self.most_bytes}"
            if num_bytes > self.most_bytes
            else None
        )

    def described(self) -> str:
        return f"JSON, at most {self.most_bytes:,} bytes and {MOST_DEPTH} levels"


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted up to one more than is allowed."""
    level = [value]
    for depth in range(MOST_DEPTH + 1):
        inner = [
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)
        ]
        if not inner:
            return depth
        level = [each for values in inner for each in values]
    return MOST_DEPTH + 1


INTERNAL = Free("internal, set by SGLang; refused from a client")
_MEDIA = Free("loaded by SGLang's processor; the body is bounded")
_MADE = Free("made by SGLang's processor or tokenizer")
_NAME = Text()
_PRIORITY = Number(low=-INT64 - 1, high=INT64)
_POSITIONS = Numbers(most=context, high=context)
_RANK = Number(low=0, high=65_535)
_PATCHES = Number(low=0, high=1024)

_SAMPLING: Mapping[str, Bound] = {
    "max_new_tokens": Number(low=0, high=INT32),
    "min_new_tokens": Number(low=0, high=INT32),
    "stop": Texts(most=MOST_STOPS, most_chars=MOST_STOP_CHARS),
    "stop_token_ids": Numbers(most=1024, high=last_token),
    "stop_regex": Patterns(),
    "temperature": Number(low=0, high=MOST_TEMPERATURE, is_whole=False),
    "top_p": Number(low=0, high=1, is_whole=False, is_above=True),
    "top_k": Number(low=1, high=vocabulary, also=(-1, WHOLE_VOCABULARY)),
    "min_p": Number(low=0, high=1, is_whole=False),
    "frequency_penalty": Number(low=-2, high=2, is_whole=False),
    "presence_penalty": Number(low=-2, high=2, is_whole=False),
    "repetition_penalty": Number(low=0, high=2, is_whole=False, is_above=True),
    "n": Number(low=1, high=MOST_SAMPLES),
    "beam_width": Number(low=1, high=half_vocabulary),
    "json_schema": Grammar("json_schema"),
    "regex": Grammar("regex"),
    "ebnf": Grammar("ebnf"),
    "structural_tag": Grammar("structural_tag"),
    "ignore_eos": Flag(),
    "skip_special_tokens": Flag(),
    "spaces_between_special_tokens": Flag(),
    "no_stop_trim": Flag(),
    "stream_interval": Number(low=1, high=INT32),
    "logit_bias": Biases(),
    "sampling_seed": Number(low=-INT64 - 1, high=INT64),
    "custom_params": Json(),
    "watermark": Free("three typed fields, each checked by SGLang"),
    "stop_strs": Texts(most=MOST_STOPS, most_chars=MOST_STOP_CHARS),
    "stop_regex_strs": Patterns(),
    "stop_str_max_len": Number(low=0, high=INT32),
    "stop_regex_max_len": Number(low=0, high=INT64),
    "is_normalized": Flag(),
    "ebnf_full_assistant": Flag(),
}

_SESSION: Mapping[str, Bound] = {
    "id": _NAME,
    "rid": _NAME,
    "offset": Number(low=-INT32, high=INT32),
    "replace": Flag(),
    "drop_previous_output": Flag(),
}

_GENERATE: Mapping[str, Bound] = {
    "rid": _NAME,
    "http_worker_ipc": INTERNAL,
    "input_text": Free("tokenized already"),
    "input_ids": Numbers(most=characters, high=last_token),
    "input_embeds": Vectors(),
    "mm_inputs": _MADE,
    "token_type_ids": _MADE,
    "sampling_params": Free("a struct of its own"),
    "return_logprob": Flag(),
    "logprob_start_len": Number(low=-1, high=context),
    "top_logprobs_num": Number(low=0, high=vocabulary),
    "token_ids_logprob": Numbers(most=vocabulary, high=last_token),
    "stream": Flag(),
    "return_sampling_mask": Flag(),
    "return_flat_raw_top_logprobs": Flag(),
    "return_hidden_states": OneOf((False, True, "last")),
    "return_routed_experts": Flag(),
    "routed_experts_start_len": Number(low=0, high=context),
    "return_indexer_topk": Flag(),
    "session_id": _NAME,
    "session_params": Free("a struct of its own"),
    "lora_id": INTERNAL,
    "custom_logit_processor": Text(MOST_JSON_BYTES),
    "positional_embed_overrides": INTERNAL,
    "bootstrap_host": _NAME,
    "bootstrap_port": Number(low=0, high=65_535),
    "bootstrap_room": Number(low=0, high=INT64),
    "bootstrap_pair_key": _NAME,
    "decode_tp_size": Number(low=0, high=65_535),
    "routed_dp_rank": _RANK,
    "disagg_prefill_dp_rank": _RANK,
    "routing_key": _NAME,
    "require_reasoning": Flag(),
    "priority": _PRIORITY,
    "extra_key": _NAME,
    "no_logs": Flag(),
    "return_bytes": Flag(),
    "return_entropy": Flag(),
    "need_wait_for_mm_inputs": Flag(),
    "num_items_assigned": INTERNAL,
    "encoder_urls": INTERNAL,
    "multi_item_delimiter_indices": _POSITIONS,
    "token_indices_to_pool": _POSITIONS,
    "time_stats": INTERNAL,
    "cache_salt": _NAME,
    "kv_hints": Free("read by SGLang into a struct of its own"),
    "pp_prefetch_ticketed": INTERNAL,
    "sampling_logprobs_mode": OneOf(("selected", "support")),
    "lora_name": _NAME,
}

_INPUT: Mapping[str, Bound] = {
    **{
        name: bound
        for name, bound in _GENERATE.items()
        if name
        not in (
            "input_text",
            "mm_inputs",
            "token_type_ids",
            "time_stats",
            "pp_prefetch_ticketed",
            "lora_name",
        )
    },
    "text": Free("as a text, at most context length times `limits.chars_per_token` characters"),
    "image_data": _MEDIA,
    "video_data": _MEDIA,
    "audio_data": _MEDIA,
    "mm_hashes": Json(),
    "mm_content_hashes": Json(),
    "use_audio_in_video": Flag(),
    "video_config": Json(),
    "watermark": _SAMPLING["watermark"],
    "return_text_in_logprobs": Flag(),
    "return_flat_raw_output_top_logprobs": Flag(),
    "return_flat_raw_top_logprobs_b64": Flag(),
    "log_metrics": Flag(),
    "modalities": Json(),
    "lora_path": _NAME,
    "data_parallel_rank": _RANK,
    "conversation_id": _NAME,
    "background": Flag(),
    "max_thinking_tokens": Number(low=0, high=INT32),
    "custom_labels": Json(),
    "return_prompt_token_ids": Flag(),
    "external_trace_header": Json(),
    "received_time": Number(low=0, high=1e12, is_whole=False),
    "num_items_assigned": Json(),
    "encoder_urls": Json(),
    "kv_hints": Json(),
    "max_dynamic_patch": _PATCHES,
    "min_dynamic_patch": _PATCHES,
    "image_max_dynamic_patch": _PATCHES,
    "video_max_dynamic_patch": _PATCHES,
    "images_config": Json(),
    "mm_processor_kwargs": Json(),
}

_EMBED: Mapping[str, Bound] = {
    **{
        name: _GENERATE[name]
        for name in (
            "rid",
            "http_worker_ipc",
            "input_text",
            "input_ids",
            "mm_inputs",
            "token_type_ids",
            "sampling_params",
            "lora_id",
            "positional_embed_overrides",
            "routed_dp_rank",
            "priority",
            "multi_item_delimiter_indices",
            "token_indices_to_pool",
            "time_stats",
            "lora_name",
        )
    },
    "dimensions": Number(low=1, high=hidden),
    "return_pooled_hidden_states": Flag(),
    "decision_layout": Numbers(most=context, high=context),
}

_EMBED_INPUT: Mapping[str, Bound] = {
    **{
        name: _INPUT[name]
        for name in (
            "rid",
            "text",
            "input_ids",
            "input_embeds",
            "image_data",
            "video_data",
            "audio_data",
            "sampling_params",
            "log_metrics",
            "modalities",
            "lora_path",
            "lora_id",
            "positional_embed_overrides",
            "routing_key",
            "http_worker_ipc",
            "background",
            "priority",
            "return_prompt_token_ids",
            "external_trace_header",
            "received_time",
            "multi_item_delimiter_indices",
            "token_indices_to_pool",
        )
    },
    "dimensions": _EMBED["dimensions"],
    "return_pooled_hidden_states": Flag(),
    "decision_layout": _EMBED["decision_layout"],
    "embed_override_token_id": Number(low=0, high=last_token),
    "embed_overrides": INTERNAL,
    "is_cross_encoder_request": Flag(),
}

TABLE: Mapping[str, Mapping[str, Bound]] = {
    "SamplingParams": _SAMPLING,
    "SessionParams": _SESSION,
    "GenerateReqInput": _INPUT,
    "EmbeddingReqInput": _EMBED_INPUT,
    "TokenizedGenerateReqInput": _GENERATE,
    "TokenizedEmbeddingReqInput": _EMBED,
}
"""SGLang's struct -> field -> what it may be."""


def check_field(
    name: str, value: Any, bound: Bound, scope: Scope, *, of_batch: bool = False
) -> None:
    """RequestError that names the field, the value and the limit. None is always within.

    of_batch  the value may be a list with one for each prompt
    """
    for each in _each(value, bound) if of_batch else (value,):
        fault = None if each is None else bound.fault(each, scope)
        if fault is not None:
            raise RequestError(name, fault)


def check_fields(
    struct: str,
    values: Mapping[str, Any],
    scope: Scope,
    *,
    prefix: str = "",
    of_batch: bool = False,
) -> None:
    """`check_field` for all fields of a struct. What is no field is left to SGLang."""
    for name, bound in TABLE[struct].items():
        value = values.get(name)
        if value is not None and not isinstance(bound, Free):
            check_field(prefix + name, value, bound, scope, of_batch=of_batch)


def _each(value: Any, bound: Bound) -> Iterator[Any]:
    """The values of single prompts in a field of one prompt or several."""
    if not isinstance(value, list) or isinstance(bound, Json | Patterns | Texts):
        yield value
        return
    inner: Any = value
    for _ in range(bound.depth if isinstance(bound, Numbers | Vectors) else 0):
        inner = inner[0] if isinstance(inner, list) and inner else None
    if isinstance(inner, list):
        yield from value
    else:
        yield value


def check_text(name: str, num_chars: int, scope: Scope) -> None:
    """RequestError for a text that is longer than any that fits the context."""
    if num_chars > scope.max_chars:
        raise RequestError(
            name,
            f"{num_chars} characters are above {scope.max_chars}, {scope.chars_per_token} for each "
            f"of {scope.context_len} tokens (context length)",
        )


def table_rows(struct: str) -> Sequence[tuple[str, str]]:
    """Field and bound as they stand in docs/api.md."""
    return [(f"`{name}`", bound.described()) for name, bound in TABLE[struct].items()]
