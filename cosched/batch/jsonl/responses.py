"""What an HTTP response means for a line: an answer, a failure, or another try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from cosched.batch.jsonl.records import Answer, Failure

# The server, or a proxy before it, cannot take the request now. Nothing is wrong with the line.
_BUSY_OR_DOWN = frozenset({429, 502, 503, 504})
_MAX_TEXT = 4096  # characters kept of an error response that is not JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class TryAgain:
    """The line is to be sent again.

    `failure` is what it becomes when it has been sent often enough; None: the line is not at
    fault and never fails for this. `after_s` is what the server asked for (Retry-After).
    """

    reason: str
    failure: Failure | None = None
    after_s: float = 0.0


def judge(response: httpx.Response) -> Answer | Failure | TryAgain:
    status = response.status_code
    if status in _BUSY_OR_DOWN:
        return TryAgain(reason=f"HTTP {status}", after_s=_retry_after_s(response))
    if not response.is_success:
        failure = _failure(response)
        # 501 says what the server cannot do at all; any other 5xx may be an accident.
        if status >= 500 and status != 501:
            return TryAgain(reason=f"HTTP {status}", failure=failure)
        return failure
    try:
        body = msgspec.json.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the answer is no JSON: {error}"
        return TryAgain(
            reason=message, failure=Failure(code="bad_response", message=message, status=status)
        )
    if _aborted(body):
        message = 'the server gave the request up (finish_reason "abort", or status "failed")'
        return TryAgain(reason=message, failure=_with_body(response, "aborted", message))
    return Answer(
        status=status,
        request_id=_request_id(response, body),
        body=_one_line(response.content),
        **_usage(body),
    )


def _aborted(body: Any) -> bool:
    if isinstance(body, dict) and body.get("object") == "response":
        return body.get("status") in ("cancelled", "failed")
    choices = body.get("choices") if isinstance(body, dict) else None
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices
    )


# The names of chat and completions, then those of /v1/responses; SGLang has reasoning tokens of the
# former beside the others too.
_TOKENS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "prompt_tokens": (("prompt_tokens",), ("input_tokens",)),
    "completion_tokens": (("completion_tokens",), ("output_tokens",)),
    "cached_tokens": (
        ("prompt_tokens_details", "cached_tokens"),
        ("input_tokens_details", "cached_tokens"),
    ),
    "reasoning_tokens": (
        ("completion_tokens_details", "reasoning_tokens"),
        ("output_tokens_details", "reasoning_tokens"),
        ("reasoning_tokens",),
    ),
}
"""Field of `Answer` -> where an answer's ``usage`` may have it."""


def _usage(body: Any) -> dict[str, int]:
    usage = body.get("usage") if isinstance(body, dict) else None
    return {
        name: next((count for place in places if (count := _count(usage, place))), 0)
        for name, places in _TOKENS.items()
    }


def _count(value: Any, place: Sequence[str]) -> int | None:
    for name in place:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int) else None


def _failure(response: httpx.Response) -> Failure:
    status = response.status_code
    return _with_body(response, f"http_{status}", _message(response) or f"HTTP {status}")


def _with_body(response: httpx.Response, code: str, message: str) -> Failure:
    try:
        parsed = msgspec.json.decode(response.content)
        body = _one_line(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        parsed, body = None, msgspec.json.encode(response.text[:_MAX_TEXT])
    return Failure(
        code=code,
        message=message,
        status=response.status_code,
        request_id=_request_id(response, parsed),
        body=body,
    )


def _message(response: httpx.Response) -> str | None:
    """The reason in an error response, wherever OpenAI, SGLang and FastAPI put it."""
    try:
        body = msgspec.json.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    nested = body.get("error")
    places = [nested.get("message") if isinstance(nested, dict) else nested]
    places += [body.get("message"), body.get("detail")]
    return next((text for text in places if isinstance(text, str) and text), None)


def _request_id(response: httpx.Response, body: Any) -> str:
    header = response.headers.get("x-request-id")
    in_body = body.get("id") if isinstance(body, dict) else None
    return str(header or in_body or "")


def _one_line(content: bytes) -> bytes:
    """The JSON as the server wrote it, unless it was spread over lines."""
    if b"\n" in content or b"\r" in content:
        return msgspec.json.format(content, indent=-1)
    return content


def _retry_after_s(response: httpx.Response) -> float:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0  # the other form is a date: not sent here
