"""Results of lines: what an HTTP response means for a line, and the record that is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from cosched.batch.jsonl.lines import BadLine, RequestLine

_BUSY_OR_DOWN = frozenset({429, 502, 503, 504})
"""The server, or a proxy before it, cannot take the request now. The line is not at fault."""
_MAX_TEXT_CHARS = 4096
"""Of an error response that is not JSON."""
_ERROR_TYPES = {404: "not_found_error", 429: "rate_limit_error"}
_FLAT_ERROR = ("object", "message", "type", "param", "code", "detail")
"""Fields of the errors of SGLang and FastAPI, which have no object ``error``."""
_STATUSES = {"model_not_found": 404, "input_unreadable": 500}
"""HTTP status of a line that was not sent, by its code; 400 for the others."""
_ACCIDENTS = frozenset(
    {
        *("aborted", "bad_response", "batch_cancelled", "batch_expired", "input_unreadable"),
        *("internal_error", "model_not_found", "timeout"),
        *(f"http_{status}" for status in (401, 403, 404, 408, 429)),
    }
)
"""Codes of failures for which the server may be the reason, beside answers of 500 and above."""
_SEPARATORS = ("\u0085", "\u2028", "\u2029")
"""Line breaks for `str.splitlines`, which JSON allows in strings."""
_ESCAPES = tuple((char.encode(), rf"\u{ord(char):04x}".encode()) for char in _SEPARATORS)
_ID = re.compile(r"batch_req_([0-9a-f]{16})([0-9a-f]{8})")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_USAGE: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "prompt_tokens": (("prompt_tokens",), ("input_tokens",)),
    "completion_tokens": (("completion_tokens",), ("output_tokens",)),
    "cached_tokens": (
        ("prompt_tokens_details", "cached_tokens"),
        ("input_tokens_details", "cached_tokens"),
        ("cache_read_input_tokens",),
    ),
    "reasoning_tokens": (
        ("completion_tokens_details", "reasoning_tokens"),
        ("output_tokens_details", "reasoning_tokens"),
        ("reasoning_tokens",),
    ),
    "device_s": (("device_seconds",),),
}
"""Field of `Answer` -> places in ``usage``: chat and completions, /v1/responses, /v1/messages,
SGLang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server answered. `body` is JSON without line breaks. `cached_tokens` are part of the
    prompt, `reasoning_tokens` of the completion. `device_s`: what it cost [s]; 0: not known."""

    status: int
    request_id: str
    body: bytes
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    device_s: float = 0.0

    def usage(self) -> dict[str, Any]:
        """In the words of the store (`cosched.batch.batch_records.Finished`)."""
        return {
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "device_s": self.device_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a line has no answer. The last three are None if no response is at fault."""

    code: str
    message: str
    param: str | None = None
    status: int | None = None
    request_id: str | None = None
    body: bytes | None = None


Outcome = Answer | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class TryAgain:
    """The line is to be sent again.

    failure     the outcome once all retries are used; None: the line is not at fault, never fails
    is_aborted  the server answered, and aborted the request: an operator may have aborted all
    after_s     the server's Retry-After [s]
    """

    reason: str
    failure: Failure | None = None
    is_aborted: bool = False
    after_s: float = 0.0


def judge(response: httpx.Response) -> Answer | Failure | TryAgain:
    status = response.status_code
    if status in _BUSY_OR_DOWN:
        after = response.headers.get("retry-after", "")  # SGLang and cosched send no dates
        return TryAgain(reason=f"HTTP {status}", after_s=float(after) if after.isdecimal() else 0.0)
    try:
        body = msgspec.json.decode(response.content)
    except _UNREADABLE as error:
        if response.is_success:
            message = f"the answer is not JSON: {error}"
            failure = Failure(code="bad_response", message=message, status=status)
            return TryAgain(reason=message, failure=failure)
        body = None
    if not response.is_success:
        message = _message(body) or f"HTTP {status}"
        failure = _with_body(response, body, code=f"http_{status}", message=message)
        # 501 means that the server never can; any other 5xx may be an accident.
        if status >= 500 and status != 501:
            return TryAgain(reason=f"HTTP {status}", failure=failure)
        return failure
    if _is_aborted(body):
        message = 'the server aborted the request (finish_reason "abort", or status "failed")'
        failure = _with_body(response, body, code="aborted", message=message)
        return TryAgain(reason=message, failure=failure, is_aborted=True)
    usage = body.get("usage") if isinstance(body, dict) else _usage_of_list(body)
    counts = {
        name: next((count for place in places if (count := _count(usage, place))), 0)
        for name, places in _USAGE.items()
    }
    if isinstance(body, dict) and body.get("type") == "message":  # cached tokens come on top there
        counts["prompt_tokens"] += counts["cached_tokens"]
    return Answer(
        status=status,
        request_id=_request_id(response, body),
        body=_one_line(response.content),
        **counts,
    )


def _usage_of_list(body: Any) -> dict[str, int]:
    """Of /v1/rerank, which counts the tokens of each document."""
    parts = body if isinstance(body, list) else []
    return {"prompt_tokens": sum(_count(one, ("meta_info", "prompt_tokens")) or 0 for one in parts)}


def _is_aborted(body: Any) -> bool:
    if isinstance(body, dict) and body.get("object") == "response":
        return body.get("status") in ("cancelled", "failed")
    choices = body.get("choices") if isinstance(body, dict) else None
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices
    )


def _count(value: Any, place: Sequence[str]) -> Any:
    for name in place:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def _with_body(response: httpx.Response, body: Any, *, code: str, message: str) -> Failure:
    """`body` is the response's JSON; None: it is not JSON."""
    is_json = body is not None or response.content.strip() == b"null"
    return Failure(
        code=code,
        message=message,
        status=response.status_code,
        request_id=_request_id(response, body),
        body=_one_line(response.content)
        if is_json
        else msgspec.json.encode(response.text[:_MAX_TEXT_CHARS]),
    )


def _message(body: Any) -> str | None:
    """The reason in an error response, wherever OpenAI, SGLang and FastAPI put it."""
    if not isinstance(body, dict):
        return None
    nested = body.get("error")
    places = [nested.get("message") if isinstance(nested, dict) else nested]
    places += [body.get("message"), body.get("detail")]
    return next((text for text in places if isinstance(text, str) and text), None)


def _request_id(response: httpx.Response, body: Any) -> str:
    in_body = body.get("id") if isinstance(body, dict) else None
    return str(response.headers.get("x-request-id") or in_body or "")


def _one_line(content: bytes) -> bytes:
    """The JSON as the server wrote it, without line breaks."""
    if b"\n" in content or b"\r" in content:
        return msgspec.json.format(content, indent=-1)
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One output line, for the output or the error file. `number` is 0 if the number of the input
    line is not known."""

    number: int
    is_answer: bool
    data: bytes


def record_of(line: RequestLine | BadLine, outcome: Outcome | None, *, record_id: str) -> Record:
    """In OpenAI's batch output format: the error of a line that has a response, or is wrong itself,
    is ``response.body.error``, that of any other ``error``. `outcome` is None for a bad line, which
    is its own."""
    if isinstance(line, BadLine):
        status = _STATUSES.get(line.code, 400)
        outcome = Failure(code=line.code, message=line.message, param=line.param, status=status)
    assert outcome is not None, f"{line.number=}"
    named: dict[str, Any] = {"id": record_id, "custom_id": line.custom_id}
    response = error = None
    is_answer = isinstance(outcome, Answer)
    if isinstance(outcome, Failure):
        named["line"] = line.number or None
        error = {"code": outcome.code, "message": outcome.message, "param": outcome.param}
    if outcome.status is not None:
        body: Any = msgspec.Raw(outcome.body or b"null")
        if isinstance(outcome, Failure):
            body, error = _error_body(outcome), None
        response = {
            "status_code": outcome.status,
            "request_id": outcome.request_id or "",
            "body": body,
        }
    data = encode_line({**named, "response": response, "error": error})
    return Record(number=line.number, is_answer=is_answer, data=data)


def encode_line(entry: Any) -> bytes:
    """JSON on one line, for `str.splitlines` too. All files of lines are written with it."""
    data = msgspec.json.encode(entry)
    for char, escape in _ESCAPES:
        data = data.replace(char, escape)
    return data + b"\n"


def _error_body(failure: Failure) -> dict[str, Any]:
    """The body of an error response in OpenAI's form; it keeps what else the server says."""
    status = failure.status or 400
    try:
        found = msgspec.json.decode(failure.body) if failure.body else {}
    except _UNREADABLE:
        found = {}
    if not isinstance(found, dict):
        found = {"answer": found} if found is not None else {}
    is_flat = "error" not in found and found.get("object") in ("error", None)
    told = found.get("error", found if is_flat else {})
    told = told if isinstance(told, dict) else {}
    dropped = _FLAT_ERROR if is_flat else ("error",)
    rest = {name: value for name, value in found.items() if name not in dropped}
    own = told.get("code")
    default = "server_error" if status >= 500 else "invalid_request_error"
    error = {
        "message": failure.message,
        "type": _ERROR_TYPES.get(status, default),
        "param": failure.param or told.get("param"),
        "code": own if isinstance(own, str) and own else failure.code,
    }
    return {**rest, "error": error}


def is_wrong_for_good(code: str) -> bool:
    """Whether a line that failed with this code fails again, however often it is sent."""
    return code not in _ACCIDENTS and not code.startswith("http_5")


def failure_in(data: bytes) -> tuple[str, str]:
    """Code and message of a record of an error file."""
    record = msgspec.json.decode(data, type=_FailedRecord)
    body = record.response.body if record.response is not None else None
    error = body.error if body is not None and body.error is not None else record.error
    return ("", "") if error is None else (str(error.code or ""), str(error.message or ""))


class _Error(msgspec.Struct):
    code: Any = None
    message: Any = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


class _Response(msgspec.Struct):
    body: _ErrorBody | None = None


class _FailedRecord(msgspec.Struct):
    response: _Response | None = None
    error: _Error | None = None


class _Written(msgspec.Struct):
    id: str
    custom_id: str | None


class RecordWriter:
    """Makes the records of one job.

    The `id` of a record holds 16 digits that name the job and the number of the line it answers.
    In `run_batch` they are the first digits of the input's digest. So the outputs alone say what is
    done: no second file can disagree with them.
    """

    def __init__(self, *, digest: str) -> None:
        """`digest`: 16 hexadecimal digits or more."""
        self._digest = digest[:16]

    def record(self, line: RequestLine | BadLine, outcome: Outcome | None = None) -> Record:
        return record_of(line, outcome, record_id=self._id(line.number))

    def adopt(self, data: bytes, *, number: int, is_answer: bool) -> Record:
        """Another writer's record as that of line `number` of this job; only its id changes."""
        entry = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        content = encode_line({**entry, "id": self._id(number)})
        return Record(number=number, is_answer=is_answer, data=content)

    def line_answered_by(self, data: bytes) -> int | None:
        """The input line that `data`, a line of an output, answers; None if it is not a record.

        All of `data` must be JSON: half a record answers nothing.
        """
        if not data.endswith(b"\n"):
            return None
        try:
            found = _ID.fullmatch(msgspec.json.decode(data, type=_Written).id)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if found is None or found[1] != self._digest:
            return None
        return int(found[2], 16)

    def _id(self, number: int) -> str:
        return f"batch_req_{self._digest}{number:08x}"
