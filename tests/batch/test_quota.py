"""What one API key may have: what is new is refused, what is there stays."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import replace

import openai
import pytest

from cosched.batch.config import QuotaConfig
from cosched.batch.database import Database
from cosched.batch.errors import ApiError
from cosched.batch.jsonl import remote
from cosched.batch.store import BatchStore
from cosched.limits.api_keys import ApiKeys
from cosched.limits.claims import KeyClaims, digest_of
from cosched.run_batch import main as run_batch
from tests.batch.api import Api, line, lines, serving, until
from tests.batch.stand_in import StandIn
from tests.batch.test_store import asked


def refusal(call):
    with pytest.raises(openai.RateLimitError) as error:
        call()
    body = error.value.response.json()["error"]
    assert (body["type"], body["code"]) == ("insufficient_quota", "quota_exceeded")
    return body["message"], error.value.response.headers


@pytest.mark.parametrize("stand_in", [{"quota": QuotaConfig(max_open_batches=2)}], indirect=True)
def test_open_batches_of_a_key_whatever_the_tenant(api, stand_in):
    stand_in.is_held = True
    mine = [api.create(lines(3), metadata={"tenant": f"t{n}"}) for n in range(2)]
    for metadata in ({"tenant": "t2"}, None):
        message, headers = refusal(lambda m=metadata: api.create(lines(3), metadata=m))
        assert message == (
            "this API key has 2 batches that have not ended, and may have 2 "
            "(batches.quota.max_open_batches)"
        )
        assert int(headers["retry-after"]) > 0
    Api(api.url, key="other").create(lines(3))  # has its own
    stand_in.is_held = False
    for batch in mine:
        assert api.wait(batch).request_counts.completed == 3
    assert api.wait(api.create(lines(3), metadata={"tenant": "t2"})).status == "completed"


@pytest.mark.parametrize(
    "quota", [QuotaConfig(max_open_batches=2), QuotaConfig(max_waiting_lines=2)]
)
def test_where_keys_are_not_kept_apart_each_tenant_has_its_own(database, clock, quota):
    store = BatchStore(database, clock=clock, quota=quota)
    for tenant in ("a", "b"):
        for _ in range(2):
            store.create(replace(asked(), owner="", tenant=tenant, num_lines=1))
        with pytest.raises(ApiError, match=f"tenant '{tenant}' has 2 "):
            store.create(replace(asked(), owner="", tenant=tenant, num_lines=1))


@pytest.mark.parametrize(
    ("entry", "refused"), [("*", "key"), (digest_of("other"), "other")], ids=["any", "named"]
)
def test_a_key_without_offline_sequences_has_no_batches(stand_in, entry, refused):
    """Neither new ones nor, after a restart, those that it has."""
    known = {entry: KeyClaims(max_offline=0), digest_of("third"): KeyClaims(max_offline=1)}
    with serving(stand_in) as url:
        stand_in.is_held = True
        before = Api(url, key=refused).create(lines(2))
        until(lambda: stand_in.num_in_flight == 2)
    stand_in.is_held = False
    again = StandIn(stand_in.service.config, keys=ApiKeys(claims=known, has_owners=True))
    with serving(again) as url:
        with pytest.raises(openai.PermissionDeniedError, match="max_offline is 0"):
            Api(url, key=refused).create(lines(2))
        third = Api(url, key="third")
        assert third.wait(third.create(lines(2))).status == "completed"
        assert Api(url, key=refused).batches.retrieve(before.id).request_counts.completed == 0
        assert again.asked.total() == 2


@pytest.mark.parametrize("stand_in", [{"quota": QuotaConfig(max_waiting_lines=10)}], indirect=True)
def test_waiting_lines(api, stand_in):
    stand_in.is_held = True
    first = api.create([*lines(6), ""])  # an empty line is none
    # Also before its lines are read, and when they are.
    for _ in range(2):
        message, headers = refusal(lambda: api.create(lines(5)))
        assert message == (
            "this API key has 6 lines without a result, and may have 10 "
            "(batches.quota.max_waiting_lines): 5 more are too many"
        )
        assert int(headers["retry-after"]) > 0
        api.wait(first, "in_progress")
    second = api.create(lines(4))
    refusal(lambda: api.create(lines(1)))
    refusal(lambda: api.create(lines(1), metadata={"tenant": "new"}))
    stand_in.is_held = False
    for batch, count in ((first, 6), (second, 4)):
        assert api.wait(batch).request_counts.completed == count
    api.wait(api.create(lines(10)))


@pytest.mark.parametrize("stand_in", [{"quota": QuotaConfig(max_stored_mb=0.004)}], indirect=True)
def test_stored_bytes_count_the_rows_of_files_too(api, folder):
    file = api.upload(["x" * 1499])
    message, _ = refusal(lambda: api.upload(["x" * 500]))
    assert message == (
        "the files of this API key may have 1500 bytes more, of batches.quota.max_stored_mb, and "
        "each counts 1000 beside its own: 1501 are too many. Delete some"
    )
    assert len(list((folder / "files").iterdir())) == 1
    Api(api.url, key="other").upload(["x" * 500])
    api.files.delete(file.id)
    # Results count, and are never refused.
    done = api.wait(api.create(lines(15)))
    assert done.request_counts.completed == 15
    assert api.files.retrieve(done.output_file_id).bytes > 2000
    refusal(lambda: api.upload(["x"]))
    api.files.delete(done.output_file_id)
    api.upload(["x"])


def test_checks_at_the_same_time_count_each_other(database, url, clock):
    quota = QuotaConfig(max_open_batches=5)
    with contextlib.closing(Database(url)) as other:
        stores = [BatchStore(one, clock=clock, quota=quota) for one in (database, other)]
        num_refused = []

        def create(store):
            for _ in range(10):
                try:
                    store.create(asked())
                except ApiError:
                    num_refused.append(1)

        threads = [threading.Thread(target=create, args=(store,)) for store in stores * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(stores[0].open()) == 5 and len(num_refused) == 35


@pytest.mark.parametrize("stand_in", [{"quota": QuotaConfig(max_open_batches=2)}], indirect=True)
def test_run_batch_uploads_the_rest_when_there_is_room(
    api, stand_in, tmp_path, monkeypatch, capsys
):
    # The first two do not end before the third was refused.
    stand_in.is_held = True
    fetch_all = remote.RemoteJob._fetch_all

    async def release(job, **options):
        stand_in.is_held = False
        await fetch_all(job, **options)

    monkeypatch.setattr(remote.RemoteJob, "_fetch_all", release)
    monkeypatch.setattr(remote, "_POLL_S", 0.05)
    monkeypatch.setattr(remote, "_MAX_LINES", 10)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in lines(55)))
    call = ["-i", str(source), "-o", str(out), "--base-url", api.url, "--api-key", "key"]
    assert run_batch(call) == 0
    answers = [json.loads(one)["custom_id"] for one in out.read_text().splitlines()]
    assert sorted(answers) == sorted(f"c{n}" for n in range(55))
    assert "the rest is uploaded once the open batches are fetched" in capsys.readouterr().err
    assert not api.files.list().data


@pytest.mark.parametrize("stand_in", [{"quota": QuotaConfig(max_open_batches=1)}], indirect=True)
def test_run_batch_says_when_others_have_filled_the_quota(api, stand_in, tmp_path, capsys):
    stand_in.is_held = True
    batch = api.create(lines(1))
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line("a")) + "\n")
    call = ["-i", str(source), "-o", str(out), "--base-url", api.url, "--api-key", "key"]
    assert run_batch(call) == 3
    assert "run the same command again when the quota allows" in capsys.readouterr().err
    stand_in.is_held = False
    api.wait(batch)
    assert run_batch(call) == 0
