"""What the store holds, as read-only values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Of a batch, in OpenAI's words.

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
"""Those after which others come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """An uploaded file, or the results of a batch. Times are seconds of the epoch, UTC.

    owner     digest of the API key it belongs to
    batch_id  of a file of results; its lines are rows of the store, not bytes on a disk
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
    """Something wrong with an input file. `line` counts from 1; None: the file as a whole."""

    code: str
    message: str
    param: str | None
    line: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a client asks for.

    tenant                  for fair shares: `metadata.tenant`, within the owner
    window                  as the client wrote it, "24h"
    output_expires_after_s  how long the results are kept [s]; None: until they are deleted
    num_bytes               of the input file
    num_lines               of the input file, where it was counted
    """

    owner: str
    tenant: str
    endpoint: str
    input_file_id: str
    window: str
    window_s: int
    metadata: Mapping[str, str] | None
    output_expires_after_s: int | None
    num_bytes: int = 0
    num_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as it is now.

    times   when it came to a state: OpenAI's name without ``_at`` -> seconds of the epoch
    ending  the status it will end with, once it is known and until it has come; lines that have no
            result by then get none
    validated_by  the server that reads, or has read, its lines
    """

    id: str
    request: NewBatch
    status: Status
    ending: Status | None
    created_at: int
    expires_at: int
    times: Mapping[str, int]
    faults: tuple[Fault, ...]
    total: int
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    output_file_id: str | None
    error_file_id: str | None
    validated_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLine:
    """A line of an input file that was found to be right. `prefix_key`: see
    `cosched.batch.prefix`."""

    number: int
    custom_id: str
    offset: int
    num_bytes: int
    prefix_key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line that was taken to be sent: where it stands in the input file."""

    number: int
    custom_id: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of a line. `data` is the line of the output file, or of the error file. Of the
    input tokens some may have been cached, of the output some be reasoning."""

    batch_id: str
    number: int
    is_answer: bool
    data: bytes
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
