"""Validation of an input file: its lines are added to the store, or its faults are reported. Later
they are read to be sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, BinaryIO

import msgspec

from cosched.batch.batch_records import Batch, Fault, Line, NewLine
from cosched.batch.config import BatchesConfig
from cosched.batch.documents import Claim
from cosched.batch.files import FileStore
from cosched.batch.jsonl.lines import (
    UNREADABLE,
    BadLine,
    IdSet,
    RawLine,
    RequestLine,
    duplicate_of,
    parse_line,
    raw_lines,
)
from cosched.batch.jsonl.prefix_order import prefix_key
from cosched.batch.storage import FilesUnavailableError
from cosched.batch.store import BatchStore
from cosched.limits.bodies import without_effect
from cosched.limits.bounds import ANY_MODEL, Scope

MAX_FAULTS = 1000
"""Most faults that are reported of one file."""
_LINES_PER_PAGE = 500
_BATCH_BYTES = 1 << 16
"""As which a batch counts beside its bytes, where keys take turns."""
_ANY_MODEL_NAME = "default"
"""SGLang's name for the served model, whatever its name."""


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Named(msgspec.Struct):
    model: Any = None


class _Drawn(msgspec.Struct):
    seed: Any = None
    temperature: Any = None
    top_k: Any = None


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What ``GET /v1/models`` lists: the model by its names, and LoRA adapters. SGLang itself
    answers any other name with the model that it serves."""

    names: frozenset[str]
    adapters: frozenset[str]

    @classmethod
    def of_listing(cls, content: bytes) -> ServedModels | None:
        """None: the listing cannot be read."""
        try:
            cards = msgspec.json.decode(content, type=_Cards).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return cls(
            names=frozenset(card.id for card in cards if card.parent is None),
            adapters=frozenset(card.id for card in cards if card.parent is not None),
        )

    def fault(self, body: bytes) -> str | None:
        """Why the model that the JSON `body` names is not served; None: it is, or none is named."""
        model = msgspec.json.decode(body, type=_Named).model
        names = self.names | {_ANY_MODEL_NAME}
        if not isinstance(model, str) or model in names or model in self.adapters:
            return None
        for name in names:
            if model.startswith(f"{name}:") and model[len(name) + 1 :].strip() in self.adapters:
                return None
        served = ", ".join(sorted(self.names | self.adapters))
        return f"the model {model!r} is not served here; served: {served}"

    def addressed(self, body: bytes) -> bytes:
        """The body as SGLang understands it: ``model:adapter``. For an adapter alone, the base
        model would answer."""
        model = msgspec.json.decode(body, type=_Named).model
        if not isinstance(model, str) or model not in self.adapters or model in self.names:
            return body
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        named = f"{min(self.names, default=_ANY_MODEL_NAME)}:{model}"
        return msgspec.json.encode({**fields, "model": named})


@dataclass(frozen=True, slots=True)
class LineRules:
    """What lines are checked against. `models` is None if they are not known; `scope` is the
    model's, for the bounds of the bodies' fields."""

    config: BatchesConfig
    models: ServedModels | None = None
    scope: Scope = ANY_MODEL

    def parse(self, raw: RawLine, *, scope: Scope | None = None) -> RequestLine | BadLine:
        """As `run_batch`, and with the model. Without a `scope` the bounds of fields and the model
        are not checked: a line with such a fault fails alone, in `read`, not with its batch."""
        line = parse_line(
            raw,
            max_line_bytes=self.config.max_line_bytes,
            limit_name="batches.max_line_bytes",
            scope=scope,
        )
        if isinstance(line, BadLine) or self.models is None or scope is None:
            return line
        fault = self.models.fault(line.body)
        if fault is None:
            return replace(line, body=self.models.addressed(line.body))
        return _bad(line, "model_not_found", fault, "body.model")

    def without_effect(self, body: bytes) -> Sequence[str]:
        """Fields of the JSON `body` that the server cannot keep to."""
        if b'"seed"' not in body:
            return ()
        drawn = msgspec.json.decode(body, type=_Drawn)
        return without_effect(msgspec.structs.asdict(drawn), self.scope)

    def read(
        self, taken: Sequence[Line], content: BinaryIO | OSError
    ) -> list[RequestLine | BadLine]:
        """Valid lines of an input file, to be sent. An OSError fails all of them."""
        found: list[RequestLine | BadLine] = []
        try:
            if isinstance(content, OSError):
                raise content
            for line in taken:
                content.seek(line.start)
                raw = RawLine(number=line.number, data=content.read(line.num_bytes))
                read = self.parse(raw, scope=self.scope)
                # A bad line too has the id that it had when the file was validated.
                found.append(replace(read, custom_id=line.custom_id))
        except OSError as error:
            message = f"the input file cannot be read: {error.strerror}"
            return [_bad(line, "input_unreadable", message, None) for line in taken]
        return found


class ValidationTurns:
    """Whose file is validated next: keys take turns, however many files wait of each."""

    def __init__(self) -> None:
        self._num_bytes: dict[str, int] = {}
        """Owner with waiting batches -> bytes of those that had a turn."""

    def next(self, waiting: Sequence[Batch]) -> Batch:
        """The first batch of the owner of whose files the fewest bytes were validated since all of
        these owners wait."""
        owners = {batch.owner for batch in waiting}
        known = [self._num_bytes[owner] for owner in owners if owner in self._num_bytes]
        least = min(known, default=0)
        self._num_bytes = {owner: self._num_bytes.get(owner, least) for owner in owners}
        chosen = min(waiting, key=lambda batch: self._num_bytes[batch.owner])
        self._num_bytes[chosen.owner] += chosen.num_bytes + _BATCH_BYTES
        return chosen


def validate(
    batch: Batch, *, store: BatchStore, files: FileStore, rules: LineRules, server: str
) -> None:
    """Move `batch` from validating to in_progress or failed. May be interrupted and repeated; ends
    early if this server no longer validates the batch."""
    if not store.begin_validation(batch.id, server=server):
        return
    faults: list[Fault] = []
    page: list[NewLine] = []
    ignored: set[str] = set()
    try:
        content = files.open(batch.input_file_id)
    except FileNotFoundError:
        message = f"the input file {batch.input_file_id!r} was deleted"
        fault = Fault(code="file_not_found", message=message, param="input_file_id", line=None)
        store.reject(batch.id, [fault], server=server)
        return
    with content:
        for found in _checked(content, batch.endpoint, rules, ignored):
            if isinstance(found, Fault):
                faults.append(found)
                if len(faults) >= MAX_FAULTS:
                    break
                continue
            page.append(found)
            # After a fault no line will be sent.
            if len(page) >= _LINES_PER_PAGE:
                if not store.add_lines(batch.id, () if faults else page, server=server):
                    return
                page.clear()
    if faults:
        store.reject(batch.id, faults, server=server)
    elif store.add_lines(batch.id, page, server=server):
        store.accept(batch.id, server=server, ignored=ignored)


def take_lines(
    batches: Mapping[str, Batch],
    claim: Claim,
    *,
    store: BatchStore,
    files: FileStore,
    rules: LineRules,
    max_bytes: int,
    server: str,
) -> tuple[list[tuple[Batch, RequestLine | BadLine]], FilesUnavailableError | None]:
    """Take lines of these batches (by id) and read them, as `BatchStore.take`. None is taken of a
    batch whose file is unavailable now."""
    away: FilesUnavailableError | None = None
    contents: dict[str, BinaryIO | OSError] = {}
    with ExitStack() as stack:
        for part in claim.parts:
            name = part.batch_id
            try:
                contents[name] = stack.enter_context(files.open(batches[name].input_file_id))
            except FilesUnavailableError as error:
                away = error
            except OSError as error:
                contents[name] = error
        parts = tuple(part for part in claim.parts if part.batch_id in contents)
        taken = store.take(replace(claim, parts=parts), max_bytes=max_bytes, server=server)
        return [
            (batches[name], line)
            for name, some in groupby(taken, key=itemgetter(0))
            for line in rules.read([line for _, line in some], contents[name])
        ], away


def _checked(
    content: BinaryIO, endpoint: str, rules: LineRules, ignored: set[str]
) -> Iterator[NewLine | Fault]:
    """`ignored` gets the fields of lines that have no effect."""
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
        has_id = isinstance(line, RequestLine) or line.code in UNREADABLE
        if has_id and line.custom_id is not None:
            if not ids.add(line.custom_id):
                line = duplicate_of(line)
            elif isinstance(line, RequestLine) and line.url != endpoint:
                message = f"the url {line.url} does not match the batch endpoint {endpoint}"
                line = _bad(line, "invalid_url", message, "url")
        custom_id = line.custom_id
        # A line whose JSON is wrong fails alone, when it is read, if it has an id to fail under.
        if isinstance(line, BadLine) and (line.code not in UNREADABLE or custom_id is None):
            yield Fault(code=line.code, message=line.message, param=line.param, line=line.number)
            continue
        assert raw.data is not None and custom_id is not None
        if isinstance(line, RequestLine):
            ignored.update(f"body.{name}" for name in rules.without_effect(line.body))
        yield NewLine(
            number=line.number,
            custom_id=custom_id,
            start=content.tell() - len(raw.data),
            num_bytes=len(raw.data),
            prefix_key=prefix_key(line.body) if isinstance(line, RequestLine) else b"",
        )
    if not num_lines:
        yield Fault(code="empty_file", message="the file has no lines", param=None, line=None)


def _bad(line: Line | RequestLine, code: str, message: str, param: str | None) -> BadLine:
    return BadLine(
        number=line.number, custom_id=line.custom_id, code=code, message=message, param=param
    )
