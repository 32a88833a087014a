"""Where the bytes of files are: a folder, or a URL that fsspec reaches.

A file is written whole before the database lists it, and only listed files are read. What remains
of interrupted uploads and deleted files is removed by `sweep`.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from cosched.batch.errors import ApiError, StoreUnavailableError
from cosched.errors import ConfigError

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
_LOG_S = 60.0
_PART = ".part"
_ORPHAN_S = 3600.0
"""A file that is not listed for this long is left from an interrupted upload or deletion."""
_LIST_S = 600.0
"""Between two listings of a URL, which object stores charge for."""
_LOCAL = re.compile(r"(?:file|local)://(/.*)")
_ID_NAME = "store-id"


class FilesUnavailableError(StoreUnavailableError):
    """The files cannot be reached now."""


class FailureLog:
    """Logs failures of work that is tried again: of the database once, of the files once a minute,
    others each time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_unavailable = False
        self._next_files_s = float("-inf")

    def add(self, error: Exception, what: str) -> None:
        if not isinstance(error, StoreUnavailableError):
            logger.error("batches: %s; trying again", what, exc_info=error)
            return
        if isinstance(error, FilesUnavailableError):
            # When they are back is not noticed as long as no file is needed.
            if self._clock() < self._next_files_s:
                return
            self._next_files_s = self._clock() + _LOG_S
        elif self._is_unavailable:
            return
        else:
            self._is_unavailable = True
        logger.warning("batches: %s; retrying until it works: %s", what, error.for_log)

    def over(self) -> None:
        """The database was used."""
        if self._is_unavailable:
            logger.warning("batches: the store is back")
            self._is_unavailable = False


class Storage(Protocol):
    """For any number of threads. Names are ids of files.

    is_remote  do not hold the database while it works; results of ended batches become files here
    """

    is_remote: bool

    def get_id(self) -> str | None:
        """The id of the store that these files belong to; None: not set yet. OSError,
        FilesUnavailableError."""

    def set_id(self, store_id: str) -> None:
        """OSError, FilesUnavailableError."""

    def write(self, name: str, blocks: Iterable[bytes]) -> int:
        """Keep these bytes, durable on return; how many. The caller discards what is left after an
        error. FilesUnavailableError."""

    def publish(self, name: str) -> None:
        """It is about to be listed."""

    def discard(self, name: str) -> None:
        """Remove a file that was written, perhaps in part, and not published."""

    def read(self, name: str) -> Iterator[bytes]:
        """A block at a time. FileNotFoundError, FilesUnavailableError."""

    def open(self, name: str) -> BinaryIO:
        """Seekable. FileNotFoundError, FilesUnavailableError."""

    def forget(self, name: str) -> None:
        """It is no longer listed: the next `sweep` may remove it."""

    def sweep(self, listed: set[str], *, in_use: set[str]) -> None:
        """Remove what is not listed. `in_use`: those that open batches read.
        FilesUnavailableError."""


def folder_of(place: str) -> Path | None:
    """The folder that `batches.folder` names; None: it is a URL of another system."""
    if found := _LOCAL.fullmatch(place):
        return Path(found[1])
    return None if "://" in place or "::" in place else Path(place)


PRIVATE = 0o700
"""Mode of a new folder: prompts and replies are for the user of the server."""


def without_secrets(place: str) -> str:
    """A URL for logs: without user and password."""
    return re.sub(r"://[^/@]*@", "://***@", place)


class FolderStorage:
    """A folder of this machine, or one that several machines share."""

    is_remote = False

    def __init__(self, folder: Path) -> None:
        self._id_file = folder / _ID_NAME
        self._folder = folder / "files"
        self._folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)

    def get_id(self) -> str | None:
        return self._id_file.read_text().strip() if self._id_file.exists() else None

    def set_id(self, store_id: str) -> None:
        self._id_file.write_text(f"{store_id}\n")

    def write(self, name: str, blocks: Iterable[bytes]) -> int:
        with _disk_errors(), self._part(name).open("xb") as copy:
            copy.writelines(blocks)
            copy.flush()
            os.fsync(copy.fileno())
            return copy.tell()

    def publish(self, name: str) -> None:
        with _disk_errors():
            self._part(name).rename(self._folder / name)
            # Makes the new name durable.
            handle = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def discard(self, name: str) -> None:
        self._part(name).unlink(missing_ok=True)

    def read(self, name: str) -> Iterator[bytes]:
        with self.open(name) as content:
            while block := content.read(_BLOCK_BYTES):
                yield block

    def open(self, name: str) -> BinaryIO:
        return (self._folder / name).open("rb")

    def forget(self, name: str) -> None:
        pass

    def sweep(self, listed: set[str], *, in_use: set[str]) -> None:
        for path in self._folder.iterdir():
            is_part = path.suffix == _PART
            with suppress(FileNotFoundError):  # published or discarded by another server
                if is_part and time.time() - path.stat().st_mtime <= _ORPHAN_S:
                    continue
            if is_part or path.name not in listed:
                path.unlink(missing_ok=True)

    def _part(self, name: str) -> Path:
        return self._folder / (name + _PART)


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FilesUnavailableError(
            f"its files cannot be written: {error.strerror or error}"
        ) from error


class UrlStorage:
    """Objects below a URL. Lines of open batches are read in prefix order, so each process keeps
    copies of their files on its own disk (TMPDIR), unnamed."""

    is_remote = True

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """ConfigError: fsspec does not know such URLs."""
        self._shown = without_secrets(url)
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ConfigError(
                f"batches.folder {self._shown!r} is a URL, which needs fsspec: "
                "pip install 'cosched[fsspec]'"
            ) from None
        try:
            self._fs, self._root = url_to_fs(url)
        except Exception as error:  # each file system has its own errors
            raise ConfigError(f"batches.folder {self._shown!r}: {_text(error)}") from None
        self._clock = clock
        self._lock = threading.Lock()
        self._copies: dict[str, Any] = {}
        self._unlisted: dict[str, float] = {}
        """Name -> when this process first found it not listed."""
        self._next_list_s = float("-inf")

    def get_id(self) -> str | None:
        with self._errors():
            self._fs.makedirs(self._path("files"), exist_ok=True)
            if not self._fs.exists(self._path(_ID_NAME)):
                return None
            return cast(bytes, self._fs.cat_file(self._path(_ID_NAME))).decode().strip()

    def set_id(self, store_id: str) -> None:
        with self._errors():
            self._fs.pipe_file(self._path(_ID_NAME), f"{store_id}\n".encode())

    def write(self, name: str, blocks: Iterable[bytes]) -> int:
        num_bytes = 0
        with self._errors(), self._fs.open(self._path("files", name), "wb") as copy:
            for block in blocks:
                copy.write(block)
                num_bytes += len(block)
        return num_bytes

    def publish(self, name: str) -> None:
        pass

    def discard(self, name: str) -> None:
        with suppress(StoreUnavailableError, FileNotFoundError), self._errors():
            self._fs.rm_file(self._path("files", name))

    def read(self, name: str) -> Iterator[bytes]:
        with self._errors():
            content = self._fs.open(self._path("files", name), "rb")
        with content:
            while True:
                with self._errors():
                    block = content.read(_BLOCK_BYTES)
                if not block:
                    return
                yield block

    def open(self, name: str) -> BinaryIO:
        with self._lock:
            if name not in self._copies:
                copy = tempfile.TemporaryFile(prefix="cosched-batches-")
                try:
                    with self._errors():
                        copy.writelines(self.read(name))
                        copy.flush()
                except BaseException:
                    copy.close()
                    raise
                self._copies[name] = copy
            # Reopened: each reader has its own position.
            return open(f"/proc/self/fd/{self._copies[name].fileno()}", "rb")

    def forget(self, name: str) -> None:
        with self._lock:
            self._unlisted[name] = float("-inf")

    def sweep(self, listed: set[str], *, in_use: set[str]) -> None:
        now_s = self._clock()
        with self._lock:
            for name in set(self._copies) - in_use:
                self._copies.pop(name).close()
            is_due = now_s >= self._next_list_s
        if is_due:
            with self._errors():
                self._fs.invalidate_cache()
                try:
                    found = self._fs.ls(self._path("files"), detail=False)
                except FileNotFoundError:  # an object store has no empty folders
                    found = []
                self._fs.invalidate_cache()  # other servers add files
            there = {str(path).rsplit("/", 1)[-1] for path in found}
            with self._lock:
                self._next_list_s = now_s + _LIST_S
                for name in there:
                    self._unlisted.setdefault(name, now_s)
        with self._lock:
            for name in listed - in_use:
                self._unlisted.pop(name, None)
            gone = [
                name
                for name, since_s in self._unlisted.items()
                if name not in listed and now_s - since_s > _ORPHAN_S
            ]
        for name in gone:
            with suppress(FileNotFoundError), self._errors():
                self._fs.rm_file(self._path("files", name))
            with self._lock:
                self._unlisted.pop(name, None)

    def _path(self, *names: str) -> str:
        return "/".join((self._root.rstrip("/"), *names))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """FilesUnavailableError for anything but a missing file."""
        try:
            yield
        except (ApiError, FileNotFoundError):
            raise
        except Exception as error:  # each file system has its own errors
            raise FilesUnavailableError(f"its files cannot be reached: {_text(error)}") from error


def _text(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
