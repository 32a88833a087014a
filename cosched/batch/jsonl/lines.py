"""One line of a batch file (the OpenAI batch format): parse it, check it, make it offline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from cosched.batch.jsonl.source import RawLine
from cosched.errors import RequestError
from cosched.limits.bodies import check_body
from cosched.limits.table import ANY_MODEL, Scope

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)
INVALID_VALUE = "invalid_value"
"""Code of a line with a field beyond its bound."""

_MAX_SHOWN = 80  # characters of a wrong value in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """A valid line: `body` is the JSON to be sent, already marked as offline."""

    number: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that cannot be sent. `custom_id` is None when it could not be read."""

    number: int
    custom_id: str | None
    code: str
    message: str
    param: str | None


def parse_line(
    line: RawLine,
    *,
    max_line_bytes: int,
    limit_name: str = "--max-line-bytes",
    scope: Scope | None = ANY_MODEL,
) -> RequestLine | BadLine:
    """Read-only; never raises. The one check left to the caller is whether the id is unique.

    limit_name  where `max_line_bytes` was set, for the message
    scope       of the model that answers, for the bounds of the body's fields; None: they are not
                checked
    """
    if line.data is None:
        return _bad(line, "line_too_long", f"longer than {max_line_bytes} bytes ({limit_name})")
    try:
        entry = msgspec.json.decode(line.data)
        return _check(line, entry, scope)
    except RecursionError:
        return _bad(line, "invalid_json", "nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _encoding_fault(line, line.data) or _bad(line, "invalid_json", str(error))


def duplicate_of(line: RequestLine | BadLine) -> BadLine:
    """The error for a line whose custom_id an earlier line has."""
    return BadLine(
        number=line.number,
        custom_id=line.custom_id,
        code="duplicate_custom_id",
        message=f"custom_id {_shown(line.custom_id)} is already used by an earlier line",
        param="custom_id",
    )


def _check(line: RawLine, entry: Any, scope: Scope | None) -> RequestLine | BadLine:
    if not isinstance(entry, dict):
        return _bad(line, "invalid_line", f"a line must be a JSON object, not {_kind(entry)}")
    custom_id = entry.get("custom_id")
    if custom_id is None:
        return _bad(line, "missing_custom_id", "custom_id is missing", param="custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        message = f"custom_id must be a string with something in it, not {_shown(custom_id)}"
        return _bad(line, "invalid_custom_id", message, param="custom_id")
    url, body = entry.get("url"), entry.get("body")
    wrong = _wrong_part(entry.get("method"), url, body)
    if wrong is not None:
        code, message, param = wrong
        return _bad(line, code, message, param=param, custom_id=custom_id)
    assert isinstance(url, str) and isinstance(body, dict), f"{url=}"
    if scope is not None:
        try:
            check_body(url, body, scope)
        except RequestError as error:
            param = f"body.{error.field}"
            return _bad(line, INVALID_VALUE, str(error), param=param, custom_id=custom_id)
    return RequestLine(
        number=line.number, custom_id=custom_id, url=url, body=_offline_body(url, body)
    )


def _wrong_part(method: Any, url: Any, body: Any) -> tuple[str, str, str] | None:
    """Code, message and parameter of the first thing wrong with a line that has an id."""
    if method != "POST":
        return "invalid_method", f"method must be POST, not {_shown(method)}", "method"
    if url not in URLS:
        return "invalid_url", f"url must be one of {', '.join(URLS)}, not {_shown(url)}", "url"
    if not isinstance(body, dict):
        return "invalid_body", f"body must be a JSON object, not {_kind(body)}", "body"
    if body.get("stream") not in (None, False):
        return "stream_unsupported", "an answer here is one line: leave out stream", "body.stream"
    if body.get("background") not in (None, False):
        message = "the answer is waited for: leave out background"
        return "background_unsupported", message, "body.background"
    return None


def _offline_body(url: str, body: dict[str, Any]) -> bytes:
    """The body as it is sent: every request of a job is offline.

    A priority below zero says how offline requests rank among themselves and stays; one that is
    not would make the request online.
    """
    priority = body.get("priority")
    if isinstance(priority, int) and not isinstance(priority, bool) and priority >= 0:
        del body["priority"]
    if url != EMBEDDINGS:
        body["service_tier"] = "flex"
    return msgspec.json.encode(body)


def _bad(
    line: RawLine,
    code: str,
    message: str,
    *,
    param: str | None = None,
    custom_id: str | None = None,
) -> BadLine:
    return BadLine(number=line.number, custom_id=custom_id, code=code, message=message, param=param)


def _encoding_fault(line: RawLine, data: bytes) -> BadLine | None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return _bad(line, "invalid_encoding", f"not UTF-8: {error.reason} at byte {error.start}")
    return None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
