"""The lines a job writes: OpenAI's batch output format, and how each names the line it answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from cosched.batch.jsonl.lines import BadLine, RequestLine

_ID = re.compile(r"batch_req_([0-9a-f]{16})([0-9a-f]{8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server answered. `body` is JSON without line breaks. Of the prompt some tokens may
    have been cached, of the completion some be reasoning, as far as the server says so."""

    status: int
    request_id: str
    body: bytes
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a line has no answer. The last three are None when no response is at fault."""

    code: str
    message: str
    param: str | None = None
    status: int | None = None
    request_id: str | None = None
    body: bytes | None = None


Outcome = Answer | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One output line, ready to be written: to the output, or to the error file. `number` is 0
    where nobody knows which line of the input it answers."""

    number: int
    is_answer: bool
    data: bytes


class RecordWriter:
    """Makes records for one job.

    The `id` of a record holds 16 digits that name the job and the number of the line it answers.
    Those of `run_batch` begin the digest of the input. So the outputs alone say what is done: there
    is no second file that could disagree with them.
    """

    def __init__(self, *, digest: str) -> None:
        """`digest`: 16 hexadecimal digits or more."""
        self._digest = digest[:16]

    def record(self, line: RequestLine, outcome: Outcome) -> Record:
        if isinstance(outcome, Failure):
            return self._failed(line.number, line.custom_id, outcome)
        entry = {
            "id": self._id(line.number),
            "custom_id": line.custom_id,
            "response": _response(outcome.status, outcome.request_id, outcome.body),
            "error": None,
        }
        return Record(number=line.number, is_answer=True, data=_jsonl(entry))

    def adopt(self, data: bytes, *, number: int, is_answer: bool) -> Record:
        """A record that another writer has made, of line `number` of this job. Whatever else it
        holds stays as it is."""
        entry = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        named = {**entry, "id": self._id(number)}
        return Record(number=number, is_answer=is_answer, data=_jsonl(named))

    def bad_line(self, line: BadLine) -> Record:
        failure = Failure(code=line.code, message=line.message, param=line.param)
        return self._failed(line.number, line.custom_id, failure)

    def _failed(self, number: int, custom_id: str | None, failure: Failure) -> Record:
        response = None
        if failure.status is not None:
            response = _response(failure.status, failure.request_id or "", failure.body or b"null")
        entry = {
            "id": self._id(number),
            "custom_id": custom_id,
            "line": number or None,
            "response": response,
            "error": {
                "code": failure.code,
                "message": failure.message,
                "param": failure.param,
                "line": number or None,
            },
        }
        return Record(number=number, is_answer=False, data=_jsonl(entry))

    def _id(self, number: int) -> str:
        return f"batch_req_{self._digest}{number:08x}"

    def line_answered_by(self, data: bytes) -> int | None:
        """The input line that `data`, a line of an output, answers; None when it is no record.

        The whole line is checked to be JSON: half a record answers nothing.
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


class _Written(msgspec.Struct):
    id: str
    custom_id: str | None


def _response(status: int, request_id: str, body: bytes) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}


def _jsonl(entry: dict[str, Any]) -> bytes:
    return msgspec.json.encode(entry) + b"\n"
