"""Files: what is kept, who sees it, for how long."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest

from cosched.batch.batch_records import Finished
from cosched.batch.database import Database
from cosched.batch.errors import ApiError
from cosched.batch.files import FileStore
from cosched.batch.storage import FilesUnavailableError, FolderStorage
from cosched.batch.store import BatchStore
from tests.batch.test_store import asked, in_progress, new_line


@pytest.fixture
def files(database, tmp_path, clock):
    return FileStore(database, FolderStorage(tmp_path), clock=clock)


def add(files, content=b"x", *, owner="a", expires_s=None):
    return files.add([content], owner=owner, filename="../n", purpose="batch", expires_s=expires_s)


def on_disk(tmp_path):
    return {path.name for path in (tmp_path / "files").iterdir()}


def test_results_are_read_in_blocks_however_long_their_lines_are(files, database, clock):
    """Answers with embeddings or log probabilities may have megabytes each."""
    store = BatchStore(database, clock=clock)
    store.join("me", lease_s=100)
    name = in_progress(store, [new_line(n) for n in range(1, 41)])
    data = {n: bytes([n]) * (1 << 20 if n % 8 else 3 << 20) for n in range(1, 41)}
    done = [Finished(batch_id=name, number=n, is_answer=True, data=data[n]) for n in data]
    store.finish(done)
    assert store.end(name)
    file = files.get(store.get(name).output_file_id, owner="a")
    blocks = list(files.content(file))
    assert b"".join(blocks) == b"".join(data.values())
    assert max(map(len, blocks)) == 3 << 20


def test_a_file_that_has_expired_is_gone(files, clock, tmp_path):
    kept, short = add(files), add(files, expires_s=10)
    clock.now_s += 10
    with pytest.raises(ApiError, match="no file"):
        files.get(short.id, owner="a")
    files.sweep()
    assert on_disk(tmp_path) == {kept.id}


def test_a_deleted_file_stays_for_the_batch_that_reads_it(files, database, clock, tmp_path):
    store = BatchStore(database, clock=clock)
    file, other = add(files), add(files)
    batch = store.create(asked(input_file_id=file.id))
    for one in (file, other):
        files.delete(one.id, owner="a")
    assert on_disk(tmp_path) == {file.id}
    store.cancel(batch.id)
    assert store.end(batch.id)
    files.sweep()
    assert on_disk(tmp_path) == set()


def test_what_an_interrupted_upload_left_is_removed_after_a_while(files, tmp_path):
    left, running, unlisted = (tmp_path / "files" / f"file-{n}" for n in ("1.part", "2.part", "3"))
    for path in (left, running, unlisted):
        path.write_text("half")
    an_hour_ago_s = time.time() - 3601
    os.utime(left, (an_hour_ago_s, an_hour_ago_s))
    files.sweep()
    assert on_disk(tmp_path) == {running.name}


def test_servers_that_share_a_store_do_not_remove_each_others_uploads(
    postgres_url, tmp_path, clock
):
    ended = threading.Event()
    with (
        contextlib.closing(Database(postgres_url)) as one,
        contextlib.closing(Database(postgres_url)) as two,
    ):
        mine, yours = (
            FileStore(database, FolderStorage(tmp_path), clock=clock) for database in (one, two)
        )

        def sweep():
            while not ended.is_set():
                yours.sweep()

        thread = threading.Thread(target=sweep)
        thread.start()
        added = {add(mine).id for _ in range(100)}
        ended.set()
        thread.join()
        assert on_disk(tmp_path) == added


def test_an_upload_that_cannot_be_read_leaves_nothing(files, tmp_path):
    def broken():
        yield b"x"
        raise OSError("no")

    with pytest.raises(FilesUnavailableError):
        files.add(broken(), owner="a", filename="", purpose="batch", expires_s=None)
    assert on_disk(tmp_path) == set()
