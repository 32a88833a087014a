"""Reader of OpenAI batch files: real text, so real prefix sharing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cosched.core.request import RequestClass
from cosched_traces.errors import RowError
from cosched_traces.files import json_lines
from cosched_traces.workload import TraceRequest, Workload

Tokenize = Callable[[str], Sequence[int]]
Messages = Sequence[dict[str, Any]]

BYTES_PER_TOKEN = 4
"""English text under a byte-pair encoding, where no tokenizer is given."""
_FIRST_ID, _VOCAB_SIZE = 10, 2000
"""Of estimated tokens: smaller ids are special, and every model has these."""


def estimated_tokens(text: str) -> list[int]:
    """A token for each `BYTES_PER_TOKEN` bytes; equal texts begin with equal tokens."""
    data = text.encode()
    return [
        _FIRST_ID + zlib.crc32(data[at : at + BYTES_PER_TOKEN]) % (_VOCAB_SIZE - _FIRST_ID)
        for at in range(0, len(data), BYTES_PER_TOKEN)
    ]


def plain_chat(messages: Messages) -> str:
    """Messages as plain text, ``role: content`` line by line. A model's own chat template differs
    by some tokens a message."""
    lines = [f"{message['role']}: {message['content']}" for message in messages]
    return "\n".join([*lines, "assistant:"])


def read_openai_batch(
    path: Path,
    tokenize: Tokenize,
    *,
    name: str | None = None,
    default_max_tokens: int | None = None,
    request_class: RequestClass = RequestClass.OFFLINE,
) -> Workload:
    """A batch input file: ``{"custom_id", "url", "body"}`` a line; all requests arrive at 0.

    rid is the custom_id. The prompt is that of ``/v1/completions`` (text or token ids) or the
    messages of ``/v1/chat/completions`` as `plain_chat`. Replies are as long as their limit,
    ``max_completion_tokens`` or ``max_tokens``, or `default_max_tokens` without one.
    """
    requests = []
    seen: set[str] = set()
    for line, fields in json_lines(path, dict[str, Any]):
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise RowError(path, line, f"custom_id is not a text: {custom_id!r}")
        if custom_id in seen:
            raise RowError(path, line, f"custom_id {custom_id!r} is on an earlier line")
        seen.add(custom_id)
        body = fields.get("body")
        if not isinstance(body, dict):
            raise RowError(path, line, "body is not an object")
        token_ids = _prompt(path, line, url=fields.get("url"), body=body, tokenize=tokenize)
        if not token_ids:
            raise RowError(path, line, "the prompt has no tokens")
        limit = _max_tokens(path, line, body, default_max_tokens)
        requests.append(
            TraceRequest(
                rid=custom_id,
                request_class=request_class,
                arrival_s=0.0,
                num_output_tokens=limit,
                max_new_tokens=limit,
                token_ids=token_ids,
            )
        )
    notes = (f"read {path.name}; replies as long as their limit",)
    return Workload(name=name or path.name.split(".")[0], requests=tuple(requests), notes=notes)


def _prompt(
    path: Path,
    line: int,
    *,
    url: object,
    body: dict[str, Any],
    tokenize: Tokenize,
) -> tuple[int, ...]:
    if url == "/v1/completions":
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return tuple(tokenize(prompt))
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return tuple(prompt)
        raise RowError(path, line, "prompt is neither text nor a list of token ids")
    if url == "/v1/chat/completions":
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise RowError(path, line, "messages is not a list of messages with role and content")
        return tuple(tokenize(plain_chat(messages)))
    known = "/v1/chat/completions, /v1/completions"
    raise RowError(path, line, f"url {url!r} generates no text; readable are {known}")


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()


def _max_tokens(path: Path, line: int, body: dict[str, Any], default: int | None) -> int:
    for field in ("max_completion_tokens", "max_tokens"):
        value = body.get(field)
        if value is not None:
            if type(value) is not int or value < 1:
                raise RowError(path, line, f"{field} is not a number above 0: {value!r}")
            return value
    if default is None:
        reason = "no max_tokens and no max_completion_tokens; give default_max_tokens"
        raise RowError(path, line, reason)
    return default
