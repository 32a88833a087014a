"""The outputs of a job, which are also its only record of what is done.

Rules that make `kill -9` harmless:

* Both files are append-only and each record is one `write()`. What a killed process wrote is in
  the kernel; only the last record of a file can be incomplete, and resuming cuts it off.
* A record names the input line it answers, so resuming reads both files and knows what remains.
* `<out>.state.json`, written before the first record, says which input and settings they belong to.
* Both files stay locked (`flock`) while a job runs; a killed process holds no lock.

After a crash of the machine, the answers of the last seconds may be lost (the runner calls `sync`
every few seconds); their lines are sent again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from cosched.batch.jsonl.errors import DiskError, JobFileError
from cosched.batch.jsonl.line_results import Record, RecordWriter
from cosched.batch.jsonl.source import Source

_FORMAT = 1


class JournalPaths:
    """The files of a job, all named after the output."""

    def __init__(self, *, out: str, errors: str | None) -> None:
        self.out = out
        self.errors = errors or out + ".errors.jsonl"
        self.state = out + ".state.json"
        self.server_log = out + ".server.log"
        self.batches = out + ".batches.json"
        self.before_retry = self.errors + ".before-retry"

    def check_apart_from(self, input_path: str) -> None:
        """JobFileError if two of the files are the same file."""
        named = {"input": input_path, "output": self.out, "error file": self.errors}
        named["state file"] = self.state
        seen: dict[str, str] = {}
        for name, path in named.items():
            other = seen.setdefault(os.path.realpath(path), name)
            if other != name:
                raise JobFileError(f"{other} and {name} are the same file: {path}")


class Journal:
    """The two open output files. `done` has the lines that have a record."""

    def __init__(self, *, paths: JournalPaths, source: Source) -> None:
        self.paths = paths
        self.records = RecordWriter(digest=source.sha256)
        self.done = LineSet(num_lines=source.num_lines)
        self.num_answered = 0
        self.num_failed = 0
        self.num_cut_bytes = 0
        self.num_retried = 0
        self._source = source
        self._files: list[AppendFile] = []

    @classmethod
    def open(
        cls,
        *,
        paths: JournalPaths,
        source: Source,
        ordered: bool,
        max_line_bytes: int,
        overwrite: bool = False,
        retry_failed: bool = False,
    ) -> Journal:
        """Lock, check and read back the outputs. JobFileError; then nothing was changed, unless
        `overwrite`.

        ordered, max_line_bytes  must stay the same from one call to the next
        retry_failed             empty the error file after a copy, so that its lines are sent again
        """
        paths.check_apart_from(source.path)
        state = _state(paths, source, ordered=ordered, max_line_bytes=max_line_bytes)
        journal = cls(paths=paths, source=source)
        try:
            journal._files += [AppendFile(paths.out), AppendFile(paths.errors)]
            journal._start(state, overwrite=overwrite, retry_failed=retry_failed)
        except BaseException:
            journal.close()
            raise
        return journal

    def _start(self, state: dict[str, Any], *, overwrite: bool, retry_failed: bool) -> None:
        if overwrite:
            Path(self.paths.batches).unlink(missing_ok=True)
            Path(self.paths.state).unlink(missing_ok=True)
            for file in self._files:
                file.truncate(0)
        if not _continues(state, path=self.paths.state):
            if retry_failed:
                raise JobFileError(
                    f"--retry-failed: there is no earlier job at {self.paths.out} (no "
                    f"{self.paths.state}); leave the option out"
                )
            for file in self._files:
                if file.size():
                    raise JobFileError(
                        f"{file.path} exists and {self.paths.state} does not: it was not written "
                        "by this program; choose another path, or replace it with --overwrite"
                    )
            save_json(self.paths.state, state)
        answers, failures = self._files
        self.num_answered = self._read_back(answers)
        if retry_failed:
            self.num_retried = self._put_aside(failures)
        self.num_failed = self._read_back(failures)

    def _put_aside(self, failures: AppendFile) -> int:
        """Copy the error file and empty it; the number of its records. A kill in between loses
        nothing, because a line without a record is sent again."""
        num_records = sum(
            self.records.line_answered_by(data) is not None for data in failures.lines()
        )
        if num_records:
            try:
                shutil.copyfile(failures.path, self.paths.before_retry)
            except OSError as error:
                raise JobFileError(
                    f"cannot write {self.paths.before_retry}: {error.strerror}"
                ) from error
            failures.truncate(0)
        return num_records

    def _read_back(self, file: AppendFile) -> int:
        """Mark the lines that `file` answers as done and cut off a torn end; the number of its
        records."""
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
                    "not write for this input; repair the file, or start over with --overwrite"
                )
            if not 1 <= number <= self._source.num_lines or number in self.done:
                raise JobFileError(
                    f"{file.path} answers line {number} of the input a second time, or the input "
                    "has no such line; repair the file, or start over with --overwrite"
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
        """Append one record. DiskError."""
        answers, failures = self._files
        (answers if record.is_answer else failures).append(record.data)
        self.done.add(record.number)
        if record.is_answer:
            self.num_answered += 1
        else:
            self.num_failed += 1

    def sync(self) -> None:
        """Make what was written survive a crash of the machine. Blocks; thread-safe."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LineSet:
    """A set of line numbers in [1, num_lines]: one bit each."""

    def __init__(self, *, num_lines: int) -> None:
        self._bits = bytearray(num_lines // 8 + 1)
        self._num_lines = num_lines

    def __contains__(self, number: int) -> bool:
        return bool(self._bits[number >> 3] & (1 << (number & 7)))

    def add(self, number: int) -> None:
        assert 1 <= number <= self._num_lines, f"{number=} {self._num_lines=}"
        self._bits[number >> 3] |= 1 << (number & 7)


class AppendFile:
    """A file that only grows once it is read back, whole records at a time."""

    def __init__(self, path: str, *, is_locked: bool = True) -> None:
        """`is_locked`: no other process may open it so. JobFileError."""
        self.path = path
        self._dirty = False
        self._broken = False
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise JobFileError(f"cannot write {path}: not a regular file, cannot resume")
            if is_locked:
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
        """All lines; the last one may lack its line break."""
        with open(self.path, "rb") as file:
            yield from file

    def append(self, data: bytes) -> None:
        if self._broken:  # nothing may follow half a record
            raise DiskError(f"cannot write {self.path} after an earlier failure")
        try:
            written = os.write(self._open_fd, data)
            while written < len(data):  # a nearly full disk takes a part first
                written += os.write(self._open_fd, data[written:])
        except OSError as error:
            self._broken = True
            raise DiskError(f"cannot write {self.path}: {error.strerror}") from error
        self._dirty = True

    def sync(self) -> None:
        if self._dirty and self._fd is not None:
            self._dirty = False  # before fsync: a record appended during it sets it again
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise DiskError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                if self._dirty:
                    os.fsync(fd)
            except OSError as error:
                raise DiskError(f"cannot write {self.path}: {error.strerror}") from error
            finally:
                os.close(fd)


def _state(
    paths: JournalPaths, source: Source, *, ordered: bool, max_line_bytes: int
) -> dict[str, Any]:
    """The content of `<out>.state.json`."""
    # Relative, so that a finished job may be moved to another folder as a whole.
    errors = os.path.relpath(paths.errors, os.path.dirname(paths.out) or ".")
    return {
        "format": _FORMAT,
        "input": {
            "path": os.path.abspath(source.path),
            "bytes": source.num_bytes,
            "lines": source.num_lines,
            "sha256": source.sha256,
        },
        "settings": {
            "--errors": errors,
            "--ordered": ordered,
            "--max-line-bytes": max_line_bytes,
        },
    }


def _continues(state: dict[str, Any], *, path: str) -> bool:
    """Whether there is an earlier job at `path`. JobFileError if it is not the same job."""
    unreadable = JobFileError(
        f"{path} is not a state of this version of run_batch; repair it, or start over with "
        "--overwrite (which empties the outputs)"
    )
    try:
        earlier = msgspec.json.decode(Path(path).read_bytes())
        if earlier["format"] != _FORMAT:
            raise unreadable
        before, now = earlier["input"], state["input"]
        if before["sha256"] != now["sha256"]:  # only the content counts: files may be moved
            raise JobFileError(
                f"the input is not the one this output was started with: {now['path']} has "
                f"{now['bytes']} bytes, {now['lines']} lines, sha256 {now['sha256'][:16]}; it was "
                f"{before['path']} with {before['bytes']} bytes, {before['lines']} lines, sha256 "
                f"{before['sha256'][:16]}. Choose another output, or start over with --overwrite"
            )
        for option, value in state["settings"].items():
            if earlier["settings"][option] != value:
                raise JobFileError(
                    f"{option} is {value}, but the job that {path} belongs to was started with "
                    f"{earlier['settings'][option]}; use the same, or start over with --overwrite"
                )
    except FileNotFoundError:
        return False
    except OSError as error:
        raise JobFileError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise unreadable from error
    return True


def save_json(path: str, content: Any) -> None:
    """Write all of it or nothing; it is on the disk on return. JobFileError."""
    half = path + ".tmp"
    try:
        with open(half, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
        directory = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise JobFileError(f"cannot write {path}: {error.strerror}") from error
