"""What an upload may take before it is a file: places, bytes and time."""

from __future__ import annotations

import contextlib
import socket
import threading

import httpx
import openai
import pytest

from cosched.batch.config import QuotaConfig
from tests.batch.api import Api, until


@contextlib.contextmanager
def begun(url, key="key", *, length=1_000_000, sent=b""):
    """An upload of which `sent` has arrived."""
    host, port = url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: multipart/form-data; boundary=xyz\r\nContent-Length: {length}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head.encode() + sent)
        yield connection


def status(connection):
    return int(connection.recv(65536).split()[1])


@pytest.mark.parametrize("stand_in", [{"quota": QuotaConfig(max_stored_mb=1)}], indirect=True)
def test_the_quota_is_looked_at_before_the_body(api):
    """Nothing of it is sent, so an answer cannot have read it."""
    with begun(api.url, length=3_000_000) as connection:
        assert status(connection) == 429
    with begun(api.url, length=300_000_000) as connection:
        assert status(connection) == 429


def test_an_upload_above_the_limit_is_refused_by_its_announced_size(api):
    with begun(api.url, length=300_000_000) as connection:
        assert status(connection) == 413


def test_a_body_that_stops_is_answered_and_frees_its_place(api, monkeypatch):
    monkeypatch.setattr("cosched.batch.uploads._SILENCE_S", 0.3)
    with begun(api.url, sent=b"--xyz\r\n") as connection:
        assert status(connection) == 408


def test_a_body_that_trickles_is_answered(api, monkeypatch):
    monkeypatch.setattr("cosched.batch.uploads._SILENCE_S", 0.5)
    with begun(api.url, sent=b"--xyz\r\n") as connection:
        ended = threading.Event()

        def trickle():
            with contextlib.suppress(OSError):
                while not ended.wait(0.1):
                    connection.sendall(b"-")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert status(connection) == 408
        finally:
            ended.set()
            thread.join()


def test_a_key_has_some_of_the_places_and_others_have_theirs(api, monkeypatch):
    monkeypatch.setattr("cosched.batch.uploads._WAIT_S", 0.5)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(begun(api.url, sent=b"--xyz\r\n"))
        until(lambda: not can_upload(api, refusal="4 of one API key"))
        assert Api(api.url, key="other").upload(["x"]).bytes == 2
    until(lambda: can_upload(api))


def can_upload(api, *, refusal=""):
    try:
        api.upload(["x"])
    except openai.RateLimitError as error:
        assert refusal in str(error)
        return False
    return True


def test_the_name_of_a_file_is_bounded(api):
    form = {"file": ("n" * 256, b"{}\n")}
    reply = httpx.post(f"{api.url}/v1/files", files=form, data={"purpose": "batch"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        "file: its name has 256 characters; the limit is 255"
    )
