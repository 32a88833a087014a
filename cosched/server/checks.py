"""Checks SGLang's request objects against the bounds of `cosched.limits.bounds_table`: before and
after tokenization, and when the scheduler receives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

import msgspec

from cosched.config import Config, load_config, planning_config
from cosched.core.request import RequestClass
from cosched.errors import RequestError
from cosched.limits.bounds import ANY_MODEL, MOST_LOGPROBS, Numbers, Scope
from cosched.limits.bounds_table import TABLE, check_field, check_fields, check_text
from cosched.wire import class_of_priority

OFFLINE_SHARE = 7 / 8
"""Of the KV memory that one offline prompt may take. A longer one could run only while online
requests hold no KV, and each new one would preempt it."""


def scope_of(owner: Any) -> Scope:
    """What the bounds depend on, from SGLang's tokenizer manager or scheduler. Kept there."""
    scope: Scope | None = getattr(owner, "cosched_limits", None)
    if scope is not None:
        return scope
    model = owner.model_config
    longest = owner.max_req_input_len
    max_offline_tokens = None
    if planning_config() is not None and hasattr(owner, "max_total_num_tokens"):
        max_offline_tokens = int(owner.max_total_num_tokens * OFFLINE_SHARE)
    owner.cosched_limits = scope = Scope(
        vocab_size=model.vocab_size,
        context_len=model.context_len,
        hidden_size=model.hidden_size,
        chars_per_token=(load_config() or Config()).limits.chars_per_token,
        # SGLang refuses a prompt of exactly `max_req_input_len`.
        max_input_tokens=(
            None if longest is None or owner.server_args.allow_auto_truncate else longest - 1
        ),
        max_offline_tokens=max_offline_tokens,
        keeps_seeds=owner.server_args.enable_deterministic_inference,
    )
    return scope


def check_input(obj: Any, scope: Scope) -> None:
    """A request of one or several prompts before tokenization. RequestError."""
    struct = _struct_of(obj)
    check_fields(struct, vars(obj), scope, of_batch=True)
    params = obj.sampling_params
    if isinstance(params, Mapping):
        check_fields("SamplingParams", params, scope, prefix="sampling_params.")
    elif isinstance(params, list):
        for i, each in enumerate(params):
            if isinstance(each, Mapping):
                check_fields("SamplingParams", each, scope, prefix=f"sampling_params[{i}].")
    session = getattr(obj, "session_params", None)
    if isinstance(session, Mapping):
        check_fields("SessionParams", session, scope, prefix="session_params.")
    for name, text in _texts(obj.text):
        check_text(name, len(text), scope)
    if not _has_media(obj) and not session:  # else these are or precede the prompt
        _check_not_empty(obj)


_INTERNAL_PARAMS = frozenset(
    {"is_normalized", "stop_regex_max_len", "stop_regex_strs", "stop_str_max_len", "stop_strs"}
)
"""Fields that SGLang sets. If a client set them, others would go unchecked."""


def check_params(params: Any, params_class: Any) -> None:
    """Names and types of sampling parameters. ValueError."""
    try:
        msgspec.convert(params, _checked_type(params_class))
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling_params: {error}") from None


@cache
def _checked_type(params_class: Any) -> Any:
    """A struct with the same fields that is read from an object; SGLang's is read from an array."""
    hints = get_type_hints(params_class).items()
    fields = [(name, hint | None, None) for name, hint in hints if name not in _INTERNAL_PARAMS]
    name = params_class.__name__
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def check_tokenized(obj: Any, input_ids: Sequence[int] | None, scope: Scope) -> None:
    """One prompt after tokenization. RequestError."""
    name = "text" if obj.text is not None else "input_ids"
    if input_ids is None or _has_media(obj):
        return
    check_field("input_ids", input_ids, TABLE["TokenizedGenerateReqInput"]["input_ids"], scope)
    num_tokens = len(input_ids)
    if getattr(obj, "session_params", None):
        return  # the prompt continues the session
    if not num_tokens:
        raise RequestError(name, "has no tokens")
    _check_fits(name, num_tokens, scope)
    _check_positions(obj, num_tokens)
    if getattr(obj, "return_logprob", False):
        max_new_tokens = (obj.sampling_params or {}).get("max_new_tokens")
        _check_logprobs(obj, num_tokens, max_new_tokens, scope)


def check_received(received: Any, scope: Scope) -> None:
    """A request that the scheduler receives from any front end. RequestError."""
    struct = _struct_of(received)
    check_fields(struct, _fields(received, struct), scope)
    params = received.sampling_params
    check_fields(
        "SamplingParams", _fields(params, "SamplingParams"), scope, prefix="sampling_params."
    )
    session = getattr(received, "session_params", None)
    if session is not None:
        check_fields(
            "SessionParams", _fields(session, "SessionParams"), scope, prefix="session_params."
        )
    has_more = session is not None or received.mm_inputs is not None
    if has_more or getattr(received, "input_embeds", None) is not None:
        return
    num_tokens = len(received.input_ids or ())
    if not num_tokens:
        raise RequestError("input_ids", "has no tokens")
    _check_fits("input_ids", num_tokens, scope)
    limit = scope.max_offline_tokens
    is_offline = class_of_priority(received.priority) is RequestClass.OFFLINE
    if is_offline and limit is not None and num_tokens > limit:
        raise RequestError(
            "input_ids",
            f"{num_tokens} tokens are above {limit}, the longest offline prompt that this server "
            "takes: the rest of its KV memory is for online requests",
        )
    _check_positions(received, num_tokens)
    if getattr(received, "return_logprob", False):
        _check_logprobs(received, num_tokens, params.max_new_tokens, scope)


def _struct_of(obj: Any) -> str:
    """The name in `TABLE` of an object's type."""
    return next(kind.__name__ for kind in type(obj).__mro__ if kind.__name__ in TABLE)


def _fields(obj: Any, struct: str) -> dict[str, Any]:
    return {name: getattr(obj, name, None) for name in TABLE[struct]}


def _texts(value: Any, name: str = "text") -> Iterable[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _texts(each, f"{name}[{i}]")


def _has_media(obj: Any) -> bool:
    return any(getattr(obj, f"{kind}_data", None) for kind in ("image", "video", "audio"))


def _check_not_empty(obj: Any) -> None:
    for name in ("text", "input_ids", "input_embeds"):
        value = getattr(obj, name, None)
        if value is None:
            continue
        if not value:
            raise RequestError(name, "is empty")
        for i, each in enumerate(value) if isinstance(value, list) else ():
            if isinstance(each, str | list) and not each:
                raise RequestError(f"{name}[{i}]", "is empty")


def _check_fits(name: str, num_tokens: int, scope: Scope) -> None:
    limit = scope.max_input_tokens
    if limit is not None and num_tokens > limit:
        raise RequestError(
            name, f"{num_tokens} tokens are above {limit}, the longest prompt that fits this server"
        )


def _check_positions(obj: Any, num_tokens: int) -> None:
    """Fields that are positions in the prompt."""
    starts = (
        ("logprob_start_len", "return_logprob"),
        ("routed_experts_start_len", "return_routed_experts"),
    )
    for name, switch in starts:
        start = getattr(obj, name, None)
        if getattr(obj, switch, False) and start is not None and start > num_tokens:
            raise RequestError(name, f"{start} is above {num_tokens} (tokens of the prompt)")
    for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
        last = Numbers(most=num_tokens, high=num_tokens - 1)
        check_field(name, getattr(obj, name, None), last, ANY_MODEL)


def _check_logprobs(obj: Any, num_tokens: int, max_new_tokens: int | None, scope: Scope) -> None:
    """Number of log probabilities in the answer."""
    num_each = (obj.top_logprobs_num or 0) + len(obj.token_ids_logprob or ())
    start = obj.logprob_start_len
    num_new = max(scope.context_len - num_tokens, 0)
    if max_new_tokens is not None:
        num_new = min(num_new, max_new_tokens)
    num_positions = num_new + (num_tokens - start if start is not None and start >= 0 else 0)
    if num_each * num_positions > MOST_LOGPROBS:
        raise RequestError(
            "top_logprobs_num" if obj.top_logprobs_num else "token_ids_logprob",
            f"{num_each} for each of {num_positions} positions are above {MOST_LOGPROBS} in all",
        )
