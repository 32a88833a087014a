"""How many sequences a request asks for: prompts times samples, or the rows of beam searches.

`asked` reads a body before SGLang has parsed it, so that a request above its key's limit is refused
before a stream begins; `made` counts what SGLang has made of it, whatever the body looked like.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

_GENERATE = ("text", "input_ids", "input_embeds")
_MEDIA = ("image_data", "video_data", "audio_data")

_PROMPTS: Mapping[str, str] = {
    "/v1/classify": "input",
    "/v1/completions": "prompt",
    "/v1/decisions": "questions",
    "/v1/embeddings": "input",
    "/v1/rerank": "documents",
    "/v1/score": "items",
    "/v1/systemone": "questions",
}
"""Route -> the field of its prompts: one, or a list."""

_WITH_SAMPLES = ("/invocations", "/v1/chat/completions", "/v1/completions")
"""Routes with OpenAI's ``n``."""


def asked(route: str, body: Any) -> int:
    """At least 1. Reads what SGLang has not checked yet, and converts numbers as it does."""
    if not isinstance(body, Mapping):
        return 1
    if route == "/generate":
        return _generated(body)
    if route in ("/classify", "/encode"):
        return _embedded(body)
    if route == "/vertex_generate":
        parameters = body.get("parameters")
        params = parameters.get("sampling_params") if isinstance(parameters, Mapping) else None
        return _num_prompts(body.get("instances")) * _num_rows(params, 1)
    prompts = _num_prompts(body.get(_PROMPTS.get(route, "")))
    return prompts * (_whole(body.get("n")) if route in _WITH_SAMPLES else 1)


def made(obj: Any) -> int:
    """Of SGLang's request object, before its arguments are normalized."""
    fields = vars(obj)
    return _generated(fields) if "stream" in fields else _embedded(fields)


def _generated(fields: Mapping[str, Any]) -> int:
    name = next((name for name in _GENERATE if fields.get(name) is not None), "text")
    value = fields.get(name)
    if name == "input_embeds" and _is_list(value):  # one prompt is a list of vectors
        num_prompts = len(value) if _is_list(value[0]) and _is_list(value[0][0]) else 1
    else:
        num_prompts = _num_prompts(value)
    return _num_rows(fields.get("sampling_params"), num_prompts)


def _embedded(fields: Mapping[str, Any]) -> int:
    """Embeddings have no samples."""
    for name in ("text", "input_ids"):
        if fields.get(name) is not None:
            return _num_prompts(fields[name])
    # Without a text a list of media is one prompt, and a list of lists several.
    media = next((fields[name] for name in _MEDIA if fields.get(name) is not None), None)
    if _is_list(media) and all(isinstance(each, list) for each in media):
        return len(media)
    return 1


def _num_prompts(value: Any) -> int:
    """Of numbers it is one prompt."""
    if not _is_list(value) or isinstance(value[0], int | float):
        return 1
    return len(value)


def _num_rows(params: Any, num_prompts: int) -> int:
    """Samples of all prompts. A beam search has the rows of its beams, whatever ``n`` is, and what
    SGLang reads in the first of several parameters holds for all."""
    every = params if _is_list(params) else [params] * num_prompts
    every = [each if isinstance(each, Mapping) else {} for each in every]
    beams = [_whole(each.get("beam_width")) for each in every]
    num_samples = 1 if beams[0] > 1 else _whole(every[0].get("n"))
    return max(sum(beams), num_prompts) * num_samples


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and bool(value)


def _whole(value: Any) -> int:
    """A number as SGLang reads it, from text too; 1 where it would refuse it."""
    try:
        number = float(value)
        return max(int(number), 1)
    except (OverflowError, TypeError, ValueError):
        return 1
