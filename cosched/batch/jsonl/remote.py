"""A job as batches of the server: its lines are uploaded, and fetched when they are answered.

The outputs are the same as when lines are sent one by one, and they alone say what is done
(`cosched.batch.jsonl.journal`). `<out>.batches.json` lists the batches that are still to be
fetched. It is written before a batch is made, and the batches have its name in their metadata, so
no batch is forgotten.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from cosched.batch.jsonl.batch_api import ENDED, BatchApi, NotFoundError, RemoteBatch
from cosched.batch.jsonl.errors import JobFileError, QuotaError, ServerRefusedError
from cosched.batch.jsonl.journal import Journal, save_json
from cosched.batch.jsonl.line_results import RecordWriter, encode_line, failure_in
from cosched.batch.jsonl.lines import BadLine, RequestLine
from cosched.batch.jsonl.report import Snapshot
from cosched.batch.jsonl.runner import JobCounts
from cosched.batch.jsonl.source import Source

_NAME = "run_batch"
"""In a batch's metadata: the name of its job."""
_FORMAT = 1
_MAX_LINES, _MAX_BYTES = 50_000, 100_000_000
"""Of one upload. OpenAI and this server allow 50,000 and 200 MB by default."""
_POLL_S = 2.0


class Manifest(msgspec.Struct, kw_only=True):
    """`<out>.batches.json`.

    job      names the job in the metadata of its batches
    window   of the batches that the latest call made
    open     ids of batches that are not fetched yet
    done     ids of batches that are
    input, errors, max_line_bytes  of the call that started the job, for later commands with -o only
    """

    job: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))
    base_url: str
    window: str
    input: str
    errors: str | None
    max_line_bytes: int
    open: list[str] = msgspec.field(default_factory=list)
    done: list[str] = msgspec.field(default_factory=list)
    format: int = _FORMAT


def load_manifest(path: str) -> Manifest | None:
    """None: there is none. JobFileError."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JobFileError(f"cannot read {path}: {error}") from None
    if found.format != _FORMAT:
        raise JobFileError(f"{path} is of another version of run_batch")
    return found


async def batches_of(manifest: Manifest, api: BatchApi) -> list[RemoteBatch]:
    """The batches of a job that the server has, oldest first."""
    return await api.with_metadata(_NAME, manifest.job)


class RemoteJob:
    """One call on one input."""

    def __init__(
        self,
        *,
        source: Source,
        journal: Journal,
        api: BatchApi,
        manifest: Manifest,
        show: Callable[[Snapshot], None],
        say: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.counts = JobCounts()
        self._source = source
        self._journal = journal
        self._api = api
        self._manifest = manifest
        self._show = show
        self._say = say
        self._sleep = sleep
        self._num_lines = source.num_lines

    @property
    def is_open(self) -> bool:
        """Some batches are not fetched yet."""
        return bool(self._manifest.open)

    async def run(self) -> None:
        """Until each line has its record. CoschedError. May be cancelled; the server continues."""
        await self.submit()
        while True:
            await self._fetch_all(is_waiting=True)
            # Lines that an earlier call did not upload, or that the server has lost.
            if not await self._upload_open():
                break
        self._source.check_unchanged()

    async def submit(self) -> None:
        """Upload what is not uploaded yet."""
        await self._find_batches()
        if not self._manifest.open:
            await self._upload_open()

    async def fetch(self) -> None:
        """Write the results of the batches that have ended."""
        await self._find_batches()
        await self._fetch_all(is_waiting=False)

    async def _find_batches(self) -> None:
        """Include batches that were made just before an earlier call was killed."""
        save_json(self._journal.paths.batches, self._manifest)
        known = {*self._manifest.open, *self._manifest.done}
        for one in await batches_of(self._manifest, self._api):
            if one.id not in known:
                self._manifest.open.append(one.id)

    async def _upload_open(self) -> int:
        """Upload the lines that have no record; how many."""
        num_uploaded = self.counts.num_empty = 0
        parts: dict[str, _Part] = {}
        lines = self._source.checked_lines(max_line_bytes=self._manifest.max_line_bytes)
        try:
            async with aclosing(lines):
                async for line in lines:
                    if line is None:
                        self.counts.num_empty += 1
                        continue
                    if line.number in self._journal.done:
                        continue
                    if isinstance(line, BadLine):
                        self.counts.note(line)
                        record = self._journal.records.record(line)
                        self._journal.write(record)
                        self.counts.note_written(record)
                        continue
                    part = parts.setdefault(line.url, _Part())
                    if part.num_lines and not part.fits(line):
                        await self._upload(line.url, part)
                        part = parts[line.url] = _Part()
                    part.add(line)
                    num_uploaded += 1
            for url, part in parts.items():
                await self._upload(url, part)
        except QuotaError as error:
            if not self._manifest.open:
                raise
            self._say(f"the rest is uploaded once the open batches are fetched: {error}")
        finally:
            for part in parts.values():
                part.file.close()
        self._num_lines = self._source.num_lines - self.counts.num_empty
        return num_uploaded

    async def _upload(self, url: str, part: _Part) -> None:
        manifest = self._manifest
        file_id = await self._api.upload(part.file, filename=Path(self._source.path).name)
        number = len(manifest.open) + len(manifest.done)
        try:
            batch = await self._api.create(
                file_id=file_id,
                endpoint=url,
                window=manifest.window,
                metadata={_NAME: manifest.job, "part": f"{number}"},
            )
        except ServerRefusedError:
            await self._api.delete(file_id)
            raise
        manifest.open.append(batch.id)
        save_json(self._journal.paths.batches, manifest)
        self._say(f"{part.num_lines} lines for {url} are batch {batch.id}")
        part.file.close()

    async def _fetch_all(self, *, is_waiting: bool) -> None:
        while self._manifest.open:
            running = []
            for name in list(self._manifest.open):
                try:
                    batch = await self._api.get(name)
                except NotFoundError:
                    self._say(f"the server has lost batch {name}; its lines are sent again")
                    self._mark_fetched(name)
                    continue
                if batch.status in ENDED:
                    await self._fetch(batch)
                else:
                    running.append(batch)
            self._show_now(running)
            if not is_waiting or not self._manifest.open:
                return
            await self._sleep(_POLL_S)

    def _show_now(self, running: list[RemoteBatch]) -> None:
        counts = [one.request_counts for one in running]
        num_failed = sum(one.failed for one in counts)
        outlooks = [one.cosched for one in running if one.cosched is not None]
        ends_s = [one.finish_s for one in outlooks if one.finish_s is not None]
        self._show(
            Snapshot(
                num_lines=self._num_lines,
                num_done=self._journal.num_done + num_failed + sum(one.completed for one in counts),
                num_failed=self._journal.num_failed + num_failed,
                num_in_flight=sum(one.running for one in outlooks),
                num_begun=sum(one.running * one.running_done for one in outlooks),
                left_s=max(ends_s) if ends_s and len(ends_s) == len(running) else None,
                num_tokens=self.counts.prompt_tokens
                + self.counts.completion_tokens
                + sum(one.usage.input_tokens + one.usage.output_tokens for one in running),
            )
        )

    async def _fetch(self, batch: RemoteBatch) -> None:
        """Write its results, then delete its files at the server."""
        if batch.status == "failed":
            self._mark_fetched(batch.id)
            await self._api.delete(batch.input_file_id)
            faults = batch.errors.data if batch.errors else []
            reasons = "; ".join(
                fault.message if fault.line is None else f"line {fault.line}: {fault.message}"
                for fault in faults[:5]
            )
            raise ServerRefusedError(f"the server refuses batch {batch.id}: {reasons}")
        results = {True: batch.output_file_id, False: batch.error_file_id}
        for is_answer, file_id in results.items():
            if file_id is not None:
                try:
                    write = partial(self._write, batch, is_answer=is_answer)
                    await self._api.for_each_line(file_id, write)
                except NotFoundError:
                    self._say(f"results of batch {batch.id} are gone; their lines are sent again")
        self.counts.prompt_tokens += batch.usage.input_tokens
        self.counts.completion_tokens += batch.usage.output_tokens
        await asyncio.to_thread(self._journal.sync)
        self._mark_fetched(batch.id)
        for name in (batch.input_file_id, *results.values()):
            if name:
                await self._api.delete(name)

    def _write(self, batch: RemoteBatch, data: bytes, *, is_answer: bool) -> None:
        number = RecordWriter(digest=batch.id.removeprefix("batch_")).line_answered_by(data)
        if number is None or not 1 <= number <= self._source.num_lines:
            raise ServerRefusedError(
                f"the results of {batch.id} do not name the lines that they answer: this is not a "
                "server of cosched's; use --via lines"
            )
        if number in self._journal.done:  # written before an interruption
            return
        if not is_answer:
            self.counts.note_failure(*failure_in(data))
        record = self._journal.records.adopt(data, number=number, is_answer=is_answer)
        self._journal.write(record)
        self.counts.note_written(record)

    def _mark_fetched(self, name: str) -> None:
        self._manifest.open.remove(name)
        self._manifest.done.append(name)
        save_json(self._journal.paths.batches, self._manifest)


class _Part:
    """A file to upload. Lines keep their numbers: lines that are left out are empty."""

    def __init__(self) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile()
        self.num_lines = 0
        self._last_number = 0

    def fits(self, line: RequestLine) -> bool:
        return self.num_lines < _MAX_LINES and self.file.tell() + len(line.body) <= _MAX_BYTES

    def add(self, line: RequestLine) -> None:
        entry = {
            "custom_id": line.custom_id,
            "method": "POST",
            "url": line.url,
            "body": msgspec.Raw(line.body),
        }
        self.file.write(b"\n" * (line.number - self._last_number - 1))
        self.file.write(encode_line(entry))
        self.num_lines += 1
        self._last_number = line.number
