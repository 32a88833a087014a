"""A decision log, read back record by record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from cosched.core.estimates import Predictor
from cosched.engine.decision_records import (
    FORMAT,
    Decision,
    Header,
    RequestFacts,
    Shapes,
)
from cosched.engine.parts import parts_of
from cosched.errors import ConfigError
from cosched.latency.calibration import CalibratorState
from cosched.latency.predictor import predictor_from_dict

__all__ = ["Entry", "read_log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One decision, and what the log says elsewhere of what it names. Valid until the next one.

    facts       of requests, by seq
    calibrator  None: the policy predicts nothing
    """

    header: Header
    decision: Decision
    facts: dict[int, RequestFacts]
    calibrator: CalibratorState | None


def read_log(path: Path, *, report: Callable[[str], None]) -> Iterator[Entry]:
    """The decisions of a log in their order, from the oldest part that is left.

    A line that cannot be used is left out, and `report` gets file, line number and reason.
    So is a part that does not begin with a header. ConfigError when there is no such file, when it
    is no decision log, and when another version wrote it.
    """
    parts = parts_of(path)
    for part in parts:
        reader = _PartReader()
        with part.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    entry = reader.read(line)
                except _BadLineError as error:
                    if reader.has_header:
                        report(f"{part}:{number}: {error}")
                        continue
                    if len(parts) == 1:
                        raise ConfigError(
                            f"{str(part)!r} is no decision log: it does not begin with a header "
                            f"({error})"
                        ) from None
                    report(f"{part}:{number}: no header, so this part is left out ({error})")
                    break
                if entry is not None:
                    yield entry


class _BadLineError(Exception):
    pass


_decoder = msgspec.json.Decoder(Header | Decision)


class _PartReader:
    def __init__(self) -> None:
        self._header: Header | None = None
        self._facts: dict[int, RequestFacts] = {}
        self._shapes: Shapes = (None, None)
        self._calibrator: CalibratorState | None = None

    @property
    def has_header(self) -> bool:
        return self._header is not None

    def read(self, line: bytes) -> Entry | None:
        """None for a header."""
        try:
            record = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _BadLineError(str(error)) from None
        if isinstance(record, Header):
            if record.format != FORMAT:
                raise ConfigError(
                    f"the decision log has format {record.format}; this version of cosched reads "
                    f"format {FORMAT}"
                )
            self._header = record
            return None
        if self._header is None:
            raise _BadLineError("no header before it")
        for facts in record.requests:
            self._facts[facts.arrival_seq] = facts
        self._read_calibrator(record)
        for seq in _named(record):
            if seq not in self._facts:
                raise _BadLineError(f"it names request {seq}, which no line before it describes")
        return Entry(
            header=self._header,
            decision=record,
            facts=self._facts,
            calibrator=self._calibrator,
        )

    def _read_calibrator(self, record: Decision) -> None:
        shapes = None if self._calibrator is None else self._calibrator.shapes
        if record.shapes is not None:
            try:
                shapes = _shape(record.shapes[0]), _shape(record.shapes[1])
            except ConfigError as error:
                raise _BadLineError(f"shapes: {error}") from None
        state = record.calibrator
        if state is not None:
            if shapes is None:
                raise _BadLineError("a calibrator without shapes, and none before it")
            self._calibrator = msgspec.structs.replace(state, shapes=shapes)


def _shape(data: dict[str, Any] | None) -> Predictor | None:
    return None if data is None else predictor_from_dict(data)


def _named(record: Decision) -> Iterator[int]:
    view, plan, result = record.view, record.plan, record.result
    rows = chain(view.running, view.unfinished, view.online, view.offline, view.asked)
    firsts: Iterator[Any] = (
        row[0] for row in (*rows, *plan.prefill, *plan.preempted, *plan.promised, *result.finished)
    )
    hosted = chain.from_iterable(row[:2] for row in plan.hosted)
    return chain(firsts, plan.held, hosted, *plan.late.values(), *plan.skipped.values())
