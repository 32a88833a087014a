"""Callbacks of batches: events as OpenAI signs them, at least once, to public addresses only."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import sqlalchemy as sa

from cosched.batch import callback_sender
from cosched.batch.callback_rules import (
    SECRET_ENV,
    CallbackRules,
    RefusedUrlError,
    callback_rules,
)
from cosched.batch.callback_sender import CallbackSender
from cosched.batch.callbacks import CallbackQueue
from cosched.batch.config import BatchesConfig, CallbacksConfig
from cosched.batch.database import Database, callbacks
from cosched.batch.errors import ApiError
from cosched.batch.store import BatchStore
from cosched.errors import ConfigError
from tests.batch.api import line, lines, until
from tests.batch.receiver import LOOPBACK, SECRET, Receiver, unwrapped
from tests.batch.stand_in import StandIn
from tests.batch.test_store import asked

OTHER = "whsec_" + base64.b64encode(bytes(range(24))).decode()


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv(SECRET_ENV, SECRET)


@pytest.fixture
def sqlite(tmp_path):
    with contextlib.closing(Database(f"sqlite:///{tmp_path / 'b.sqlite'}")) as database:
        yield database


def rules_of(**settings):
    return callback_rules(BatchesConfig(callbacks=CallbacksConfig(**LOOPBACK | settings)))


def ended(store, *urls):
    """A batch of each URL, cancelled before a line was read."""
    for url in urls:
        batch = store.create(asked(metadata={"callback_url": url}))
        store.cancel(batch.id)
        assert store.end(batch.id)


def rows_of(queue):
    with queue._database.read() as connection:
        return connection.execute(sa.select(callbacks).order_by(callbacks.c.seq)).all()


def states_of(queue):
    return [(row.state, row.reason) for row in rows_of(queue)]


def is_through(queue):
    """Each callback has had an attempt that is recorded."""
    return all(state == "delivered" or reason for state, reason in states_of(queue))


async def sending(queue, rules, until, *, num_counted=0, timeout_s=120):
    """Send until that is so, and so many attempts are counted: after they are recorded."""
    sender = CallbackSender(queue, rules, clock=time.monotonic)
    task = asyncio.create_task(sender.run())
    async with asyncio.timeout(timeout_s):
        while not until() or sender.ended.total() < num_counted:
            assert not task.done()
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return sender


class TestApi:
    @pytest.fixture
    def receivers(self):
        with Receiver(500, 200) as own, Receiver() as all_batches:
            yield own, all_batches

    @pytest.fixture
    def stand_in(self, receivers, folder):
        settings = CallbacksConfig(urls=(receivers[1].url,), **LOOPBACK)
        return StandIn(BatchesConfig(folder=str(folder), callbacks=settings))

    def test_each_end_is_told_as_openai_tells_it(self, api, receivers, stand_in):
        own, all_batches = receivers
        told = {"metadata": {"callback_url": own.url}}
        done = api.wait(api.create(lines(2), **told))
        until(lambda: len(own.got) == 2 and len(all_batches.got) == 1)
        assert {(event.type, event.data.id) for event in unwrapped(own)} == {
            ("batch.completed", done.id)
        }
        assert len(set(own.ids)) == 1, "an attempt that is repeated has the same id"
        assert unwrapped(own)[0].created_at == done.completed_at
        assert own.got[0][0]["content-type"] == "application/json"
        bad = api.wait(api.create([line("a", url="/v1/nothing")]))
        stand_in.is_held = True
        held = api.create(lines(2))
        api.wait(held, "in_progress")
        api.batches.cancel(held.id)
        until(lambda: len(all_batches.got) == 3)
        found = [(event.type, event.data.id) for event in unwrapped(all_batches)]
        assert found[1:] == [("batch.failed", bad.id), ("batch.cancelled", held.id)]

        def state(path, headers=None):
            listed = httpx.get(api.url + path, headers={"authorization": "Bearer key"}).json()
            return next(one for one in listed["data"] if one["id"] == done.id)["cosched"]

        until(lambda: state("/v1/batches")["callbacks"][0]["state"] == "delivered")
        [mine] = state("/v1/batches")["callbacks"]
        assert (mine["host"], mine["attempts"]) == (f"127.0.0.1:{own.port}", 2)
        assert len(state("/cosched/batches")["callbacks"]) == 2, "the operator sees all"
        metrics = httpx.get(f"{api.url}/cosched/metrics").text
        assert 'cosched:batches_callbacks_total{result="delivered"} 4.0' in metrics
        assert 'cosched:batches_callbacks_total{result="retried"} 1.0' in metrics
        assert "cosched:batches_callbacks_waiting 0.0" in metrics

    def test_a_url_that_may_not_be_called_is_refused(self, api):
        for url, reason in (
            ("http://10.0.0.1/x", "10.0.0.1 is not public .batches.callbacks.allow_networks"),
            ("ftp://example.org", "must begin with https://HOST or http://HOST, not 'ftp://"),
            ("https://user:pw@example.org", "no user, no password"),
        ):
            with pytest.raises(openai.BadRequestError, match=reason) as caught:
                api.create(lines(1), metadata={"callback_url": url})
            assert caught.value.response.json()["error"]["param"] == "metadata.callback_url"


def test_a_server_without_callbacks_says_so(api):
    batch = api.create(lines(1), metadata={"callback_url": "https://example.org"})
    assert batch.cosched["ignored"] == ["metadata.callback_url"]


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("64:ff9b::5db8:d822", True),  # NAT64 of the first one
        *[
            (address, False)
            for address in (
                *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
                *("100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "fe80::1", "fd00::1", "ff02::1"),
                *("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "fec0::1", "240.0.0.1"),
            )
        ],
    ],
)
def test_only_public_addresses_are_called(address, is_allowed, monkeypatch):
    rules = rules_of(allow_networks=("10.9.0.0/16",))
    found = [(0, 0, 0, "", (address, 443)), (0, 0, 0, "", ("10.9.0.1", 443))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found)
    called = rules.addresses(rules.checked("https://a.example"))
    assert called == ([address] if is_allowed else []) + ["10.9.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found[:1])
    if not is_allowed:
        with pytest.raises(RefusedUrlError, match="no public address"):
            rules.addresses(rules.checked("https://a.example"))
        literal = f"[{address}]" if ":" in address else address
        with pytest.raises(RefusedUrlError, match="is not public"):
            rules.checked(f"https://{literal}/x")


def test_the_address_that_was_checked_is_the_one_that_is_called(
    sqlite, clock, monkeypatch, tmp_path
):
    """A name that changes between the two would lead elsewhere. TLS still checks the name."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here, to make a certificate")
    made = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=a -addext".split()
    files = ["-keyout", made[0], "-out", made[1]]
    subprocess.run(
        [*command, "subjectAltName=DNS:name.example", *files], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made[1], made[0])
    monkeypatch.setenv("SSL_CERT_FILE", str(made[1]))
    looked_up = []
    look_up = socket.getaddrinfo

    def changing(host, port, **more):
        looked_up.append(host)
        address = "127.0.0.1" if looked_up.count(host) == 1 else "10.0.0.1"
        return look_up(address, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    rules = rules_of(allow_http=False)
    store = BatchStore(sqlite, clock=clock, callback_rules=rules)
    queue = CallbackQueue(sqlite, clock=clock)
    with Receiver(context=context) as receiver:
        urls = [f"https://{name}:{receiver.port}/" for name in ("name.example", "other.example")]
        ended(store, *urls)
        sender = asyncio.run(sending(queue, rules, lambda: is_through(queue), num_counted=2))
        assert [headers["host"] for headers, _ in receiver.got] == [
            f"name.example:{receiver.port}"
        ], "and not the other, for which the certificate is not"
    assert sender.ended == {"delivered": 1, "retried": 1}
    assert looked_up == ["name.example", "other.example"]


def test_an_answer_is_a_status_and_one_host_keeps_no_other_waiting(sqlite, clock):
    """Redirects are not followed, and bodies without an end are not read. The clock stands still,
    so nothing is repeated."""
    rules = rules_of(timeout_s=120, max_at_once=3)
    store = BatchStore(sqlite, clock=clock, callback_rules=rules)
    queue = CallbackQueue(sqlite, clock=clock)
    with Receiver("silent") as silent, Receiver(302) as redirect, Receiver("endless") as endless:
        ended(store, *[silent.url] * 2, redirect.url, *[endless.url] * 3)
        told = [("waiting", "HTTP 302"), *[("delivered", None)] * 3]
        asyncio.run(sending(queue, rules, lambda: states_of(queue)[2:] == told))
        assert states_of(queue)[:2] == [("waiting", None)] * 2
        assert (len(redirect.got), len(endless.got)) == (1, 3)


def test_a_silent_host_is_given_up_after_a_while(sqlite, clock):
    rules = rules_of(timeout_s=0.3)
    queue = CallbackQueue(sqlite, clock=clock)
    with Receiver("silent") as silent:
        ended(BatchStore(sqlite, clock=clock, callback_rules=rules), *[silent.url] * 2)
        asyncio.run(sending(queue, rules, lambda: is_through(queue)))
        assert states_of(queue) == [("waiting", "no answer within 0.3 s")] * 2


def test_pauses_double_up_to_a_bound_and_end(sqlite, clock):
    rules = rules_of(retry_s=10.0, give_up_h=5.0)
    store = BatchStore(sqlite, clock=clock, callback_rules=rules)
    queue = CallbackQueue(sqlite, clock=clock)
    ended(store, "http://127.0.0.1:9/")

    async def pauses():
        found, chances = [], iter([0.0] * 9 + [0.5] * 99)
        sender = CallbackSender(queue, rules, clock=clock, chance=lambda: next(chances))
        while states_of(queue)[0][0] == "waiting":
            [callback] = queue.claim(limit=9, busy=(), lease_s=1)
            assert not queue.claim(limit=9, busy=(), lease_s=1), "it is leased"
            await sender._put_off(callback, "HTTP 500")
            due_at = rows_of(queue)[0].due_at or clock.now_s
            found.append(due_at - clock.now_s)
            clock.now_s = due_at
        return found, sender

    found, sender = asyncio.run(pauses())
    assert found == [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 2700, 2700, 2700, 2700, 0]
    assert sender.ended == {"retried": 13, "failed": 1}
    assert states_of(queue) == [("failed", "HTTP 500")] and queue.num_waiting() == 0


@pytest.mark.parametrize("when", ["before it is sent", "after it is sent"])
def test_a_kill_loses_none(url, when, monkeypatch):
    monkeypatch.setattr(callback_sender, "_LEASE_S", 0.3)
    rules = rules_of(timeout_s=0.2)

    def die(*args, **more):
        os.kill(os.getpid(), signal.SIGKILL)

    def end_and_send(target):
        database = Database(url)
        queue = CallbackQueue(database, clock=time.time)
        ended(BatchStore(database, clock=time.time, callback_rules=rules), target)
        if when.startswith("before"):
            CallbackRules.addresses = die
        else:
            queue.delivered = die
        asyncio.run(sending(queue, rules, lambda: False))

    with Receiver() as receiver:
        child = multiprocessing.get_context("fork").Process(
            target=end_and_send, args=(receiver.url,)
        )
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        before = list(receiver.ids)
        assert bool(before) == when.startswith("after")
        with contextlib.closing(Database(url)) as database:
            queue = CallbackQueue(database, clock=time.time)
            asyncio.run(sending(queue, rules, lambda: not queue.num_waiting()))
            assert states_of(queue) == [("delivered", None)]
        assert len(receiver.got) > len(before) and len(set(receiver.ids)) == 1
        assert unwrapped(receiver)[-1].type == "batch.cancelled"


def test_replicas_do_not_send_the_same(url, clock):
    rules = rules_of()
    with (
        contextlib.closing(Database(url)) as one,
        contextlib.closing(Database(url) if one.is_shared else one) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        hosts = [f"http://127.0.0.1:{port}/" for port in range(1, 31)]
        ended(BatchStore(one, clock=clock, callback_rules=rules), *hosts)
        queues = [CallbackQueue(each, clock=clock) for each in (one, other)]

        def claimed(queue):
            return [queue.claim(limit=3, busy=(), lease_s=5) for _ in range(10)]

        found = [
            callback for some in pool.map(claimed, queues) for group in some for callback in group
        ]
        assert sorted(callback.url for callback in found) == sorted(hosts)
        clock.now_s += 6
        [again] = queues[0].claim(limit=1, busy=(), lease_s=5)
        late = next(callback for callback in found if callback.seq == again.seq)
        queues[1].not_delivered(late, "late", due_at=clock.now_s)
        assert queues[0].num_waiting() == 30
        assert not [state for state in states_of(queues[0]) if state[1] == "late"]


def test_secrets_are_those_of_the_owner_and_each_signs(sqlite, clock, tmp_path):
    (tmp_path / "server").write_text(f"{OTHER}\n{SECRET}\n")
    (tmp_path / "team").write_text(OTHER)
    settings = CallbacksConfig(
        secret_file=str(tmp_path / "server"),
        owner_secret_files={"team": str(tmp_path / "team")},
        **LOOPBACK,
    )
    config = BatchesConfig(callbacks=settings, owners={"team": ("key",)})
    rules = callback_rules(config, environ={})
    store = BatchStore(sqlite, clock=time.time, callback_rules=rules)
    queue = CallbackQueue(sqlite, clock=time.time)
    with Receiver() as receiver:
        for owner in ("a", config.owner_of("key")):
            batch = store.create(asked(owner=owner, metadata={"callback_url": receiver.url}))
            store.cancel(batch.id)
            store.end(batch.id)
        asyncio.run(sending(queue, rules, lambda: len(receiver.got) == 2))
    server, team = receiver.got
    client = openai.OpenAI(api_key="x")
    for secret in (SECRET, OTHER):
        client.webhooks.verify_signature(server[1], server[0], secret=secret)
    client.webhooks.verify_signature(team[1], team[0], secret=OTHER)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.verify_signature(team[1], team[0], secret=SECRET)


def test_a_wrong_configuration_is_refused_without_its_secrets(tmp_path):
    def refused(environ=None, **settings):
        with pytest.raises((ConfigError, ValueError)) as caught:
            callback_rules(
                BatchesConfig(callbacks=CallbacksConfig(**settings)),
                {SECRET_ENV: SECRET} if environ is None else environ,
            )
        return str(caught.value)

    assert SECRET_ENV in refused({}) and "openssl" in refused({})
    wrong = refused({SECRET_ENV: f"{SECRET} hunter2"})
    assert "number 2 is no secret" in wrong and "24 to 64 bytes" in wrong
    assert "hunter2" not in wrong and SECRET not in wrong
    assert "cannot be read" in refused(secret_file=str(tmp_path / "nothing"))
    assert "unknown owner 'x'" in refused(owner_secret_files={"x": "/f"})
    assert "urls: must begin with https://HOST, not 'http://a'" in refused(urls=("http://a",))
    assert "allow_networks" in refused(allow_networks=("10.0.0.1/8",))
    assert "timeout_s must be above 0, not -1" in refused(timeout_s=-1)


def test_a_batch_ends_also_where_its_url_may_be_called_no_longer(database, clock):
    """Otherwise it would be open for ever."""
    open_store = BatchStore(database, clock=clock)
    batch = open_store.create(asked(metadata={"callback_url": "http://127.0.0.1/x"}))
    rules = rules_of(allow_networks=())
    with pytest.raises(ApiError):
        rules.check_metadata(batch.metadata)
    store = BatchStore(database, clock=clock, callback_rules=rules)
    store.cancel(batch.id)
    assert store.end(batch.id)
    queue = CallbackQueue(database, clock=clock)
    [(state, reason)] = states_of(queue)
    assert state == "failed" and "is not public" in reason
    clock.now_s += 10
    assert store.remove_ended(kept_s=5) == 1 and not states_of(queue)


def test_a_name_that_dns_cannot_have_is_a_failed_attempt(sqlite, clock):
    rules = rules_of()
    ended(BatchStore(sqlite, clock=clock, callback_rules=rules), f"https://{'a' * 64}.example/")
    queue = CallbackQueue(sqlite, clock=clock)
    asyncio.run(sending(queue, rules, lambda: is_through(queue)))
    assert "not known" in states_of(queue)[0][1]


def test_a_batch_whose_window_has_ended_is_told_of_as_expired(sqlite, clock):
    rules = rules_of(urls=("http://127.0.0.1:9/",))
    store = BatchStore(sqlite, clock=clock, callback_rules=rules)
    batch = store.create(asked(window_s=5))
    clock.now_s += 6
    assert store.expire_due() == [batch.id] and store.end(batch.id)
    [callback] = CallbackQueue(sqlite, clock=clock).claim(limit=1, busy=(), lease_s=1)
    assert b'"type":"batch.expired"' in callback.body()
