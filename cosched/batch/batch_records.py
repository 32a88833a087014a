"""What the store holds, as read-only values. Times are seconds of the epoch, UTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cosched.batch.jsonl.lines import URLS


class Status(StrEnum):
    """Of a batch, as in OpenAI's API.

    validating → failed, or in_progress → finalizing → completed or expired;
    from validating and in_progress also cancelling → cancelled.
    """

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)
"""The statuses that are not final."""
WITH_LINES = (Status.VALIDATING, Status.IN_PROGRESS)
"""Those with lines to be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """An uploaded file, or the results of a batch.

    owner     digest of the API key it belongs to
    batch_id  of a file of results, whose lines may be rows of the database
    """

    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int | None
    batch_id: str | None = None
    is_errors: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error in an input file. `line` counts from 1; None: the file as a whole."""

    code: str
    message: str
    param: str | None
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a client asks for.

    tenant                  `metadata.tenant`: owners divide their share among tenants
    completion_window       as the client wrote it, "24h"
    output_expires_after_s  how long the results are kept [s]; None: until they are deleted
    num_bytes               of the input file
    num_lines               of the input file; 0: not counted
    model                   that the server serves; None: not known
    ignored                 fields of the request that have no effect, and then ``body.`` fields of
                            lines
    traceparent             of the span of the request (`cosched.batch.tracing`)
    """

    owner: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: Mapping[str, str] | None
    output_expires_after_s: int | None
    num_bytes: int = 0
    num_lines: int = 0
    model: str | None = None
    ignored: Sequence[str] = ()
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a server offers to batches: its model's name, None where it is not known, and the
    endpoints that the model has."""

    model: str | None = None
    endpoints: Sequence[str] = URLS


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(NewBatch):
    """A batch as it is now.

    times         status -> when the batch got it
    closed        of the failed lines, those without an answer when it was cancelled or its window
                  ended
    ending        the final status, from when it is decided until the batch has it. Lines without a
                  result by then get none
    validated_by  the server that reads, or has read, its lines
    """

    id: str
    status: Status
    ending: Status | None
    created_at: int
    expires_at: int
    times: Mapping[str, int]
    faults: tuple[Fault, ...]
    total: int
    completed: int
    failed: int
    closed: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    device_s: float
    output_file_id: str | None
    error_file_id: str | None
    validated_by: str | None = None

    @property
    def num_left(self) -> int:
        """Lines without a result."""
        return self.total - self.completed - self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A valid line, and where it is in the input file."""

    number: int
    custom_id: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLine(Line):
    """`prefix_key`: see `cosched.batch.jsonl.prefix_order.text_key`."""

    prefix_key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of a line. `data` is its line of the output or error file. `cached_tokens` are
    part of the input tokens, `reasoning_tokens` of the output tokens. `device_s`: what it cost
    [s]."""

    batch_id: str
    number: int
    is_answer: bool
    data: bytes
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    device_s: float = 0.0
