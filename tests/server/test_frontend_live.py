"""Programs of SGLang's frontend language on a running server, offline."""

from __future__ import annotations

import itertools

import httpx

from cosched.frontend import OfflineEndpoint, offline  # before sglang

import sglang as sgl  # isort: skip

numbers = itertools.count(10_000)
ONLINE, OFFLINE = "online", "offline"


@sgl.function
def review(s, subject):
    s += f"A review of {subject}, in a few words. "
    s += sgl.gen("summary", max_tokens=4)
    s += " It is "
    s += sgl.select("verdict", choices=["good", "bad", "neither of them"])
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += f". Reason {i}: "
        fork += sgl.gen("reason", max_tokens=3)
    s += "".join(fork["reason"] for fork in forks)


def batch(size):
    # Never the same twice: a cached prompt needs no prefill.
    return [{"subject": f"number {next(numbers)}"} for _ in range(size)]


def assert_complete(states):
    for state in states:
        assert state.error() is None
        assert state["verdict"] in ("good", "bad", "neither of them")
        assert state.get_meta_info("summary")["completion_tokens"] == 4
        assert state.text().startswith("A review of number ")


def test_an_offline_endpoint_gives_the_answers_of_an_online_one(server, seen):
    arguments = batch(3)

    def texts(backend):
        httpx.post(f"{server.url}/flush_cache", timeout=120).raise_for_status()
        states = review.run_batch(arguments, backend=backend, num_threads=1, temperature=0)
        assert_complete(states)
        return [state.text() for state in states]

    online = texts(sgl.RuntimeEndpoint(server.url))
    assert seen() == {ONLINE}
    assert texts(OfflineEndpoint(server.url)) == online
    assert seen() == {OFFLINE}
    state = review.run(subject="streams", backend=OfflineEndpoint(server.url), stream=True)
    assert "".join(state.text_iter()).startswith("A review of streams")
    assert seen() == {OFFLINE}


def test_block(server, seen):
    backend = sgl.RuntimeEndpoint(server.url)
    sgl.set_default_backend(backend)
    try:
        with offline():
            assert_complete(review.run_batch(batch(4), temperature=0))
        assert seen() == {OFFLINE}
        assert_complete(review.run_batch(batch(4), temperature=0))
        assert seen() == {ONLINE}
        with offline(backend):
            assert_complete(review.run_batch(batch(4), backend=backend, temperature=0))
        assert seen() == {OFFLINE}
    finally:
        sgl.set_default_backend(None)
