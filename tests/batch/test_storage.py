"""Files at URLs of fsspec: what is kept there, and what happens while it is away."""

from __future__ import annotations

import contextlib
import logging
import secrets

import httpx
import openai
import pytest
import sqlalchemy as sa

from cosched.batch.config import BatchesConfig
from cosched.batch.database import results
from cosched.batch.open_store import check_store
from cosched.batch.storage import (
    FilesUnavailableError,
    UrlStorage,
    folder_of,
    without_secrets,
)
from cosched.errors import ConfigError
from tests.batch.api import Api, line, serving, until
from tests.batch.stand_in import Clock, StandIn

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


class Moody(MemoryFileSystem):
    """A file system that may be away, and where a folder is what is in it, as in object stores."""

    protocol = "moody"
    is_away = False

    def _open(self, path, mode="rb", **more):
        self.be_moody()
        return super()._open(path, mode, **more)

    def ls(self, path, detail=True, **more):
        self.be_moody()
        if not (found := super().ls(path, detail, **more)):
            raise FileNotFoundError(path)
        return found

    def makedirs(self, path, exist_ok=False):
        self.be_moody()
        super().makedirs(path, exist_ok)

    def rm_file(self, path):
        self.be_moody()
        super().rm_file(path)

    def be_moody(self):
        if self.is_away:
            raise ConnectionError("no route to the moody host")


fsspec.register_implementation("moody", Moody, clobber=True)


@pytest.fixture(params=["memory", "dir"])
def place(request, tmp_path):
    """A URL where nothing is yet."""
    if request.param == "dir":
        return f"dir::file://{tmp_path}/far"
    return f"memory://{secrets.token_hex(4)}/far"


@pytest.fixture
def moody():
    yield f"moody://{secrets.token_hex(4)}"
    Moody.is_away = False


@pytest.fixture
def sqlite(tmp_path):
    return f"sqlite:///{tmp_path}/db/batches.sqlite"


def objects(place):
    fs, root = fsspec.core.url_to_fs(place)
    fs.invalidate_cache()
    with contextlib.suppress(FileNotFoundError):
        return {path.rsplit("/", 1)[-1] for path in fs.ls(f"{root}/files", detail=False)}
    return set()


def lines(count):
    return [line(f"{n}", "refuse" if n % 50 == 9 else None) for n in range(count)]


def answers(count):
    return {f"{n}": "http_400" if n % 50 == 9 else f"to {n}" for n in range(count)}


@contextlib.contextmanager
def running(place, url, **settings):
    few = {"high_watermark": 64, "low_watermark": 48}
    stand_in = StandIn(BatchesConfig(folder=place, url=url, **few, **settings))
    with serving(stand_in) as at:
        yield stand_in, Api(at)


def test_a_url_of_a_folder_is_that_folder(tmp_path):
    for place in (str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}"):
        assert folder_of(place) == tmp_path
    for place in ("s3://bucket/a", "memory://a", "dir::file:///a"):
        assert folder_of(place) is None
    with running(f"file://{tmp_path}/b", None) as (_, api):
        file = api.upload(lines(1))
    assert (tmp_path / "b" / "files" / file.id).exists()
    assert (tmp_path / "b" / "batches.sqlite").exists()


def test_what_is_written_is_read_here_and_there(place):
    storage = UrlStorage(place)
    assert storage.get_id() is None
    storage.set_id("me")
    assert UrlStorage(place).get_id() == "me"
    content = bytes(range(256)) * 10_000
    assert storage.write("file-1", [content[:1000], content[1000:]]) == len(content)
    assert b"".join(storage.read("file-1")) == content
    with storage.open("file-1") as one, storage.open("file-1") as two:
        one.seek(2_000_000)
        assert two.read(300) == content[:300]
        assert (one.tell(), one.read(300)) == (2_000_000, content[2_000_000:2_000_300])
        storage.sweep(set(), in_use=set())  # its copy is let go of while it is read
        two.seek(-5, 2)
        assert two.read() == content[-5:]
    for read in (storage.open, lambda name: list(storage.read(name))):
        with pytest.raises(FileNotFoundError):
            read("file-2")


def test_unlisted_files_are_removed_after_an_hour_and_deleted_ones_immediately(place):
    clock = Clock()
    storage = UrlStorage(place, clock=clock)
    storage.get_id()
    for name in ("listed", "cut short", "deleted", "deleted but read"):
        storage.write(name, [b"x"])
    storage.forget("deleted")
    storage.forget("deleted but read")
    storage.sweep({"listed", "deleted but read"}, in_use={"deleted but read"})
    assert objects(place) == {"listed", "cut short", "deleted but read"}
    storage.sweep({"listed"}, in_use=set())
    assert objects(place) == {"listed", "cut short"}
    clock.now_s += 3601
    storage.sweep({"listed"}, in_use=set())
    assert objects(place) == {"listed"}
    storage.discard("listed")
    storage.discard("listed")  # it is gone already
    assert objects(place) == set()


def test_a_batch_has_its_files_at_the_url_when_it_has_ended(place, sqlite):
    with running(place, sqlite) as (stand_in, api):
        done = api.wait(api.create(lines(250)))
        counts = done.request_counts
        assert done.status == "completed" and (counts.completed, counts.failed) == (245, 5)
        assert api.outcome(done) == answers(250)
        names = {done.input_file_id, done.output_file_id, done.error_file_id}
        assert objects(place) == names
        for name in names:
            assert api.files.retrieve(name).bytes == len(api.files.content(name).content)
        with stand_in.service._opened.database.read() as connection:
            assert not connection.execute(sa.select(results)).all(), "rows are left behind"
        assert not stand_in.service.files._storage._copies, "a copy is left behind"
        for name in names:
            api.files.delete(name)
            with pytest.raises(openai.NotFoundError):
                api.files.content(name)
        assert objects(place) == set()


def test_finished_lines_survive_a_restart_before_anything_of_them_is_at_the_url(place, sqlite):
    with running(place, sqlite) as (before, api):
        before.num_answered = 100
        batch = api.create(lines(250))
        until(lambda: api.batches.retrieve(batch.id).request_counts.completed > 80)
    assert objects(place) == {batch.input_file_id}
    with running(place, sqlite) as (after, api):
        assert api.outcome(api.wait(batch)) == answers(250)
    again = set(before.asked) & set(after.asked) - {"refuse"}
    assert len(again) <= before.service.config.high_watermark


@pytest.mark.parametrize("place", ["dir"], indirect=True)
def test_servers_that_share_a_store_need_no_folder_in_common(postgres_url, place):
    with (
        running(place, postgres_url, lease_s=60) as (first, at_first),
        running(place, postgres_url, lease_s=60) as (second, at_second),
    ):
        first.is_held = second.is_held = True  # one might do all before the other one has looked
        created = at_first.create(lines(100))
        until(lambda: first.asked and second.asked)
        first.is_held = second.is_held = False
        done = at_second.wait(created)
        assert at_second.outcome(done) == answers(100)
        assert first.asked and second.asked
        assert objects(place) >= {done.input_file_id, done.output_file_id, done.error_file_id}


def test_while_files_are_away_nothing_is_lost_and_it_is_told(moody, sqlite, caplog):
    with running(moody, sqlite) as (stand_in, api), caplog.at_level(logging.INFO, "cosched"):
        stand_in.is_held = True
        running_batch = api.create(lines(60))
        until(lambda: stand_in.num_in_flight == 60)
        file, other = api.upload(lines(20)), api.upload(lines(30))
        Moody.is_away = True
        waiting = api.start(file.id)
        for call in (lambda: api.upload(lines(1)), lambda: api.files.content(file.id)):
            with pytest.raises(openai.InternalServerError, match="cannot be used now") as caught:
                call()
            assert "moody" not in str(caught.value)
        reply = httpx.get(
            f"{api.url}/v1/files/{file.id}/content", headers={"authorization": "Bearer key"}
        )
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
        assert reply.json()["error"]["code"] == "store_away"
        assert api.files.delete(other.id).deleted
        # Lines that were read are answered, until results become files.
        stand_in.is_held = False
        api.wait(running_batch, "finalizing")
        assert api.batches.retrieve(waiting.id).status == "validating"
        Moody.is_away = False
        assert api.outcome(api.wait(running_batch)) == answers(60)
        assert api.outcome(api.wait(waiting)) == answers(20)
        until(lambda: other.id not in objects(moody))
        assert file.id in objects(moody)
    told = [one for one in caplog.records if "its files cannot be reached" in one.getMessage()]
    assert len(told) == 1 and "Traceback" not in caplog.text
    assert stand_in.asked.total() == 80


def test_an_upload_that_breaks_off_leaves_nothing(moody, sqlite):
    storage = UrlStorage(moody)
    storage.get_id()

    def blocks():
        yield b"x"
        raise OSError("the client has gone")

    with running(moody, sqlite) as (stand_in, _), pytest.raises(FilesUnavailableError):
        stand_in.service.files.add(
            blocks(), owner="a", filename="", purpose="batch", expires_s=None
        )
    assert objects(moody) == set()


def test_an_unreachable_folder_is_reported_in_one_sentence(sqlite, moody, monkeypatch):
    from fsspec.registry import known_implementations

    monkeypatch.setitem(
        known_implementations,
        "elsewhere",
        {"class": "no_such_package.Fs", "err": "Install no_such_package to go elsewhere"},
    )
    for place, message in (
        ("nonsense://a", r"'nonsense://a': Protocol not known: nonsense"),
        ("elsewhere://me:secret@a", r"'elsewhere://\*\*\*@a': Install no_such_package"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            check_store(BatchesConfig(folder=place, url=sqlite))
        assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="must name a file"):
        check_store(BatchesConfig(folder=moody, url="sqlite://"))
    Moody.is_away = True
    with pytest.raises(ConfigError, match=r"its files cannot be reached: no route"):
        check_store(BatchesConfig(folder=moody, url=sqlite))
    assert without_secrets("s3://bucket/a@b") == "s3://bucket/a@b"


def test_a_store_has_one_place_and_one_server_without_postgresql(place, sqlite, tmp_path):
    with (
        running(place, sqlite),
        pytest.raises(ConfigError, match=r"batches\.url .*another server uses it"),
    ):
        check_store(BatchesConfig(folder=place, url=sqlite))
    check_store(BatchesConfig(folder=place, url=sqlite))
    with pytest.raises(ConfigError, match="has its files elsewhere"):
        check_store(BatchesConfig(folder=f"{place}/other", url=sqlite))
    with pytest.raises(ConfigError, match="it has the files of another store"):
        check_store(BatchesConfig(folder=place, url=f"sqlite:///{tmp_path}/new.sqlite"))


def test_an_object_store(tmp_path, sqlite, monkeypatch):
    """S3 as moto knows it, through s3fs."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    s3 = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3.start()
    host, port = s3.get_host_and_port()
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://{host}:{port}"})
    try:
        test_a_batch_has_its_files_at_the_url_when_it_has_ended("s3://bucket/a/b", sqlite)
        sqlite = f"sqlite:///{tmp_path}/second.sqlite"
        test_finished_lines_survive_a_restart_before_anything_of_them_is_at_the_url(
            "s3://bucket/c", sqlite
        )
    finally:
        s3.stop()
