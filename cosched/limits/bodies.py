"""Checks JSON bodies against `cosched.limits.bounds_table`, by the names that clients use.

Used by the HTTP server and for the lines of batches, before tokenization. Strings are read as
numbers where SGLang's request models do so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cosched.errors import RequestError
from cosched.limits.bounds import Bound, Flag, Number, Scope
from cosched.limits.bounds_table import INTERNAL, TABLE, check_field, check_text
from cosched.limits.grammars import document_fault

NATIVE: Mapping[str, str] = {
    "/classify": "EmbeddingReqInput",
    "/encode": "EmbeddingReqInput",
    "/generate": "GenerateReqInput",
}
"""Endpoints whose bodies are SGLang's own structs."""

_RENAMED: Mapping[str, str] = {
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "stop_sequences": "stop",
    "top_logprobs": "top_logprobs_num",
}
"""Name in the bodies of OpenAI's and Anthropic's endpoints -> SGLang's."""

_COMPLETIONS = "/v1/completions"
_DETOKENIZE = ("/detokenize", "/v1/detokenize")

_RESPONSES = "/v1/responses"

_UNSTORED: Mapping[str, str] = {
    "conversation": "the server keeps no conversations: send the earlier messages in input",
    "prompt": "the server keeps no prompts: send its text in input or instructions",
}
"""Fields of /v1/responses that name what OpenAI stores."""

_UNSET: Mapping[str, Any] = {"best_of": 1, "extra_body": {}, "modalities": ["text"]}
"""Values that ask for nothing."""

_TEXTS = (
    *("documents", "input", "instructions", "items", "messages", "prompt", "query", "system"),
    "tools",
)
"""Fields with text that is tokenized, beside the ``text`` of /generate."""

_MEDIA = ("image_url", "input_audio", "video_url", "audio_url", "source", "file")
"""Parts of a message that are not tokenized as text."""

_MOST_TEXT_DEPTH = 64


def without_effect(body: Mapping[str, Any], scope: Scope) -> tuple[str, ...]:
    """The fields of a request that the server cannot keep to: a ``seed`` where tokens are drawn at
    random, as SGLang draws by seed only with deterministic inference."""
    is_greedy = body.get("temperature") == 0 or body.get("top_k") == 1
    return () if scope.keeps_seeds or is_greedy or body.get("seed") is None else ("seed",)


def normalize(body: dict[str, Any]) -> None:
    """A field that is null is absent, as in OpenAI's API: many clients write all unset fields.
    SGLang's models refuse null where they have a default. A ``top_k`` of 0 means all tokens, as
    elsewhere; SGLang writes -1."""
    for name in [name for name, value in body.items() if value is None]:
        del body[name]
    for params in (body, body.get("sampling_params")):
        if isinstance(params, dict) and params.get("top_k") == 0:
            params["top_k"] = -1


_INSTEAD: Mapping[str, str] = {
    "best_of": "write n",
    "extra_body": "it is an argument of the openai client; write its fields beside the others",
    "function_call": "write tool_choice",
    "functions": "write tools",
    "guided_choice": "write regex",
    "guided_grammar": "write ebnf",
    "guided_json": "write response_format",
    "guided_regex": "write regex",
    "structured_outputs": "write response_format, regex or ebnf",
}
"""What other servers and older clients call it -> what to write here."""


def check_known(url: str, body: Mapping[str, Any], scope: Scope) -> None:
    """For the line of a batch. RequestError that names a field, or a tool, which the endpoint does
    not use: the reply would not be what the client asked for. Only where `scope` knows them."""
    known = scope.fields.get(url)
    if known is None:
        return
    for name, value in body.items():
        is_unset = value in ("", [], False) or value == _UNSET.get(name, ...)
        if name not in known and (not is_unset or (value == 0 and value is not False)):
            instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise RequestError(name, f"is not a field of {url} here{instead}")
    if url == _RESPONSES and isinstance(tools := body.get("tools"), list) and scope.tools:
        for index, tool in enumerate(tools):
            kind = tool.get("type") if isinstance(tool, Mapping) else None
            if isinstance(kind, str) and kind not in scope.tools:
                choices = ", ".join(sorted(scope.tools))
                fault = f"{kind!r} is not supported by this model; choose from {choices}"
                raise RequestError(f"tools[{index}].type", fault)


def check_body(path: str, body: Any, scope: Scope) -> None:
    """RequestError that names the first field beyond its bound. The endpoint checks for missing and
    unknown fields."""
    if not isinstance(body, Mapping):
        return
    if path in NATIVE:
        _check_native(NATIVE[path], body, scope)
        return
    for name in _UNSTORED if path == _RESPONSES else ():
        if body.get(name) is not None:
            raise RequestError(name, _UNSTORED[name])
    for name, value in body.items():
        if name in _TEXTS:
            _check_texts(name, value, scope)
        bound = _bound_of(path, name)
        if bound is not None and value is not None:
            check_field(name, _read(value, bound), bound, scope, of_batch=True)
    for name in ("response_format", "text", "tools", "functions"):
        if isinstance(body.get(name), dict | list):
            _check_schemas(name, body[name])


def _check_native(struct: str, body: Mapping[str, Any], scope: Scope) -> None:
    for name, bound in TABLE[struct].items():
        if bound is INTERNAL and body.get(name) is not None:
            raise RequestError(name, "is set by the server")
    for name in ("text", "prompt"):
        _check_texts(name, body.get(name), scope)


def _bound_of(path: str, name: str) -> Bound | None:
    """None: the field is unknown there, or has another meaning."""
    if name == "logprobs" and path == _COMPLETIONS:
        return TABLE["GenerateReqInput"]["top_logprobs_num"]
    if name == "tokens" and path in _DETOKENIZE:
        return TABLE["GenerateReqInput"]["input_ids"]
    if name in ("text", "input_embeds", "sampling_params", "modalities", *_TEXTS):
        return None
    name = _RENAMED.get(name, name)
    for struct in ("SamplingParams", "GenerateReqInput"):
        bound = TABLE[struct].get(name)
        if bound is not None and bound is not INTERNAL:
            return bound
    return TABLE["EmbeddingReqInput"].get(name) if name == "dimensions" else None


def _read(value: Any, bound: Bound) -> Any:
    """A value as SGLang's models read it: ``"5"`` and ``5.0`` as 5, ``"true"`` as true."""
    if isinstance(bound, Flag):
        return True if not isinstance(value, dict | list) else value
    if not isinstance(bound, Number):
        return value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, list):
        return [_read(each, bound) for each in value]
    if isinstance(value, str) and len(value) <= 40:
        try:
            value = float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
        except ValueError:
            return value
    if bound.is_whole and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _check_texts(name: str, value: Any, scope: Scope) -> None:
    """Texts of a list are prompts of their own; the messages of a chat are one prompt."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        for index, text in enumerate(value):
            check_text(f"{name}[{index}]", len(text), scope)
        return
    check_text(name, sum(map(len, _strings(value))), scope)


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth > _MOST_TEXT_DEPTH:
        return
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each, depth + 1)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if key not in _MEDIA:
                yield from _strings(each, depth + 1)


def _check_schemas(name: str, value: Any) -> None:
    fault = document_fault(value)
    if fault is not None:
        raise RequestError(name, fault)
