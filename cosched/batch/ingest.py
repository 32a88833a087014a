"""Validation: the lines of an input file are checked and put into the store, or what is wrong is
told by line number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from cosched.batch.config import BatchesConfig
from cosched.batch.data import Batch, Fault, NewLine
from cosched.batch.files import FileStore
from cosched.batch.jsonl.lines import (
    BadLine,
    IdSet,
    RawLine,
    RequestLine,
    duplicate_of,
    parse_line,
    raw_lines,
)
from cosched.batch.models import ServedModels
from cosched.batch.prefix import prefix_key
from cosched.batch.store import BatchStore
from cosched.limits.table import ANY_MODEL, Scope

MAX_FAULTS = 1000
"""Most that are told of one file; the first ones."""

_LINES_PER_PAGE = 500


@dataclass(frozen=True, slots=True)
class LineRules:
    """What lines are checked against.

    models  None where they are not known
    scope   of the model, for the bounds of the bodies' fields
    """

    config: BatchesConfig
    models: ServedModels | None = None
    scope: Scope = ANY_MODEL

    def parse(self, raw: RawLine) -> RequestLine | BadLine:
        """With the checks and the texts of `run_batch`, and the model. A line with a field beyond
        its bound passes: it fails alone, by `parse_to_send`, and not with its batch."""
        return self._parse(raw, None)

    def parse_to_send(self, raw: RawLine) -> RequestLine | BadLine:
        """The same, with the bounds of the fields."""
        return self._parse(raw, self.scope)

    def _parse(self, raw: RawLine, scope: Scope | None) -> RequestLine | BadLine:
        line = parse_line(
            raw,
            max_line_bytes=self.config.max_line_bytes,
            limit_name="batches.max_line_bytes",
            scope=scope,
        )
        if isinstance(line, BadLine) or self.models is None:
            return line
        fault = self.models.fault(line.body)
        if fault is None:
            return replace(line, body=self.models.addressed(line.body))
        return BadLine(
            number=line.number,
            custom_id=line.custom_id,
            code="model_not_found",
            message=fault,
            param="body.model",
        )


def validate(
    batch: Batch, *, store: BatchStore, files: FileStore, rules: LineRules, server: str
) -> None:
    """Bring `batch` from validating to in_progress or failed. It may be interrupted at any moment,
    and is then begun again; ends early when the batch is no longer validated by this server."""
    if not store.begin_validation(batch.id, server=server):
        return
    faults: list[Fault] = []
    page: list[NewLine] = []
    try:
        content = files.open(batch.request.input_file_id)
    except FileNotFoundError:
        message = f"the input file {batch.request.input_file_id!r} was deleted"
        store.reject(
            batch.id,
            [Fault(code="file_not_found", message=message, param="input_file_id", line=None)],
            server=server,
        )
        return
    with content:
        for found in _checked(content, endpoint=batch.request.endpoint, rules=rules):
            if isinstance(found, Fault):
                faults.append(found)
                if len(faults) >= MAX_FAULTS:
                    break
                continue
            page.append(found)
            # Once something is wrong, no line will be sent.
            if len(page) >= _LINES_PER_PAGE:
                if not store.add_lines(batch.id, () if faults else page, server=server):
                    return
                page.clear()
    if faults:
        store.reject(batch.id, faults, server=server)
    elif store.add_lines(batch.id, page, server=server):
        store.accept(batch.id, server=server)


def _checked(content: BinaryIO, *, endpoint: str, rules: LineRules) -> Iterator[NewLine | Fault]:
    config = rules.config
    ids = IdSet(max_ids=config.max_lines)
    num_lines = 0
    for raw in raw_lines(content, max_line_bytes=config.max_line_bytes):
        if raw.is_empty:
            continue
        num_lines += 1
        if num_lines > config.max_lines:
            message = f"a batch may have {config.max_lines} lines (batches.max_lines)"
            yield Fault(code="too_many_lines", message=message, param=None, line=raw.number)
            return
        line = rules.parse(raw)
        if isinstance(line, RequestLine):
            if not ids.add(line.custom_id):
                line = duplicate_of(line)
            elif line.url != endpoint:
                line = _other_endpoint(line, endpoint)
        if isinstance(line, BadLine):
            yield Fault(code=line.code, message=line.message, param=line.param, line=line.number)
            continue
        assert raw.data is not None
        yield NewLine(
            number=line.number,
            custom_id=line.custom_id,
            offset=content.tell() - len(raw.data),
            num_bytes=len(raw.data),
            prefix_key=prefix_key(line.body),
        )
    if not num_lines:
        yield Fault(code="empty_file", message="the file has no lines", param=None, line=None)


def _other_endpoint(line: RequestLine, endpoint: str) -> BadLine:
    return BadLine(
        number=line.number,
        custom_id=line.custom_id,
        code="mismatched_endpoint",
        message=f"url is {line.url}, but the batch is for {endpoint}",
        param="url",
    )
