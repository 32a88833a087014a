"""Sending one line: what is tried again, what fails, and when the client gives up."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.batch.jsonl.client import Client, RetryRules
from cosched.batch.jsonl.line_results import Answer, Failure
from cosched.batch.jsonl.lines import RequestLine
from tests.batch.api import until
from tests.fake_server import Reply, answer

ABORTED = Reply(body=b'{"id": "r", "choices": [{"text": "x", "finish_reason": "abort"}]}')
FAST = RetryRules(max_wait_s=5.0, max_retries=3, base_s=0.01, cap_s=0.05)


def line(number=1, url="/v1/completions"):
    body = json.dumps({"prompt": number}).encode()
    return RequestLine(number=number, custom_id=str(number), url=url, body=body)


def send(fake, *lines, rules=FAST, **settings):
    """Send all at once; their outcomes, in order."""

    async def run():
        client = Client(
            base_url=fake.base_url,
            concurrency=8,
            rules=rules,
            rng=random.Random(0),
            **settings,
        )
        async with client:
            return await asyncio.gather(*[client.send(one) for one in lines or (line(),)])

    return asyncio.run(run())


def failing_first(num_times, reply):
    return lambda asked: reply if asked.nth <= num_times else answer(asked)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (b'{"id": "r9", "x": 1.10, "y": []}', b'{"id": "r9", "x": 1.10, "y": []}'),
        (b'{\r\n  "id": "r9",\n  "b": ["x\\ny", 1.10]\n}\n', b'{"id":"r9","b":["x\\ny",1.10]}'),
    ],
)
def test_an_answer_is_handed_on_as_the_server_wrote_it_but_in_one_line(fake, sent, kept):
    fake.behave = lambda asked: Reply(body=sent)
    [found] = send(fake)
    assert isinstance(found, Answer)
    assert (found.status, found.request_id, found.body) == (200, "r9", kept)


def test_every_request_says_that_it_is_offline_and_has_the_key(fake):
    send(fake, line(1), line(2, url="/v1/embeddings"))
    assert {asked.url for asked in fake.asked} == {"/v1/completions", "/v1/embeddings"}
    assert all(asked.headers["x-smg-priority"] == "bulk" for asked in fake.asked)
    assert all("authorization" not in asked.headers for asked in fake.asked)
    send(fake, api_key="secret")
    assert fake.asked[-1].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_is_full_costs_no_retries(fake, status):
    fake.behave = failing_first(9, Reply(status=status))
    assert isinstance(send(fake)[0], Answer)
    assert len(fake.asked) == 10


@pytest.mark.parametrize("cut_at", [0, 10, 60, 100])
def test_a_cut_connection_is_tried_again(fake, cut_at):
    fake.behave = failing_first(3, Reply(body=b"{}" * 100, cut_at=cut_at))
    assert isinstance(send(fake)[0], Answer)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 501, 302])
def test_what_the_server_refuses_is_final(fake, status):
    fake.behave = lambda asked: Reply(
        status=status, body=b'{"object": "error", "message": "too long"}'
    )
    [failure] = send(fake)
    assert (failure.code, failure.message) == (f"http_{status}", "too long")
    assert (failure.status, failure.body) == (status, b'{"object": "error", "message": "too long"}')
    assert len(fake.asked) == 1


@pytest.mark.parametrize(
    ("body", "message", "kept"),
    [
        (b'{"error": {"message": "a"}}', "a", b'{"error": {"message": "a"}}'),
        (b'{"error": "b"}', "b", b'{"error": "b"}'),
        (b'{"detail": "c"}', "c", b'{"detail": "c"}'),
        (b"<html>", "HTTP 400", b'"<html>"'),
        (b"", "HTTP 400", b'""'),
        (b"[1]", "HTTP 400", b"[1]"),
    ],
)
def test_the_reason_is_found_wherever_servers_put_it(fake, body, message, kept):
    fake.behave = lambda asked: Reply(status=400, body=body)
    [failure] = send(fake)
    assert (failure.message, failure.body) == (message, kept)


def test_an_accident_in_the_server_is_retried_a_few_times(fake):
    accident = Reply(status=500, body=b'{"message": "oops"}')
    fake.behave = failing_first(FAST.max_retries, accident)
    assert isinstance(send(fake)[0], Answer)
    fake.behave = lambda asked: accident
    [found] = send(fake, line(2))
    assert (found.code, found.status) == ("http_500", 500)
    assert fake.prompts().count(2) == 1 + FAST.max_retries


def test_an_abort_by_the_operator_is_no_attempt_of_the_line(fake):
    fake.behave = failing_first(3 * FAST.max_retries, ABORTED)
    assert isinstance(send(fake)[0], Answer)
    fake.behave = lambda asked: ABORTED
    rules = RetryRules(max_wait_s=0.1, max_retries=3, base_s=0.01, cap_s=0.02)
    [found] = send(fake, line(2), rules=rules)  # it is aborted again and again
    assert (found.code, found.status) == ("aborted", 200)


def test_an_answer_that_is_no_json_is_no_answer(fake):
    fake.behave = lambda asked: Reply(body=b"<html>hello</html>")
    [failure] = send(fake)
    assert (failure.code, failure.status) == ("bad_response", 200)


def test_a_line_fails_when_it_takes_longer_than_allowed(fake):
    fake.behave = lambda asked: answer(asked, delay_s=5)
    [failure] = send(fake, timeout_s=0.2)
    assert isinstance(failure, Failure)
    assert failure.code == "timeout" and "0.2 s" in failure.message


def test_it_does_not_give_up_on_a_full_server_that_works_on_something(fake):
    """One request is taken and takes long; the other is refused for longer than --max-wait."""
    is_taken, refused_s = threading.Event(), []

    def behave(asked):
        if asked.body["prompt"] == 1:
            is_taken.set()
            until(lambda: refused_s and refused_s[-1] - refused_s[0] > 0.5)
            return answer(asked)
        is_taken.wait()
        refused_s.append(time.monotonic())
        return Reply(status=503) if refused_s[-1] - refused_s[0] <= 0.5 else answer(asked)

    fake.behave = behave
    rules = RetryRules(max_wait_s=0.2, base_s=0.01, cap_s=0.01)
    outcomes = send(fake, line(1), line(2), rules=rules)
    assert all(isinstance(outcome, Answer) for outcome in outcomes)


def test_it_waits_as_long_as_the_server_asks_for(fake):
    busy = Reply(status=429, headers={"retry-after": "1"})
    fake.behave = failing_first(1, busy)
    began_s = time.monotonic()
    send(fake, rules=RetryRules(base_s=0.01, cap_s=0.5))
    assert time.monotonic() - began_s >= 1.0


@given(st.integers(0, 10_000), st.integers())
def test_waits_grow_and_stay_bounded(num_tries, seed):
    rules = RetryRules()
    wait_s = rules.wait_s(num_tries, random.Random(seed))
    longest = min(rules.cap_s, rules.base_s * 2 ** min(num_tries, 30))
    assert longest / 2 <= wait_s <= longest
