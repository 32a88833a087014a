"""The requests of a body of Anthropic's Message Batches, as lines of a batch file.

The body is read a window at a time: to decode all of it at once would stop the process, and the
streams of chats, for as long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import TextIOWrapper
from typing import IO, Annotated

import msgspec

from cosched.batch.config import BatchesConfig
from cosched.batch.errors import ApiError
from cosched.batch.jsonl.line_results import encode_line
from cosched.batch.jsonl.lines import MESSAGES, BadLine, IdSet, RawLine, parse_line

_FORM = '{"requests": [{"custom_id": "...", "params": {...}}, ...]}'
_READ_CHARS = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    params: msgspec.Raw


def lines_of(body: IO[bytes], config: BatchesConfig) -> Iterator[bytes]:
    """ApiError 400, 413, also after some lines."""
    ids = IdSet(max_ids=config.max_lines)
    for index, text in enumerate(_requests(body, config.max_line_bytes)):
        if index == config.max_lines:
            most = f"{config.max_lines} requests (batches.max_lines)"
            raise ApiError(f"a batch may have {most}", status=413)
        try:
            one = msgspec.json.decode(text.encode(), type=_Request)
        except msgspec.DecodeError as error:
            raise ApiError(f"requests.{index}: {error}") from None
        if not ids.add(one.custom_id):
            raise ApiError(f"requests.{index}: custom_id {one.custom_id!r} is already used")
        params = msgspec.Raw(msgspec.json.format(one.params, indent=-1))
        named = {"custom_id": one.custom_id, "method": "POST", "url": MESSAGES}
        line = encode_line({**named, "body": params})
        fault = parse_line(
            RawLine(number=index, data=line if len(line) <= config.max_line_bytes else None),
            max_line_bytes=config.max_line_bytes,
            limit_name="batches.max_line_bytes",
            scope=None,
        )
        if isinstance(fault, BadLine):
            status = 413 if fault.code == "line_too_long" else 400
            raise ApiError(f"requests.{index}: {fault.message}", status=status)
        yield line


def _requests(body: IO[bytes], most_chars: int) -> Iterator[str]:
    """The JSON of each. ApiError 400."""
    window, number = _Window(body, most_chars), 0
    try:
        has_begun = window.skip("{") and window.value() == '"requests"' and window.skip(":")
        if not (has_begun and window.skip("[")):
            raise ApiError(f"the body must be {_FORM}")
        while not number or window.skip(","):
            yield window.value()
            number += 1
        if not (window.skip("]") and window.skip("}") and window.skip("")):
            raise ApiError(f"the body must be {_FORM}; it goes on after requests.{number - 1}")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ApiError(f"requests.{number}: {error}") from None


class _Window:
    """A part of a JSON text, read from its start to its end."""

    def __init__(self, content: IO[bytes], most_chars: int) -> None:
        self._content = TextIOWrapper(content, encoding="utf-8")
        self._most_chars = most_chars
        self._text, self._at = "", 0

    def skip(self, char: str) -> bool:
        """Whether this character, or for "" the end, comes next after spaces; it is passed."""
        while (space := _SPACE.match(self._text, self._at)) and space.end() == len(self._text):
            if not self._read():
                break
        self._at = space.end() if space else 0
        is_next = self._text[self._at : self._at + 1] == char
        self._at += len(char) if is_next else 0
        return is_next

    def value(self) -> str:
        """The text of the next value. ValueError."""
        self.skip("")
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:  # perhaps it goes on after the window
                if len(self._text) - self._at > self._most_chars:
                    raise ValueError(f"longer than {self._most_chars} characters") from None
                if not self._read():
                    raise ValueError(f"not valid JSON: {error.msg}") from None
                continue
            begin, self._at = self._at, end
            return self._text[begin:end]

    def _read(self) -> bool:
        more = self._content.read(max(_READ_CHARS, len(self._text) - self._at))
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)
