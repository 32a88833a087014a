"""Bounds of request fields: `TABLE` has one for each field, or the reason why there is none.

It covers every field of SGLang's request structs. The bounds are checked by the HTTP server, for
the lines of a batch, and where the scheduler receives a request. A value beyond them would end the
scheduler (``top_k`` of 2^32 does not fit its tensor, ``top_logprobs_num`` above the vocabulary has
no logits) or stall it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cosched.errors import RequestError
from cosched.limits.bounds import (
    INT32,
    INT64,
    MOST_JSON_BYTES,
    MOST_SAMPLES,
    MOST_STOP_CHARS,
    MOST_STOPS,
    MOST_TEMPERATURE,
    WHOLE_VOCABULARY,
    Biases,
    Bound,
    Flag,
    Free,
    Grammar,
    Json,
    Number,
    Numbers,
    OneOf,
    Patterns,
    Scope,
    Text,
    Texts,
    Vectors,
    characters,
    context,
    half_vocabulary,
    hidden,
    last_token,
    vocabulary,
)


def _fields(*groups: tuple[Bound, str]) -> dict[str, Bound]:
    return {name: bound for bound, names in groups for name in names.split()}


INTERNAL = Free("internal, set by SGLang; refused from a client")
_UP_TO_INT32 = Number(low=0, high=INT32)
_UP_TO_UINT16 = Number(low=0, high=65_535)
_ANY_INT64 = Number(low=-INT64 - 1, high=INT64)
_POSITIONS = Numbers(most=context, high=context)

_SAMPLING = _fields(
    (_UP_TO_INT32, "max_new_tokens min_new_tokens stop_str_max_len"),
    (Texts(most=MOST_STOPS, most_chars=MOST_STOP_CHARS), "stop stop_strs"),
    (Numbers(most=1024, high=last_token), "stop_token_ids"),
    (Patterns(), "stop_regex stop_regex_strs"),
    (Number(low=0, high=MOST_TEMPERATURE, is_whole=False), "temperature"),
    (Number(low=0, high=1, is_whole=False, is_above=True), "top_p"),
    (Number(low=1, high=vocabulary, also=(-1, WHOLE_VOCABULARY)), "top_k"),
    (Number(low=0, high=1, is_whole=False), "min_p"),
    (Number(low=-2, high=2, is_whole=False), "frequency_penalty presence_penalty"),
    (Number(low=0, high=2, is_whole=False, is_above=True), "repetition_penalty"),
    (Number(low=1, high=MOST_SAMPLES), "n"),
    (Number(low=1, high=half_vocabulary), "beam_width"),
    (Grammar("json_schema"), "json_schema"),
    (Grammar("structural_tag"), "structural_tag"),
    (Grammar("regex"), "regex"),
    (Grammar("ebnf"), "ebnf"),
    (Flag(), "ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim"),
    (Flag(), "is_normalized ebnf_full_assistant"),
    (Number(low=1, high=INT32), "stream_interval"),
    (Biases(), "logit_bias"),
    (_ANY_INT64, "sampling_seed"),
    (Json(), "custom_params"),
    (Free("three typed fields, each checked by SGLang"), "watermark"),
    (Number(low=0, high=INT64), "stop_regex_max_len"),
)

_REQUEST = _fields(
    (Text(), "rid session_id bootstrap_host bootstrap_pair_key routing_key extra_key cache_salt"),
    (Text(), "lora_name lora_path conversation_id id"),
    (INTERNAL, "http_worker_ipc lora_id positional_embed_overrides embed_overrides time_stats"),
    (INTERNAL, "pp_prefetch_ticketed"),
    (Free("tokenized already"), "input_text"),
    (Free("made by SGLang's processor or tokenizer"), "mm_inputs token_type_ids"),
    (Numbers(most=characters, high=last_token), "input_ids"),
    (Vectors(), "input_embeds"),
    (Free("a struct of its own"), "sampling_params session_params"),
    (Flag(), "return_logprob stream return_sampling_mask return_flat_raw_top_logprobs"),
    (Flag(), "return_routed_experts return_indexer_topk require_reasoning no_logs return_bytes"),
    (Flag(), "return_entropy need_wait_for_mm_inputs use_audio_in_video return_text_in_logprobs"),
    (Flag(), "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 log_metrics"),
    (Flag(), "background return_prompt_token_ids return_pooled_hidden_states replace"),
    (Flag(), "is_cross_encoder_request drop_previous_output"),
    (Number(low=-1, high=context), "logprob_start_len"),
    (Number(low=0, high=vocabulary), "top_logprobs_num"),
    (Numbers(most=vocabulary, high=last_token), "token_ids_logprob"),
    (OneOf((False, True, "last")), "return_hidden_states"),
    (Number(low=0, high=context), "routed_experts_start_len"),
    (Text(MOST_JSON_BYTES), "custom_logit_processor"),
    (_UP_TO_UINT16, "bootstrap_port decode_tp_size routed_dp_rank disagg_prefill_dp_rank"),
    (_UP_TO_UINT16, "data_parallel_rank"),
    (Number(low=0, high=INT64), "bootstrap_room"),
    (_ANY_INT64, "priority"),
    (Json(), "num_items_assigned encoder_urls kv_hints mm_hashes mm_content_hashes video_config"),
    (Json(), "modalities custom_labels external_trace_header images_config mm_processor_kwargs"),
    (_POSITIONS, "multi_item_delimiter_indices token_indices_to_pool decision_layout"),
    (OneOf(("selected", "support")), "sampling_logprobs_mode"),
    (
        Free("as a text, at most context length times `limits.chars_per_token` characters"),
        "text",
    ),
    (
        Free("loaded by SGLang's processor; the body is bounded"),
        "image_data video_data audio_data",
    ),
    (_SAMPLING["watermark"], "watermark"),
    (_UP_TO_INT32, "max_thinking_tokens"),
    (Number(low=0, high=1e12, is_whole=False), "received_time"),
    (Number(low=0, high=1024), "max_dynamic_patch min_dynamic_patch image_max_dynamic_patch"),
    (Number(low=0, high=1024), "video_max_dynamic_patch"),
    (Number(low=1, high=hidden), "dimensions"),
    (Number(low=0, high=last_token), "embed_override_token_id"),
    (Number(low=-INT32, high=INT32), "offset"),
)
"""Bounds for all other structs; exceptions are in `TABLE`."""


def _of(names: str) -> dict[str, Bound]:
    return {name: _REQUEST[name] for name in names.split()}


_BOTH = """rid http_worker_ipc input_ids sampling_params lora_id positional_embed_overrides priority
    multi_item_delimiter_indices token_indices_to_pool"""
_TOKENIZED = f"{_BOTH} input_text mm_inputs token_type_ids routed_dp_rank time_stats lora_name"
_GENERATE = f"""{_BOTH} input_embeds return_logprob logprob_start_len top_logprobs_num
    token_ids_logprob stream return_sampling_mask return_flat_raw_top_logprobs return_hidden_states
    return_routed_experts routed_experts_start_len return_indexer_topk session_id session_params
    custom_logit_processor bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key
    decode_tp_size routed_dp_rank disagg_prefill_dp_rank routing_key require_reasoning extra_key
    no_logs return_bytes return_entropy need_wait_for_mm_inputs num_items_assigned encoder_urls
    cache_salt kv_hints sampling_logprobs_mode"""
_INPUT = f"""{_BOTH} text input_embeds image_data video_data audio_data log_metrics modalities
    lora_path background return_prompt_token_ids external_trace_header received_time routing_key"""
_EMBED = "dimensions return_pooled_hidden_states decision_layout"

TABLE: Mapping[str, Mapping[str, Bound]] = {
    "SamplingParams": _SAMPLING,
    "SessionParams": _of("id rid offset replace drop_previous_output"),
    "GenerateReqInput": _of(
        f"""{_GENERATE} {_INPUT} mm_hashes mm_content_hashes use_audio_in_video video_config
        watermark return_text_in_logprobs return_flat_raw_output_top_logprobs
        return_flat_raw_top_logprobs_b64 data_parallel_rank conversation_id max_thinking_tokens
        custom_labels max_dynamic_patch min_dynamic_patch image_max_dynamic_patch
        video_max_dynamic_patch images_config mm_processor_kwargs"""
    ),
    "EmbeddingReqInput": _of(
        f"{_INPUT} {_EMBED} embed_override_token_id embed_overrides is_cross_encoder_request"
    ),
    "TokenizedGenerateReqInput": {
        **_of(f"{_GENERATE} {_TOKENIZED} pp_prefetch_ticketed"),
        "num_items_assigned": INTERNAL,
        "encoder_urls": INTERNAL,
        "kv_hints": Free("read by SGLang into a struct of its own"),
    },
    "TokenizedEmbeddingReqInput": _of(f"{_TOKENIZED} {_EMBED}"),
}
"""SGLang's struct -> field -> what it may be."""


def check_field(
    name: str, value: Any, bound: Bound, scope: Scope, *, of_batch: bool = False
) -> None:
    """RequestError that names the field, the value and the limit. None is always allowed.
    `of_batch`: the value may be a list with one value for each prompt."""
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
    """`check_field` for all fields of a struct. SGLang checks for unknown fields."""
    for name, bound in TABLE[struct].items():
        value = values.get(name)
        if value is not None and not isinstance(bound, Free):
            check_field(prefix + name, value, bound, scope, of_batch=of_batch)


def _each(value: Any, bound: Bound) -> Iterator[Any]:
    """The value of each prompt, in a field of one or several prompts."""
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
    """RequestError for a text that is too long for the context."""
    if num_chars > scope.max_chars:
        raise RequestError(
            name,
            f"{num_chars} characters are above {scope.max_chars}, {scope.chars_per_token} for each "
            f"of {scope.context_len} tokens (context length)",
        )
