"""Records of a run: one per request, one row per iteration.

Times are seconds since the start of the run, on its virtual or wall clock.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cosched.core.request import RequestClass, Slo
from cosched.errors import CoschedError, choices

Floats = npt.NDArray[np.float64]


class RecordError(CoschedError):
    """A record is inconsistent, or a line of a file is not a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request.

    arrival_s              arrival at the server [s]
    sent_s                 when a live client sent it [s]; None: in virtual time
    admitted_s             start of its first prefill chunk [s]; None: never, or not known
    first_token_s          time of its first token [s]; None: no token
    finish_s               when the reply was complete or the request failed [s]; None: it was open
                           when the run ended
    num_output_tokens      tokens generated, of an unfinished reply too
    token_times            times of its tokens [s], ascending; fewer than tokens if a stream packs
                           several into one chunk. None: not kept
    max_tbt_s              largest gap between tokens [s], where `token_times` is not kept
    num_cached_tokens      prompt tokens found in the prefix cache at the first admission; None: not
                           known
    num_lost_tokens        prompt tokens that were computed before and evicted since; None: not
                           known
    num_recomputed_tokens  tokens computed again because of preemption
    num_preemptions        number of preemptions
    pauses                 (preempted, resumed) times [s] of the known preemptions; None: not
                           resumed before the run ended
    finish_reason          as the server reports it (stop, length, abort, …)
    ok                     False: refused, aborted, timed out or broken off
    tenant                 the name of its API key in the server's configuration
    device_s               what it cost [s] (`cosched.predict.cost_account`); None: not known
    slo                    its own targets; the summary's defaults replace None
    priority               of an online request: names its tier
    """

    rid: str
    request_class: RequestClass
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    sent_s: float | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None
    token_times: array[float] | None = None
    max_tbt_s: float | None = None
    num_cached_tokens: int | None = None
    num_lost_tokens: int | None = None
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    pauses: tuple[tuple[float, float | None], ...] = ()
    finish_reason: str | None = None
    ok: bool = True
    tenant: str = ""
    device_s: float | None = None
    slo: Slo = field(default_factory=Slo)
    priority: int = 0

    def __post_init__(self) -> None:
        fault = _fault(self)
        if fault is not None:
            raise RecordError(f"request {self.rid!r}: {fault}")

    @property
    def is_finished(self) -> bool:
        """The reply is complete."""
        return self.ok and self.finish_s is not None

    @property
    def is_open(self) -> bool:
        """Neither complete nor failed when the run ended."""
        return self.ok and self.finish_s is None

    @property
    def first_s(self) -> float | None:
        """Time of the first token [s]; of a complete reply without tokens, its end."""
        if self.first_token_s is None and self.ok:
            return self.finish_s
        return self.first_token_s

    @property
    def ttft_s(self) -> float | None:
        first_s = self.first_s
        return None if first_s is None else first_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Arrival to the end of a complete reply [s]."""
        if self.finish_s is None or not self.ok:
            return None
        return self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens [s], of a complete reply of two tokens or more."""
        if self.num_output_tokens < 2 or self.first_token_s is None:
            return None
        if self.finish_s is None or not self.ok:
            return None
        return (self.finish_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def worst_tbt_s(self) -> float | None:
        """Largest gap between consecutive tokens [s]."""
        if self.token_times is None or len(self.token_times) < 2:
            return self.max_tbt_s
        return float(np.diff(self.token_times).max())

    def emissions(self, *, until_s: float) -> tuple[Floats, float]:
        """(times, tokens per time) of its tokens. Without `token_times` they are spread evenly from
        the first token to the end, or to `until_s` if it is open."""
        if self.first_token_s is None or self.num_output_tokens == 0:
            return np.empty(0), 0.0
        if self.token_times:
            times = np.array(self.token_times)
            return times, self.num_output_tokens / len(times)
        last_s = until_s if self.finish_s is None else self.finish_s
        return np.linspace(self.first_token_s, last_s, self.num_output_tokens), 1.0


def _fault(record: RequestRecord) -> str | None:
    events = [
        (name, getattr(record, name))
        for name in ("arrival_s", "sent_s", "admitted_s", "first_token_s", "finish_s")
        if getattr(record, name) is not None
    ]
    for name, time_s in events:
        if not math.isfinite(time_s):
            return f"{name} is {time_s}"
    for (name, time_s), (next_name, next_s) in pairwise(events):
        if next_s < time_s:
            return f"{next_name} {next_s} is before {name} {time_s}"
    for name in (
        "num_prompt_tokens",
        "num_output_tokens",
        "num_cached_tokens",
        "num_lost_tokens",
        "num_recomputed_tokens",
        "num_preemptions",
    ):
        value = getattr(record, name)
        if value is not None and value < 0:
            return f"{name} is {value}"
    if (record.num_cached_tokens or 0) + (record.num_lost_tokens or 0) > record.num_prompt_tokens:
        return (
            f"num_cached_tokens {record.num_cached_tokens} with num_lost_tokens "
            f"{record.num_lost_tokens} exceeds the prompt"
        )
    for stopped_s, again_s in record.pauses:
        if again_s is not None and again_s < stopped_s:
            return f"it resumed at {again_s}, before it was preempted at {stopped_s}"
    if record.max_tbt_s is not None and not 0 <= record.max_tbt_s < math.inf:
        return f"max_tbt_s is {record.max_tbt_s}"
    return _token_fault(record)


def _token_fault(record: RequestRecord) -> str | None:
    if record.first_token_s is None:
        if record.num_output_tokens:
            return f"{record.num_output_tokens} output tokens but no first_token_s"
        return "token_times but no first_token_s" if record.token_times else None
    if record.num_output_tokens < 1:
        return "first_token_s but no output tokens"
    if not record.token_times:
        return None
    times = record.token_times
    if len(times) > record.num_output_tokens:
        return f"{len(times)} token_times for {record.num_output_tokens} output tokens"
    if times[0] != record.first_token_s:
        return f"token_times begin at {times[0]}, first_token_s is {record.first_token_s}"
    if not math.isfinite(times[-1]) or bool((np.diff(times) < 0).any()):
        return "token_times do not ascend"
    if record.finish_s is not None and times[-1] > record.finish_s:
        return f"token_times end at {times[-1]}, after finish_s {record.finish_s}"
    return None


_FIELDS = tuple(f.name for f in fields(RequestRecord))
_SLO_FIELDS = tuple(f.name for f in fields(Slo))


def record_line(record: RequestRecord, *, with_token_times: bool = True) -> str:
    """The record as one line of JSON; equal records give equal bytes. Without the token times the
    largest gap is kept."""
    entry: dict[str, Any] = {name: getattr(record, name) for name in _FIELDS}
    entry["request_class"] = record.request_class.value
    entry["slo"] = {name: getattr(record.slo, name) for name in _SLO_FIELDS}
    if with_token_times:
        entry["token_times"] = None if record.token_times is None else list(record.token_times)
    else:
        entry["token_times"] = None
        entry["max_tbt_s"] = record.worst_tbt_s
    return json.dumps(entry, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def write_records(
    records: Iterable[RequestRecord], path: Path, *, with_token_times: bool = True
) -> int:
    """Write one line per record in the order given; returns the number of lines."""
    num_lines = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(record_line(record, with_token_times=with_token_times))
            num_lines += 1
    return num_lines


def read_records(path: Path) -> Iterator[RequestRecord]:
    """The records of a file, lazily. RecordError names file, line and reason."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _parse(json.loads(line))
            except (TypeError, ValueError, RecordError) as error:
                raise RecordError(f"{path}:{number}: {error}") from error


def _parse(entry: object) -> RequestRecord:
    if not isinstance(entry, dict):
        raise RecordError("not a JSON object")
    unknown = entry.keys() - set(_FIELDS)
    if unknown:
        raise RecordError(f"unknown keys {choices(unknown)}; choose from {choices(_FIELDS)}")
    given: dict[str, Any] = dict(entry)
    if "request_class" in given:
        given["request_class"] = RequestClass(given["request_class"])
    if given.get("token_times") is not None:
        given["token_times"] = array("d", given["token_times"])
    if "slo" in given:
        given["slo"] = Slo(**given["slo"])
    if "pauses" in given:
        given["pauses"] = tuple((stopped_s, again_s) for stopped_s, again_s in given["pauses"])
    return RequestRecord(**given)


def write_rows(log: ColumnLog, path: Path) -> None:
    """Write one JSON object per row, with a key for each column."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in log.rows():
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


class IterationRecord(NamedTuple):
    """One forward pass. A tuple, because one is made in each iteration and a frozen dataclass of
    this size is several times slower.

    start_s, duration_s  start and duration [s]
    predicted_s          predicted duration [s]; None: not predicted
    num_*_prefill_tokens prompt tokens computed, by class
    num_*_prefills       requests that they belong to
    num_*_decodes        requests that decoded one token, by class
    kv_online_tokens     KV of running online requests [tokens], shared with offline ones or not
    kv_offline_tokens    KV of running offline requests alone [tokens]
    kv_cached_tokens     KV that no running request holds and a prefix match may find [tokens]
    kv_free_tokens       the rest [tokens]; the four add up to the capacity
    planning_s           host time of the decision [s]; not part of virtual time
    """

    start_s: float
    duration_s: float
    predicted_s: float | None = None
    num_online_prefill_tokens: int = 0
    num_offline_prefill_tokens: int = 0
    num_online_prefills: int = 0
    num_offline_prefills: int = 0
    num_online_decodes: int = 0
    num_offline_decodes: int = 0
    kv_online_tokens: int = 0
    kv_offline_tokens: int = 0
    kv_cached_tokens: int = 0
    kv_free_tokens: int = 0
    planning_s: float | None = None


class ColumnLog:
    """Rows of numbers in order of time, stored by column. A column whose name ends in ``_s`` holds
    seconds, NaN where a value is missing; the others hold integers of the array type `whole`."""

    __slots__ = ("_appenders", "_columns")

    def __init__(self, names: Iterable[str], *, whole: str = "q") -> None:
        self._columns: dict[str, array[Any]] = {
            name: array("d" if name.endswith("_s") else whole) for name in names
        }
        self._appenders = tuple(column.append for column in self._columns.values())

    def extend(self, columns: Iterable[Floats]) -> None:
        """The values of each column, in their order."""
        for column, values in zip(self._columns.values(), columns, strict=True):
            column.extend(array(column.typecode, values.astype(column.typecode).tobytes()))

    def append(self, row: Iterable[float | None]) -> None:
        """One value per column, in their order."""
        for append, value in zip(self._appenders, row, strict=True):
            append(math.nan if value is None else value)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def column(self, name: str) -> Floats:
        """A copy of one column; NaN where a value is missing."""
        # A view would lock the array, which could then not grow.
        return np.array(self._columns[name], dtype=np.float64)

    def rows(self) -> Iterator[dict[str, float | None]]:
        """Rows by column name; None where a value is missing."""
        for values in zip(*self._columns.values(), strict=True):
            named = zip(self._columns, values, strict=True)
            yield {name: None if math.isnan(value) else value for name, value in named}


class IterationLog(ColumnLog):
    """The iterations of a run; half a million take 36 MB."""

    __slots__ = ()

    def __init__(self, records: Iterable[IterationRecord] = ()) -> None:
        super().__init__(IterationRecord._fields, whole="i")
        for record in records:
            self.append(record)

    def __getitem__(self, index: int) -> IterationRecord:
        values: Iterator[Any] = (column[index] for column in self._columns.values())
        return IterationRecord._make(None if math.isnan(value) else value for value in values)

    def __iter__(self) -> Iterator[IterationRecord]:
        return (self[index] for index in range(len(self)))

    @property
    def end_s(self) -> Floats:
        """End of each iteration [s]."""
        return self.column("start_s") + self.column("duration_s")
