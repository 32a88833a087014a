"""Requests with an `Idempotency-Key`: what is sent again is done once."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import sqlalchemy as sa

from cosched.batch import once as once_module
from cosched.batch.config import BatchesConfig, QuotaConfig
from cosched.batch.database import Database, idempotency_keys
from cosched.batch.errors import ApiError
from cosched.batch.files import FileStore
from cosched.batch.jsonl.batch_api import BatchApi
from cosched.batch.jsonl.client import RetryRules
from cosched.batch.once import KEPT_S, Once, file_digest, json_digest
from cosched.batch.storage import FolderStorage
from cosched.batch.store import BatchStore
from tests.batch.api import Api, lines, serving
from tests.batch.stand_in import StandIn
from tests.batch.test_store import asked

NUM_AT_ONCE = 6


def with_key(key):
    return {"extra_headers": {"Idempotency-Key": key}}


def once(route="files", *, key="k", owner="a", digest="d"):
    return Once(owner=owner, route=route, key=key, digest=digest)


@pytest.fixture
def files(database, tmp_path, clock):
    return FileStore(database, FolderStorage(tmp_path), clock=clock)


@pytest.fixture
def store(database, clock):
    return BatchStore(database, clock=clock)


def add(files, *, content=b"x", owner="a", expires_s=None, **more):
    return files.add(
        [content], owner=owner, filename="n", purpose="batch", expires_s=expires_s, **more
    )


def listed(files):
    return [
        f.id
        for f in files.page(owner="a", purpose=None, after=None, limit=99, newest_first=True)[0]
    ]


def on_disk(tmp_path):
    return {path.name for path in (tmp_path / "files").iterdir()}


class TestApi:
    def test_the_same_request_gets_the_object_as_it_is_now(self, api):
        file = api.upload(lines(3), **with_key("f"))
        assert api.upload(lines(3), **with_key("f")) == file
        batch = api.start(file.id, **with_key("b"))
        done = api.wait(batch)
        again = api.start(file.id, **with_key("b"))
        assert (again.id, again.status) == (batch.id, "completed")
        assert again.output_file_id == done.output_file_id
        assert [b.id for b in api.batches.list()] == [batch.id]
        assert len(api.files.list(purpose="batch").data) == 1

    def test_two_keys_and_none_are_different_requests(self, api):
        files = [api.upload(lines(1), **more) for more in (with_key("1"), with_key("2"), {}, {})]
        assert len({file.id for file in files}) == 4
        batches = [api.start(files[0].id, **more) for more in (with_key("1"), with_key("2"), {})]
        assert len({batch.id for batch in batches}) == 3, "a key of files is none of batches"
        other = Api(api.url, key="other").upload(lines(1), **with_key("1"))
        assert other.id != files[0].id, "keys belong to API keys"

    def test_another_request_with_the_key_is_refused_by_its_name(self, api):
        file = api.upload(lines(2), **with_key("mine"))
        body = {"input_file_id": file.id, "endpoint": "/v1/completions"}
        api.batches.create(**body, completion_window="24h", **with_key("mine"))

        def upload(name="in.jsonl", **more):
            content = (name, io.BytesIO(b'{"x": 1}\n'))
            api.files.create(file=content, purpose="batch", **more, **with_key("mine"))

        for call in (
            lambda: api.upload(lines(3), **with_key("mine")),
            upload,
            lambda: api.batches.create(**body, completion_window="1h", **with_key("mine")),
        ):
            with pytest.raises(openai.UnprocessableEntityError) as caught:
                call()
            error = caught.value.response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == "Idempotency-Key"
            assert error["code"] == "idempotency_key_reused" and "'mine'" in error["message"]
        assert len(api.files.list(purpose="batch").data) == len(api.batches.list().data) == 1

    @pytest.mark.parametrize("key", ["", "k" * 256, "a\tb"])
    def test_a_key_that_is_none_is_refused(self, api, key):
        file = api.upload(lines(1))
        for call in (
            lambda: api.upload(lines(1), **with_key(key)),
            lambda: api.start(file.id, **with_key(key)),
        ):
            with pytest.raises(openai.BadRequestError, match="1 to 255 printable ASCII"):
                call()
        assert api.upload(lines(1), **with_key("k" * 255)).id

    def test_what_was_refused_may_be_sent_again(self, api):
        with pytest.raises(openai.NotFoundError):
            api.start("file-missing", **with_key("k"))
        assert api.start(api.upload(lines(1)).id, **with_key("k")).id

    def test_requests_at_the_same_time_make_one(self, api):
        file = api.upload(lines(2))
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            for call in (
                lambda _: api.upload(lines(50), **with_key("k")),
                lambda _: api.start(file.id, **with_key("k")),
            ):
                assert len({made.id for made in pool.map(call, range(NUM_AT_ONCE))}) == 1
        assert len(api.batches.list().data) == 1
        assert len(api.files.list(purpose="batch").data) == 2

    def test_a_restart_forgets_no_key(self, folder):
        ids = []
        for _ in range(2):
            with serving(StandIn(BatchesConfig(folder=str(folder)))) as url:
                api = Api(url)
                file = api.upload(lines(2), **with_key("f"))
                ids.append((file.id, api.wait(api.start(file.id, **with_key("b"))).id))
                # The lines of the batch can be read no more: the answer is there all the same.
                api.files.delete(file.id) if len(ids) == 2 else None
        assert ids[0] == ids[1]

    def test_cosched_batch_leaves_one_file_where_an_answer_is_lost(self, api):
        class Lossy(httpx.AsyncHTTPTransport):
            num_lost = 0

            async def handle_async_request(self, request):
                reply = await super().handle_async_request(request)
                if self.num_lost < 2:
                    self.num_lost += 1
                    await reply.aread()
                    raise httpx.ReadError("lost", request=request)
                return reply

        async def upload():
            rules = RetryRules(max_wait_s=30)
            async with BatchApi(base_url=api.url, api_key="key", rules=rules) as client:
                client._http._transport = transport = Lossy()
                content = io.BytesIO(json.dumps(lines(1)[0]).encode())
                return await client.upload(content, filename="n"), transport.num_lost

        file_id, num_lost = asyncio.run(upload())
        assert num_lost == 2
        assert [file.id for file in api.files.list(purpose="batch")] == [file_id]

    @pytest.mark.parametrize(
        "stand_in",
        [{"quota": QuotaConfig(max_open_batches=1, max_stored_mb=2.0)}],
        indirect=True,
    )
    def test_a_quota_that_the_first_used_up_does_not_refuse_the_second(self, api, stand_in):
        stand_in.is_held = True
        big = ["x" * 1_900_000]
        small = api.upload(lines(1))
        file, batch = api.upload(big, **with_key("f")), api.start(small.id, **with_key("b"))
        assert api.upload(big, **with_key("f")).id == file.id
        assert api.start(small.id, **with_key("b")).id == batch.id
        for call in (lambda: api.upload(big), lambda: api.start(small.id)):
            with pytest.raises(openai.RateLimitError):
                call()
        stand_in.is_held = False
        api.wait(batch)


class TestStore:
    def test_a_key_ends_after_a_day(self, files, store, clock):
        file, batch = add(files, once=once()), store.create(asked(), once=once("batches"))
        clock.now_s += KEPT_S - 1
        assert add(files, once=once()) == file
        assert store.create(asked(), once=once("batches")).id == batch.id
        clock.now_s += 1
        assert add(files, once=once(digest="another")).id != file.id
        assert store.create(asked(), once=once("batches")).id != batch.id

    def test_a_key_ends_with_its_object(self, files, clock):
        deleted = add(files, once=once())
        files.delete(deleted.id, owner="a")
        expiring = add(files, once=once(), expires_s=3600)
        assert expiring.id != deleted.id
        clock.now_s += 3600
        assert files.made_before(once()) is None
        assert add(files, once=once()).id not in (deleted.id, expiring.id)

    def test_keys_that_no_longer_hold_are_removed(self, files, store, database, clock):
        def num_kept():
            with database.read() as connection:
                count = sa.select(sa.func.count()).select_from(idempotency_keys)
                return connection.execute(count).scalar_one()

        gone = add(files, once=once(key="gone"))
        add(files, once=once(key="old"))
        store.create(asked(), once=once("batches"))
        files.delete(gone.id, owner="a")
        assert num_kept() == 2
        clock.now_s += KEPT_S - 1
        add(files, once=once(key="new"))
        files.sweep()
        assert num_kept() == 3
        clock.now_s += 1
        files.sweep()
        assert num_kept() == 1

    def test_requests_at_the_same_time_leave_one_object(self, files, store, tmp_path, monkeypatch):
        """Also on a shared store, where transactions run side by side, and where none of them had
        seen the other before it began."""
        monkeypatch.setattr(FileStore, "made_before", lambda self, once: None)
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            for key in "12345":
                sent = [once(key=key)] * NUM_AT_ONCE
                added = pool.map(lambda one: add(files, once=one), sent)
                assert len({file.id for file in added}) == 1
                sent = [once("batches", key=key)] * NUM_AT_ONCE
                made = pool.map(lambda one: store.create(asked(), once=one), sent)
                assert len({batch.id for batch in made}) == 1
        assert len(listed(files)) == 5 and on_disk(tmp_path) == set(listed(files))

    def test_of_two_different_requests_at_the_same_time_one_is_refused(
        self, files, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(FileStore, "made_before", lambda self, once: None)

        def tried(digest):
            try:
                return add(files, once=once(digest=digest)).id
            except ApiError as error:
                assert error.status == 422
                return None

        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(tried, "ab"))
        assert made.count(None) == 1 and len(on_disk(tmp_path)) == 1

    def test_a_quota_does_not_refuse_who_came_second(self, database, tmp_path, clock):
        quota = QuotaConfig(max_stored_mb=0.0015, max_open_batches=1)
        files = FileStore(database, FolderStorage(tmp_path), clock=clock, quota=quota)
        store = BatchStore(database, clock=clock, quota=quota)
        assert add(files, once=once()) == add(files, once=once())
        assert (
            store.create(asked(), once=once("batches")).id
            == store.create(asked(), once=once("batches")).id
        )
        with pytest.raises(ApiError, match="max_stored_mb"):
            add(files, once=once(key="other"))
        assert files.made_before(once(key="other")) is None

    @pytest.mark.parametrize("when", ["before it is recorded", "after it is recorded"])
    def test_a_crash_in_the_middle_of_an_upload_leaves_one_file(self, url, tmp_path, clock, when):
        class Crashing(FolderStorage):
            def publish(self, name):
                super().publish(name)
                os._exit(7)

        def upload():
            storage = (Crashing if when.startswith("before") else FolderStorage)(tmp_path)
            add(FileStore(Database(url), storage, clock=clock), once=once())
            os._exit(7)

        child = multiprocessing.get_context("fork").Process(target=upload)
        child.start()
        child.join()
        assert child.exitcode == 7 and len(on_disk(tmp_path)) == 1
        with contextlib.closing(Database(url)) as database:
            quota = QuotaConfig(max_stored_mb=1.0)
            files = FileStore(database, FolderStorage(tmp_path), clock=clock, quota=quota)
            before = listed(files)
            assert len(before) == (when.startswith("after"))
            file = add(files, once=once())
            assert listed(files) == [file.id] and (not before or before == [file.id])
            assert files.room("a") == 1_000_000 - 1001, "it counts once"
            files.sweep()
            assert on_disk(tmp_path) == {file.id}


def test_digests():
    assert json_digest(b'{"a": 1, "b": 2}') == json_digest(b'{"b":2,"a":1}')
    assert json_digest(b'{"a": 1}') != json_digest(b'{"a": "1"}')
    content = io.BytesIO(b"x" * (once_module._BLOCK_BYTES + 1))
    first = file_digest(content, "n", None)
    assert content.tell() == 0 and file_digest(content, "n", None) == first
    others = {file_digest(content, "n", 3600), file_digest(content, "m", None)}
    assert len(others | {first, file_digest(io.BytesIO(b"x"), "n", None)}) == 4
