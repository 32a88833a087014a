"""Shares of batches, keys of prefixes, requests of a server to itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
from collections import Counter

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.batch.config import BatchesConfig, QuotaConfig
from cosched.batch.forecast import Demand, shares
from cosched.batch.jsonl.prefix_order import CHUNK_BYTES, MAX_CHUNKS, prefix_key
from cosched.batch.open_store import check_store, lock_file, open_store
from cosched.batch.service import InProcessTransport
from cosched.config import Config
from cosched.core.shares import share_of, share_path
from cosched.engine.arguments import check_files
from cosched.errors import ConfigError


@st.composite
def demands(draw):
    weights = {
        "a": draw(st.sampled_from([0.5, 1.0, 3.0])),
        "a/x": draw(st.sampled_from([0.5, 1.0, 3.0])),
    }
    names = st.sampled_from(["a/x", "a/y", "b/x", "/x", "/y"])
    return [
        Demand(
            batch_id=str(n),
            share=share_of(share_path(draw(names), draw(st.sampled_from("op"))), weights),
            num_in_flight=draw(st.integers(0, 20)),
            num_waiting=draw(st.integers(0, 30)),
            due=draw(st.none() | st.integers(1, 9)),
        )
        for n in range(draw(st.integers(0, 6)))
    ]


@given(found=demands(), num_free=st.integers(0, 60))
def test_all_free_places_go_to_the_key_and_in_it_to_the_tenant_with_the_fewest_lines(
    found, num_free
):
    given_to = shares(found, num_free=num_free)
    assert sum(given_to.values()) == min(num_free, sum(one.num_waiting for one in found))
    load = {one.batch_id: one.num_in_flight + given_to.get(one.batch_id, 0) for one in found}
    sums = Counter()
    for one in found:
        for depth in range(1, len(one.share.path) + 1):
            sums[one.share.path[:depth]] += load[one.batch_id]
    for one in found:
        assert given_to.get(one.batch_id, 0) <= one.num_waiting
        if given_to.get(one.batch_id, 0) == one.num_waiting:
            continue  # it wants no more
        # Whoever wants more has at least as much as others of its kind that were given some.
        for other in found:
            if not given_to.get(other.batch_id, 0):
                continue
            if other.share == one.share:
                due, others = (x.due or math.inf for x in (one, other))
                assert others <= due, "a late one waits behind others"
                if others == due:
                    assert load[one.batch_id] >= load[other.batch_id] - 1
                continue
            pairs = enumerate(zip(one.share.path, other.share.path, strict=False), start=1)
            depth = next(depth for depth, (mine, its) in pairs if mine != its)
            mine, its = (
                (sums[x.share.path[:depth]], x.share.weights[depth - 1]) for x in (one, other)
            )
            assert mine[0] / mine[1] >= (its[0] - 1) / its[1] - 1e-9


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # The weight of a key, however many tenants another one has, and whatever it calls them.
        (["bob/x", *(f"acme/{n}" for n in range(40))], {"bob": 100, "acme": 20}),
        (["bob/x", "acme/gold", "acme/bob"], {"bob": 100, "acme": 20}),
        (["acme/nightly", "acme/x", "bob/x"], {"bob": 100, "acme/nightly": 15, "acme/x": 5}),
        # Without names of keys there are tenants only.
        (["/gold", "/x"], {"/gold": 80, "/x": 40}),
    ],
)
def test_lines_are_taken_by_the_weights_of_keys_and_of_tenants_within_them(names, expected):
    weights = {"bob": 5.0, "acme/nightly": 3.0, "gold": 2.0}
    asked = [
        Demand(
            batch_id=name,
            share=share_of(share_path(name), weights),
            num_in_flight=0,
            num_waiting=500,
        )
        for name in names
    ]
    given_to = shares(asked, num_free=120)
    found = {
        prefix: sum(num for name, num in given_to.items() if f"{name}/".startswith(f"{prefix}/"))
        for prefix in expected
    }
    assert found == expected


def test_made_up_keys_are_one_key_in_which_owners_share():
    paths = [share_path("/x", f"owner{n % 4}") for n in range(40)] + [share_path("bob/x")]
    asked = [
        Demand(batch_id=str(n), share=share_of(path, {}), num_in_flight=0, num_waiting=500)
        for n, path in enumerate([*paths, share_path("/many", "owner0")])
    ]
    given_to = shares(asked, num_free=160)
    assert given_to["40"] == 80, "of the one with a name"
    of_first = sum(given_to.get(str(n), 0) for n in (*range(0, 40, 4), 41))
    assert of_first == 20, "whatever the number of its tenants"


def chat(*texts):
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_keys_are_small_and_what_stands_before_the_prompt_does_not_count():
    long = "x" * 10**6
    assert len(prefix_key(chat(long))) == 4 * MAX_CHUNKS
    body = {"prompt": long, "max_tokens": 3}
    assert prefix_key(json.dumps(body).encode()) == prefix_key(
        json.dumps({"model": "y", **body}).encode()
    )
    head = {"tools": [{"name": "t" * CHUNK_BYTES}]}
    keys = {prefix_key(json.dumps({"messages": m, **head}).encode())[:4] for m in (["a"], ["b"])}
    assert len(keys) == 1
    assert prefix_key(b"{}") == b""


async def ask(app, **changes):
    transport = InProcessTransport(app, state={"own": True})
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.request(**({"method": "POST", "url": "/a"} | changes))


def test_a_request_to_oneself_is_a_whole_request():
    async def app(scope, receive, send):
        message = await receive()
        said = [scope["path"], scope["query_string"].decode(), scope["state"]]
        body = json.dumps([*said, message["body"].decode()]).encode()
        await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        await send({"type": "http.response.body", "body": body[5:]})

    reply = asyncio.run(ask(app, url="/a/b?c=d", content=b"hello"))
    assert reply.status_code == 201 and reply.headers["a"] == "b"
    assert reply.json() == ["/a/b", "c=d", {"own": True}, "hello"]


def test_an_application_that_fails_is_an_error_of_the_connection():
    async def fails(scope, receive, send):
        raise KeyError("x")

    async def silent(scope, receive, send):
        pass

    for app in (fails, silent):
        with pytest.raises(httpx.RequestError):
            asyncio.run(ask(app))


def test_a_cancelled_request_is_a_disconnect():
    seen = []

    async def app(scope, receive, send):
        await receive()
        seen.append((await receive())["type"])
        seen.append("went on")

    async def run():
        transport = InProcessTransport(app, state={})
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            task = asyncio.create_task(client.get("/"))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.05)

    asyncio.run(run())
    assert seen == ["http.disconnect", "went on"]


def test_a_folder_is_for_one_server(tmp_path):
    def lock(is_shared=False):
        return lock_file(tmp_path / "b" / "lock", what="b", is_shared=is_shared)

    with lock():
        with pytest.raises(ConfigError, match="b: another server uses it"):
            lock()
        with pytest.raises(ConfigError, match="another server uses it"):
            check_files(Config(batches=BatchesConfig(folder=str(tmp_path / "b"))))
    shared = [lock(is_shared=True) for _ in range(2)]
    with pytest.raises(ConfigError, match="another server uses it"):
        lock()
    for one in shared:
        one.close()
    lock().close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, and must be a folder"):
        check_store(BatchesConfig(folder=str(tmp_path / "file")))


def test_a_store_has_one_folder_and_a_folder_one_store(tmp_path, postgres_url):
    here, elsewhere = str(tmp_path / "here"), str(tmp_path / "elsewhere")
    of_its_own = BatchesConfig(folder=str(tmp_path / "own"))
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # servers that share the store
            store = open_store(BatchesConfig(folder=here, url=postgres_url))
            stack.callback(store.close)
    with pytest.raises(ConfigError, match=r"elsewhere.*: the store that batches"):
        check_store(BatchesConfig(folder=elsewhere, url=postgres_url))
    check_store(of_its_own)
    check_store(of_its_own)
    for folder, url in ((here, None), (of_its_own.folder, postgres_url)):
        with pytest.raises(ConfigError, match="it has the files of another store"):
            check_store(BatchesConfig(folder=folder, url=url))


def test_a_missing_database_is_reported_in_one_sentence(tmp_path):
    pytest.importorskip("psycopg")
    url = f"postgresql://me:secret@/batches?host={tmp_path}"
    with pytest.raises(ConfigError, match="the store of batches cannot be opened") as error:
        check_store(BatchesConfig(folder=str(tmp_path / "b"), url=url))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (BatchesConfig, {"lease_s": 0}, "lease_s must be above 0, not 0"),
        (BatchesConfig, {"max_file_mb": 0}, "max_file_mb must be above 0, not 0"),
        (BatchesConfig, {"max_lines": 0}, "max_lines must be at least 1"),
        (BatchesConfig, {"low_watermark": 1024}, "low_watermark must be from 0 to 1023"),
        (BatchesConfig, {"url": "sqlite://"}, "url without folder"),
        (
            BatchesConfig,
            {"folder": "s3://k:pw@b/c"},
            r"folder 's3://\*\*\*@b/c' is a URL.*url must",
        ),
        (BatchesConfig, {"tenant_weights": {"a": 0}}, r"tenant_weights\.a must be above 0, not 0"),
        (BatchesConfig, {"late_margin_s": -1}, "late_margin_s must be 0 or more, not -1"),
        (BatchesConfig, {"keep_ended_days": 0}, "keep_ended_days must be above 0, not 0"),
        (BatchesConfig, {"owners": {"a": ("k",), "b": ("k",)}}, "owners: one key is there twice"),
        (BatchesConfig, {"owners": {"a": ("sha256:1",)}}, "64 hexadecimal digits"),
        (
            QuotaConfig,
            {"max_open_batches": 0},
            r"quota\.max_open_batches must be at least 1, not 0",
        ),
        (QuotaConfig, {"max_waiting_lines": -1}, r"quota\.max_waiting_lines must be at least 1"),
        (QuotaConfig, {"max_stored_mb": 0.0}, r"quota\.max_stored_mb must be above 0, not 0"),
    ],
)
def test_wrong_settings_are_refused(config, values, message):
    with pytest.raises(ValueError, match=message):
        config(**values)


def test_keys_of_one_owner_are_the_same_and_a_digest_is_no_key():
    digest = f"sha256:{hashlib.sha256(b'old').hexdigest()}"
    config = BatchesConfig(owners={"team": (digest, "new")})
    plain = BatchesConfig()
    assert config.owner_of("new") == config.owner_of("old") == plain.owner_of("old")
    assert config.owner_of(digest) != config.owner_of("old")
    assert config.owner_of("other") == plain.owner_of("other")
    assert config.owner_of("") == ""
    assert "new" not in repr(config.owners["team"])
    # Keys are apart where the server asks for one, if nothing else is configured.
    assert not plain.isolates(None) and plain.isolates("key") and config.isolates(None)
    for isolates in (True, False):
        assert BatchesConfig(isolate_keys=isolates, folder="f").isolates("key") is isolates


def test_a_new_folder_is_for_the_user_of_the_server_alone(tmp_path):
    """It holds prompts and replies."""
    folder = tmp_path / "new"
    check_store(BatchesConfig(folder=str(folder)))
    assert folder.stat().st_mode & 0o777 == 0o700
