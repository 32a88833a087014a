"""Lines of a batch file (the OpenAI batch format): read them, check them, mark them offline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from cosched.errors import RequestError
from cosched.limits.bodies import check_body, check_known, normalize
from cosched.limits.bounds import ANY_MODEL, Scope

CHAT = "/v1/chat/completions"
CLASSIFY = "/v1/classify"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = "/v1/messages"
RERANK = "/v1/rerank"
RESPONSES = "/v1/responses"
SCORE = "/v1/score"
URLS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, CLASSIFY, SCORE, RERANK)
_MODERATIONS = "/v1/moderations"
_AZURE_URLS = {url.removeprefix("/v1"): url for url in URLS}
"""Urls in batch files for Azure OpenAI -> ours."""
_TIERED = (CHAT, COMPLETIONS, RESPONSES)
"""Those with a field `service_tier`."""

_WITH_MEDIA = ("messages", "input", "query", "documents")
"""Fields with parts that may be images, video or sound."""
_MEDIA_KEYS = ("image", "image_url", "video", "video_url", "audio_url", "input_audio")
_MEDIA_TYPES = (*_MEDIA_KEYS, "input_image")

INVALID_VALUE = "invalid_value"
"""Code of a line with a field beyond its bound, or one that the endpoint does not know."""

UNREADABLE = ("invalid_json_line", "invalid_encoding")
"""Codes of lines that no JSON reader accepts."""
_MAX_SHOWN_CHARS = 80
_BLOCK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
"""Some editors on Windows start a file with it; files that were joined have it in the middle."""
_REPLACED = "\N{REPLACEMENT CHARACTER}"
_DIGEST_BYTES = 16
_FREE = bytes(_DIGEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLine:
    """One line as it is in the file. `number` counts from 1; `data` is None if it was too long."""

    number: int
    data: bytes | None

    @property
    def is_empty(self) -> bool:
        return self.data is not None and (not self.data or self.data.isspace())


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """A valid line: `body` is the JSON to send, already marked as offline. has_media: it has
    images, video or sound."""

    number: int
    custom_id: str
    url: str
    body: bytes
    has_media: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that cannot be sent. `custom_id` is None if it could not be read."""

    number: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


class _Lines(Protocol):
    def readline(self, num_bytes: int, /) -> bytes: ...


def raw_lines(file: _Lines, *, max_line_bytes: int) -> Iterator[RawLine]:
    """Holds little more than `max_line_bytes` of one line in memory. The newline and a byte order
    mark do not count."""
    number = 0
    while data := file.readline(max_line_bytes + 1 + len(_BOM)):
        number += 1
        is_whole = data.endswith(b"\n")
        data = data.removeprefix(_BOM)
        if len(data) - is_whole <= max_line_bytes:
            yield RawLine(number=number, data=data)
            continue
        while not is_whole and (rest := file.readline(_BLOCK_BYTES)):
            is_whole = rest.endswith(b"\n")
        yield RawLine(number=number, data=None)


def parse_line(
    line: RawLine,
    *,
    max_line_bytes: int,
    limit_name: str = "--max-line-bytes",
    scope: Scope | None = ANY_MODEL,
) -> RequestLine | BadLine:
    """Read-only; never raises. The caller checks that custom_ids are unique.

    limit_name  the option that sets `max_line_bytes`, for the message
    scope       of the model, for the bounds of the body's fields; None: do not check them
    """

    def bad(code: str, message: str, param: str | None = None) -> BadLine:
        return BadLine(
            number=line.number, custom_id=custom_id, code=code, message=message, param=param
        )

    custom_id: str | None = None
    if line.data is None:
        return bad("line_too_long", f"longer than {max_line_bytes} bytes ({limit_name})")
    try:
        entry = msgspec.json.decode(line.data)
        if not isinstance(entry, dict):
            return bad("invalid_line", f"a line must be a JSON object, not {_kind(entry)}")
        found = entry.get("custom_id")
        if found is None:
            return bad(*_missing("custom_id"))
        if not isinstance(found, str) or not found:
            message = f"custom_id must be a string with something in it, not {_shown(found)}"
            return bad("invalid_custom_id", message, "custom_id")
        custom_id = found
        url, body = canonical_url(entry.get("url")), entry.get("body")
        if (fault := _fault(entry.get("method"), url, body)) is not None:
            return bad(*fault)
        assert isinstance(url, str) and isinstance(body, dict), f"{url=}"
        normalize(body)
        if scope is not None:
            check_body(url, body, scope)
            check_known(url, body, scope)
        return RequestLine(
            number=line.number,
            custom_id=custom_id,
            url=url,
            body=_offline_body(url, body),
            has_media=_has_media(body),
        )
    except RequestError as error:
        return bad(INVALID_VALUE, str(error), f"body.{error.field}")
    except RecursionError:
        return bad("invalid_json_line", "this line is not valid JSON: nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        custom_id = _id_of_unreadable(line.data)
        try:
            line.data.decode()
        except UnicodeDecodeError as wrong:
            return bad("invalid_encoding", f"not UTF-8: {wrong.reason} at byte {wrong.start}")
        return bad("invalid_json_line", f"this line is not valid JSON: {error}")


def canonical_url(url: Any) -> Any:
    """``/chat/completions``, as Azure's batch files write it, with the ``/v1`` that it has here."""
    return _AZURE_URLS.get(url, url) if isinstance(url, str) else url


def hint_for(url: Any) -> str:
    """What to do instead, for the end of a message; "" for most urls."""
    if url != _MODERATIONS:
        return ""
    return (
        f": SGLang has no moderations; ask a guard model on {CHAT}, or a classifier on {CLASSIFY}"
    )


def _id_of_unreadable(data: bytes) -> str | None:
    """The custom_id of a line that only lenient readers accept (NaN, lone surrogates, a wrong
    byte): such a line fails alone, under its id. None: no id can be read."""
    try:
        found = json.loads(data.decode(errors="replace"))
        custom_id = found.get("custom_id") if isinstance(found, dict) else None
        if isinstance(custom_id, str) and _REPLACED not in custom_id:
            custom_id.encode()
            return custom_id or None
    except (ValueError, RecursionError):  # UnicodeError is a ValueError
        pass
    return None


def duplicate_of(line: RequestLine | BadLine) -> BadLine:
    """The error for a line whose custom_id an earlier line has."""
    return BadLine(
        number=line.number,
        custom_id=line.custom_id,
        code="duplicate_custom_id",
        message=f"custom_id {_shown(line.custom_id)} is already used by an earlier line",
        param="custom_id",
    )


def _missing(name: str) -> tuple[str, str, str]:
    return "missing_required_parameter", f"missing required parameter: {name!r}", name


def _fault(method: Any, url: Any, body: Any) -> tuple[str, str, str] | None:
    """Code (OpenAI's, where it has one), message and parameter of the first fault of a line that
    has an id."""
    for name, value in (("method", method), ("url", url), ("body", body)):
        if value is None:
            return _missing(name)
    if method != "POST":
        return "invalid_method", f"method must be POST, not {_shown(method)}", "method"
    if url not in URLS:
        message = f"url must be one of {', '.join(URLS)}, not {_shown(url)}{hint_for(url)}"
        return "invalid_url", message, "url"
    if not isinstance(body, dict):
        return "invalid_body", f"body must be a JSON object, not {_kind(body)}", "body"
    if body.get("stream") not in (None, False):
        message = "streaming is not supported in a batch: leave out stream"
        return "streaming_unsupported", message, "body.stream"
    if body.get("background") not in (None, False):
        message = "the client waits for the answer: leave out background"
        return "background_unsupported", message, "body.background"
    return None


def _offline_body(url: str, body: dict[str, Any]) -> bytes:
    """The body with the marks of an offline request.

    A priority below zero ranks offline requests among themselves and stays; any other priority
    would make the request online.
    """
    priority = body.get("priority")
    if isinstance(priority, int) and not isinstance(priority, bool) and priority >= 0:
        del body["priority"]
    if url in _TIERED:
        body["service_tier"] = "flex"
    return msgspec.json.encode(body)


def _has_media(body: Mapping[str, Any]) -> bool:
    """Whether a part of a message, of an input or of a document is no text, also in the result of
    a tool."""
    waiting = [body.get(name) for name in _WITH_MEDIA]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            if value.get("type") in _MEDIA_TYPES:
                return True
            if any(value.get(key) is not None for key in _MEDIA_KEYS):
                return True
            waiting += value.values()
    return False


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


class IdSet:
    """A set of strings that only grows, up to a size known in advance.

    It keeps 16-byte digests in one open-addressed table: a quarter of the memory of a set of
    strings. Two different ids out of a million share a digest with a probability of 1e-27.
    """

    def __init__(self, *, max_ids: int) -> None:
        slots = 1 << max(4, (max_ids * 3 // 2).bit_length())  # at most two thirds full
        self._mask = slots - 1
        self._table = bytearray(slots * _DIGEST_BYTES)
        self._max_ids = max_ids
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def add(self, text: str) -> bool:
        """Add `text`; True if it is new."""
        digest = blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
        table, mask = self._table, self._mask
        slot = int.from_bytes(digest[:8], "little") & mask
        while (held := table[slot * _DIGEST_BYTES : (slot + 1) * _DIGEST_BYTES]) != _FREE:
            if held == digest:
                return False
            slot = (slot + 1) & mask
        assert self._len < self._max_ids, f"{self._max_ids=}"
        table[slot * _DIGEST_BYTES : (slot + 1) * _DIGEST_BYTES] = digest
        self._len += 1
        return True
