"""The outputs of a job, which are also its only record of what is done.

Rules that make `kill -9` harmless:

* Both files are append-only and each record is one `write()`. What a killed process wrote is in
  the kernel; only the last record of a file can be incomplete, and resuming cuts it off.
* A record names the input line it answers, so resuming reads both files and knows what is left.
* A sidecar (`<out>.state.json`), written before the first record, says which input they answer.
* Both files stay locked (`flock`) while a job runs; a killed process holds no lock.

A crash of the machine is a different matter: records reach the disk by `fsync` every few seconds
(`sync`, called by the runner), so a crash costs at most the answers of the last seconds, and those
lines are sent again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator

from cosched.batch.jsonl.errors import DiskError, JobFileError
from cosched.batch.jsonl.ids import LineSet
from cosched.batch.jsonl.records import Record, RecordWriter
from cosched.batch.jsonl.sidecar import JobState, load_state, remove_state, save_state
from cosched.batch.jsonl.source import Source


class JournalPaths:
    """Where a job keeps its files: all named after the output."""

    def __init__(self, *, out: str, errors: str | None) -> None:
        self.out = out
        self.errors = errors or out + ".errors.jsonl"
        self.state = out + ".state.json"
        self.server_log = out + ".server.log"
        self.batches = out + ".batches.json"
        self.before_retry = self.errors + ".before-retry"
        # How the sidecar names it: a finished job may be moved to another folder as a whole.
        self.errors_beside_out = os.path.relpath(self.errors, os.path.dirname(out) or ".")

    def check_apart_from(self, input_path: str) -> None:
        """Raise JobFileError when two of the files are the same one."""
        named = {"input": input_path, "output": self.out, "error file": self.errors}
        named["state file"] = self.state
        seen: dict[str, str] = {}
        for name, path in named.items():
            other = seen.setdefault(os.path.realpath(path), name)
            if other != name:
                raise JobFileError(f"{other} and {name} are the same file: {path}")


class Journal:
    """The two open output files. `done` holds the lines that need nothing any more."""

    def __init__(self, *, paths: JournalPaths, source: Source) -> None:
        self.paths = paths
        self.records = RecordWriter(digest=source.sha256)
        self.done = LineSet(num_lines=source.num_lines)
        self.num_answered = 0
        self.num_failed = 0
        self.num_cut_bytes = 0
        self.num_retried = 0
        self._source = source
        self._files: list[_AppendOnly] = []

    @classmethod
    def open(
        cls,
        *,
        paths: JournalPaths,
        state: JobState,
        overwrite: bool = False,
        retry_failed: bool = False,
    ) -> Journal:
        """Lock, check and read back the outputs. Raises JobFileError; then nothing was changed,
        unless `overwrite`.

        With `retry_failed` the error file is put aside, so that its lines are open again.
        """
        paths.check_apart_from(state.source.path)
        journal = cls(paths=paths, source=state.source)
        try:
            journal._files = [_AppendOnly(paths.out), _AppendOnly(paths.errors)]
            journal._start(state, overwrite=overwrite, retry_failed=retry_failed)
        except BaseException:
            journal.close()
            raise
        return journal

    def _start(self, state: JobState, *, overwrite: bool, retry_failed: bool) -> None:
        if overwrite:
            remove_state(self.paths.batches)
            remove_state(self.paths.state)
            for file in self._files:
                file.truncate(0)
        earlier = load_state(self.paths.state)
        if earlier is not None:
            state.check_continues(earlier, path=self.paths.state)
        elif retry_failed:
            raise JobFileError(
                f"--retry-failed: there is no earlier job at {self.paths.out} (no "
                f"{self.paths.state}); leave the option out"
            )
        else:
            self._check_empty()
            save_state(self.paths.state, state)
        answers, failures = self._files
        self.num_answered = self._read_back(answers)
        if retry_failed:
            self.num_retried = self._put_aside(failures)
        self.num_failed = self._read_back(failures)

    def _put_aside(self, failures: _AppendOnly) -> int:
        """Keep a copy of the error file and empty it; the number of its records. Whoever is killed
        in between has lost nothing: a line without a record is sent again."""
        num_records = sum(
            self.records.line_answered_by(data) is not None for data in failures.lines()
        )
        if not num_records:
            return 0
        try:
            shutil.copyfile(failures.path, self.paths.before_retry)
        except OSError as error:
            raise JobFileError(
                f"cannot write {self.paths.before_retry}: {error.strerror}"
            ) from error
        failures.truncate(0)
        return num_records

    def _check_empty(self) -> None:
        for file in self._files:
            if file.size():
                raise JobFileError(
                    f"{file.path} exists and {self.paths.state} does not: it was not written by "
                    "this program; choose another path, or replace it with --overwrite"
                )

    def _read_back(self, file: _AppendOnly) -> int:
        """Mark what `file` answers as done and cut a torn end off; the number of its records."""
        num_records = 0
        good_end = end = 0
        for data in file.lines():
            end += len(data)
            number = self.records.line_answered_by(data)
            if number is None:
                continue
            if good_end + len(data) != end:
                raise JobFileError(
                    f"{file.path} has a line before byte {end - len(data)} that this program did "
                    "not write for this input; repair the file, or start anew with --overwrite"
                )
            if not 1 <= number <= self._source.num_lines or number in self.done:
                raise JobFileError(
                    f"{file.path} answers line {number} of the input a second time, or the input "
                    "has no such line; repair the file, or start anew with --overwrite"
                )
            self.done.add(number)
            num_records += 1
            good_end = end
        if good_end != end:
            self.num_cut_bytes += end - good_end
            file.truncate(good_end)
        return num_records

    @property
    def num_done(self) -> int:
        return self.num_answered + self.num_failed

    def write(self, record: Record) -> None:
        """Append one record. Raises JobFileError when the disk is full or gone."""
        answers, failures = self._files
        (answers if record.is_answer else failures).append(record.data)
        self.done.add(record.number)
        if record.is_answer:
            self.num_answered += 1
        else:
            self.num_failed += 1

    def sync(self) -> None:
        """Make sure that what was written survives a crash of the machine. Blocks; thread-safe."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _AppendOnly:
    """A file that is locked, and only grows after it was read back."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._dirty = False
        self._broken = False
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise JobFileError(f"cannot write {path}: no regular file, so nothing can resume")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise JobFileError(f"another run_batch is writing {path}") from None
        except JobFileError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise JobFileError(f"cannot write {path}: {error.strerror}") from error

    @property
    def _open_fd(self) -> int:
        assert self._fd is not None, f"{self.path} is closed"
        return self._fd

    def size(self) -> int:
        return os.fstat(self._open_fd).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._open_fd, size)
        self._dirty = True

    def lines(self) -> Iterator[bytes]:
        """Its lines from the start, the last one possibly without its line break."""
        with open(self.path, "rb") as file:
            yield from file

    def append(self, data: bytes) -> None:
        if self._broken:  # nothing may follow half a record
            raise DiskError(f"cannot write {self.path} after an earlier failure")
        try:
            written = os.write(self._open_fd, data)
            while written < len(data):  # a disk that is nearly full takes a part first
                written += os.write(self._open_fd, data[written:])
        except OSError as error:
            self._broken = True
            raise DiskError(f"cannot write {self.path}: {error.strerror}") from error
        self._dirty = True

    def sync(self) -> None:
        if self._dirty and self._fd is not None:
            self._dirty = False  # before: a record appended meanwhile makes it dirty again
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise DiskError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        if self._fd is not None:
            self.sync()
            os.close(self._fd)
            self._fd = None
