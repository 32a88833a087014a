"""Answers a data set of requests of any size on many replicas, as a stage of Ray Data.

Lines are sorted by prompt prefix over the whole set and cut into blocks of similar prompts; each
block goes to the next free replica. Its results are appended to its own files as they arrive. Lines
that have a result are not sent again, whether Ray repeats a block or the whole run is repeated.

    python -m cosched.ray_data -i s3://bucket/in.parquet -o /mnt/shared/out \\
        --base-url http://a:30000 --base-url http://b:30000
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from cyclopts import Parameter

from cosched.batch.jsonl.client import Client, RetryRules
from cosched.batch.jsonl.config import normal_base_url
from cosched.batch.jsonl.errors import JobFileError, ServerGoneError, first_error
from cosched.batch.jsonl.journal import AppendFile
from cosched.batch.jsonl.line_results import Answer, Outcome, record_of
from cosched.batch.jsonl.lines import BadLine, RawLine, RequestLine, parse_line
from cosched.batch.jsonl.parquet_decoder import COLUMNS, line_of
from cosched.batch.jsonl.prefix_order import LINES_AT_SERVER, prefix_key
from cosched.cli import Count, JsonOption, new_app, run, whole
from cosched.errors import ConfigError

__all__ = ["answer", "finished_keys", "main", "read"]

_KEY_BYTES = 12
_KEYS = np.dtype(f"S{_KEY_BYTES}")
_ANSWERS, _ERRORS = "answers", "errors"
_COUNTS = ("answered", "failed", "prompt_tokens", "completion_tokens")
_BLOCKS_AT_A_TIME = 2
"""At one replica, one actor each: the next block fills what the end of the last leaves idle."""


def read(path: str) -> Any:
    """A data set of JSONL (a text file or a folder of them), or of Parquet if `path` ends in
    ``.parquet``; any path that Ray reads from."""
    ray = _ray()
    if path.rstrip("/").endswith(".parquet"):
        return ray.data.read_parquet(path).select_columns(list(COLUMNS))
    return ray.data.read_text(path)


def answer(
    dataset: Any,
    *,
    replicas: Sequence[str],
    out: str,
    in_flight: int = LINES_AT_SERVER,
    lines_per_block: int = 2048,
    max_line_bytes: int = 16 << 20,
    max_wait_s: float = 60.0,
    api_key: str | None = None,
) -> Any:
    """Answer the lines of `dataset`: rows with a column ``text`` (a line of JSON), or with the
    columns of the batch format. A lazy data set of counts, with a row for each block.

    replicas         URLs of servers
    out              folder that all machines see: ``answers/*.jsonl`` and ``errors/*.jsonl`` in the
                     format of `run_batch`, without line numbers. For one run at a time
    in_flight        most lines at a replica, at least 2
    lines_per_block  lines with similar prompts, which one replica answers
    max_wait_s       how long a replica may answer nothing before its lines go to the others [s]

    JobFileError: `out` cannot be read or written. A line is identified by its ``custom_id``; that
    these are unique is not checked.
    """
    ray = _ray()
    done = ray.put(finished_keys(out))
    prepared = dataset.map_batches(
        _prepare,
        batch_format="pyarrow",
        fn_kwargs={"done": done, "max_line_bytes": max_line_bytes},
    )
    tickets = ray.remote(num_cpus=0)(_Tickets).remote()
    return (
        prepared.sort("order")
        .repartition(target_num_rows_per_block=lines_per_block)
        .map_batches(
            _Answerer,
            batch_format="pyarrow",
            batch_size=None,
            fn_constructor_kwargs={
                "replicas": tuple(replicas),
                "next_ticket": tickets.take.remote,
                "out": out,
                "in_flight": in_flight // _BLOCKS_AT_A_TIME,
                "max_line_bytes": max_line_bytes,
                "max_wait_s": max_wait_s,
                "api_key": api_key,
            },
            concurrency=_BLOCKS_AT_A_TIME * len(replicas),
            num_cpus=0,
        )
    )


def finished_keys(out: str) -> np.ndarray[Any, Any]:
    """Keys of the lines that have a result in `out`, sorted, `_KEY_BYTES` each. Makes `out`, and
    cuts off the torn records of killed processes. JobFileError."""
    keys: list[bytes] = []
    try:
        for name in (_ANSWERS, _ERRORS):
            folder = Path(out) / name
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("*.jsonl"):
                keys += _keys_of(path)
    except OSError as error:
        raise JobFileError(f"{error.filename or out}: {error.strerror}") from None
    return np.sort(np.array(keys, dtype=_KEYS))


class _Written(msgspec.Struct):
    id: str


def _keys_of(path: Path) -> Iterator[bytes]:
    whole_bytes = 0
    with path.open("rb") as file:
        for data in file:
            if data.endswith(b"\n"):
                whole_bytes += len(data)
                try:
                    record_id = msgspec.json.decode(data, type=_Written).id
                    yield bytes.fromhex(record_id[-2 * _KEY_BYTES :])
                except ValueError as error:  # msgspec's errors too
                    raise JobFileError(f"{path} has a line that is not a record: {error}") from None
    if whole_bytes != path.stat().st_size:
        os.truncate(path, whole_bytes)


def _prepare(table: Any, *, done: Any, max_line_bytes: int) -> Any:
    """The lines that have no result, each with its sort key."""
    import pyarrow as pa
    import ray

    keys = ray.get(done)
    found: dict[str, list[Any]] = {"order": [], "key": [], "data": []}
    for row in table.to_pylist():
        data = row["text"].encode() if "text" in row else line_of(row)
        line = _parsed(data, max_line_bytes)
        key = _key_of(line, data)
        place = int(np.searchsorted(keys, np.array(key, dtype=_KEYS)))
        if place < len(keys) and keys[place] == np.array(key, dtype=_KEYS):
            continue
        order = prefix_key(line.body) if isinstance(line, RequestLine) else b""
        found["order"].append(order.hex())
        found["key"].append(key)
        found["data"].append(data)
    kinds = (pa.string(), pa.binary(), pa.large_binary())
    columns = zip(found.values(), kinds, strict=True)
    return pa.table({name: pa.array(*one) for name, one in zip(found, columns, strict=True)})


def _parsed(data: bytes, max_line_bytes: int) -> RequestLine | BadLine:
    # Only a reader of the whole input would know its number.
    raw = RawLine(number=0, data=data if len(data) <= max_line_bytes else None)
    return parse_line(raw, max_line_bytes=max_line_bytes)


def _key_of(line: RequestLine | BadLine, data: bytes) -> bytes:
    name = data if line.custom_id is None else b"id:" + line.custom_id.encode()
    return blake2b(name, digest_size=_KEY_BYTES).digest()


class _Tickets:
    """Numbers the actors, which then spread over the replicas."""

    def __init__(self) -> None:
        self._next = -1

    def take(self) -> int:
        self._next += 1
        return self._next


class _Answerer:
    """Sends blocks to one replica, or to the others once it is gone."""

    def __init__(
        self,
        *,
        replicas: Sequence[str],
        next_ticket: Callable[[], Any],
        out: str,
        in_flight: int,
        max_line_bytes: int,
        max_wait_s: float,
        api_key: str | None,
    ) -> None:
        import ray

        first = ray.get(next_ticket()) % len(replicas)
        self._clients = [
            Client(
                base_url=url,
                concurrency=in_flight,
                rules=RetryRules(max_wait_s=max_wait_s),
                api_key=api_key,
            )
            for url in (*replicas[first:], *replicas[:first])
        ]
        self._slots = asyncio.Semaphore(in_flight)
        self._out = Path(out)
        self._max_line_bytes = max_line_bytes

    async def __call__(self, table: Any) -> AsyncIterator[dict[str, list[int]]]:
        """Answer a block. ServerGoneError if no replica answers."""
        block = blake2b(b"".join(table["key"].to_pylist()), digest_size=16).hexdigest()
        with _Journal(self._out, block) as journal:
            try:
                async with asyncio.TaskGroup() as group:  # an error cancels the other lines
                    for row in table.to_pylist():
                        if row["key"] not in journal.done:
                            group.create_task(self._answer(row["data"], row["key"], journal))
            except ExceptionGroup as errors:
                raise first_error(errors) from errors
            yield {name: [journal.counts[name]] for name in _COUNTS}

    async def _answer(self, data: bytes, key: bytes, journal: _Journal) -> None:
        line = _parsed(data, self._max_line_bytes)
        outcome = None
        if isinstance(line, RequestLine):
            async with self._slots:
                outcome = await self._send(line)
        journal.write(line, outcome, record_id=f"batch_req_{key.hex()}")

    async def _send(self, line: RequestLine) -> Outcome:
        gone: ServerGoneError | None = None
        for client in self._clients:
            try:
                return await client.send(line)
            except ServerGoneError as error:
                gone = error
        assert gone is not None, "there is a replica"
        raise gone


class _Journal:
    """The results of one block. `done`: keys that an earlier try has written."""

    def __init__(self, out: Path, block: str) -> None:
        paths = [out / name / f"{block}.jsonl" for name in (_ANSWERS, _ERRORS)]
        self.done = {key for path in paths if path.exists() for key in _keys_of(path)}
        # Not locked: file systems that machines share may have no locks.
        self._answers, self._errors = (AppendFile(str(path), is_locked=False) for path in paths)
        self.counts = dict.fromkeys(_COUNTS, 0)

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._answers, self._errors):
            file.close()
            if not os.path.getsize(file.path):
                os.remove(file.path)

    def write(
        self, line: RequestLine | BadLine, outcome: Outcome | None, *, record_id: str
    ) -> None:
        record = record_of(line, outcome, record_id=record_id)
        (self._answers if record.is_answer else self._errors).append(record.data)
        self.counts["answered" if record.is_answer else "failed"] += 1
        if isinstance(outcome, Answer):
            self.counts["prompt_tokens"] += outcome.prompt_tokens
            self.counts["completion_tokens"] += outcome.completion_tokens


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError(f"no Ray Data ({error}): pip install 'cosched[ray]'") from None
    return ray


app = new_app(
    "ray",
    "Answer a data set of requests on many replicas, with Ray Data.\n\n"
    "The same command again continues where an earlier one ended.",
)
main = partial(run, "ray")


@app.default
@dataclass(kw_only=True)
class RayData(JsonOption):
    input: Annotated[str, Parameter(alias="-i", metavar="PATH")]
    """JSONL, or *.parquet"""
    out: Annotated[str, Parameter(alias="-o", metavar="FOLDER")]
    """folder of the results"""
    base_url: Annotated[tuple[str, ...], Parameter(metavar="URL")]
    """a replica; may be given several times"""
    in_flight: Annotated[int, whole(2)] = LINES_AT_SERVER
    """lines at a replica"""
    lines_per_block: Count = 2048
    """lines with a common beginning, for one replica"""
    api_key: Annotated[str | None, Parameter(metavar="KEY")] = None
    """key of the replicas"""

    def __call__(self) -> int:
        began_s = time.monotonic()
        counts = dict.fromkeys(_COUNTS, 0)
        blocks = answer(
            read(self.input),
            replicas=[normal_base_url(url) for url in self.base_url],
            out=self.out,
            in_flight=self.in_flight,
            lines_per_block=self.lines_per_block,
            api_key=self.api_key,
        )
        for row in blocks.iter_rows():
            for name in _COUNTS:
                counts[name] += int(row[name])
        seconds = round(time.monotonic() - began_s, 3)
        return self.finish({"program": "ray_data", **counts, "seconds": seconds})


if __name__ == "__main__":
    sys.exit(main())
