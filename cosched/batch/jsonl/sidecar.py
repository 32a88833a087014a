"""`<out>.state.json`: which input, and which settings, the outputs of a job belong to."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import msgspec

from cosched.batch.jsonl.errors import JobFileError
from cosched.batch.jsonl.source import Source

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What must stay the same from one call to the next for the outputs to make sense."""

    source: Source
    errors_beside_out: str
    ordered: bool
    max_line_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "input": {
                "path": os.path.abspath(self.source.path),
                "bytes": self.source.num_bytes,
                "lines": self.source.num_lines,
                "sha256": self.source.sha256,
            },
            "settings": {
                "--errors": self.errors_beside_out,
                "--ordered": self.ordered,
                "--max-line-bytes": self.max_line_bytes,
            },
        }

    def check_continues(self, earlier: dict[str, Any], *, path: str) -> None:
        """Raise JobFileError unless `earlier`, read from `path`, is this same job."""
        mine = self.as_json()
        try:
            _check_input(earlier["input"], mine["input"])
            for option, value in mine["settings"].items():
                if earlier["settings"][option] != value:
                    raise JobFileError(
                        f"{option} is {value}, but the job that {path} belongs to was started "
                        f"with {earlier['settings'][option]}; use the same, or start anew with "
                        "--overwrite"
                    )
        except (KeyError, TypeError) as error:
            raise _unreadable(path) from error


def _check_input(earlier: dict[str, Any], now: dict[str, Any]) -> None:
    # Only the content counts: the file may have been moved.
    if earlier["sha256"] != now["sha256"]:
        raise JobFileError(
            f"the input is not the one this output was started with: {now['path']} has "
            f"{now['bytes']} bytes, {now['lines']} lines, sha256 {now['sha256'][:16]}; it was "
            f"{earlier['path']} with {earlier['bytes']} bytes, {earlier['lines']} lines, sha256 "
            f"{earlier['sha256'][:16]}. Choose another output, or start anew with --overwrite"
        )


def load_state(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            state = msgspec.json.decode(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JobFileError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(path) from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise _unreadable(path)
    return state


def save_state(path: str, state: JobState) -> None:
    """On disk before the first record can be."""
    save_json(path, state.as_json())


def save_json(path: str, content: Any) -> None:
    """Write all of it or nothing; it is on the disk on return. JobFileError."""
    half = path + ".tmp"
    try:
        with open(half, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
        _sync_directory(os.path.dirname(os.path.abspath(path)))
    except OSError as error:
        raise JobFileError(f"cannot write {path}: {error.strerror}") from error


def remove_state(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _sync_directory(path: str) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _unreadable(path: str) -> JobFileError:
    return JobFileError(
        f"{path} is no state of this version of run_batch; repair it, or start anew with "
        "--overwrite (which empties the outputs)"
    )
