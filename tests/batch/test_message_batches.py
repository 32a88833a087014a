"""Anthropic's Message Batches over the store of batches. tests/server/test_clients_live.py has the
`anthropic` client."""

from __future__ import annotations

import io
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.batch import message_lines
from cosched.batch.batch_records import Offer
from cosched.batch.config import BatchesConfig, QuotaConfig
from cosched.batch.errors import ApiError
from cosched.batch.message_lines import lines_of
from tests.batch.api import Api, serving, until
from tests.batch.stand_in import Clock, StandIn

PATH = "/v1/messages/batches"


def asked(custom_id, prompt=None, **changes):
    content = custom_id if prompt is None else prompt
    params = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    return {"custom_id": custom_id, "params": params | changes}


class Messages:
    def __init__(self, url, key="key"):
        self.http = httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=60)

    def call(self, method, path="", *, status=200, **more):
        reply = self.http.request(method, PATH + path, **more)
        assert reply.status_code == status, reply.text
        return reply.json()

    def create(self, *requests, **more):
        return self.call("POST", json={"requests": requests}, **more)

    def wait(self, batch):
        def now():
            return self.call("GET", f"/{batch['id']}")

        until(lambda: now()["processing_status"] == "ended")
        return now()

    def results(self, batch):
        lines = self.http.get(batch["results_url"]).text.splitlines()
        return {one["custom_id"]: one["result"] for one in map(json.loads, lines)}


@pytest.fixture
def messages(stand_in):
    with serving(stand_in) as url:
        yield Messages(url)


def counts(**named):
    names = ("processing", "succeeded", "errored", "canceled", "expired")
    return dict.fromkeys(names, 0) | named


def test_a_batch_from_its_creation_to_its_deletion(messages, stand_in):
    stand_in.is_held = True
    begun = messages.create(asked("a"), asked("b", "refuse"), asked("c", temperature=-1))
    assert (begun["type"], begun["processing_status"]) == ("message_batch", "in_progress")
    assert begun["request_counts"] == counts(processing=3) and begun["results_url"] is None
    error = messages.call("DELETE", f"/{begun['id']}", status=400)["error"]
    assert error["type"] == "invalid_request_error" and "has not ended" in error["message"]
    messages.call("GET", f"/{begun['id']}/results", status=400)
    stand_in.is_held = False
    done = messages.wait(begun)
    assert done["request_counts"] == counts(succeeded=1, errored=2)
    assert begun["created_at"] <= done["ended_at"] < done["expires_at"]
    found = messages.results(done)
    assert found["a"]["message"]["content"] == [{"type": "text", "text": "to a"}]
    for name, reason in (("b", "not this one"), ("c", "temperature: -1 is below 0")):
        error = found[name]["error"]
        assert found[name]["type"] == "errored" and error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["message"].startswith(reason)
    # It is a batch, of a file: the other API has both, and the deletion takes them.
    api = Api(str(messages.http.base_url))
    assert api.batches.retrieve(done["id"]).usage.input_tokens == 7  # cached ones included
    assert len(api.files.list().data) == 3
    gone = messages.call("DELETE", f"/{done['id']}")
    assert gone == {"id": done["id"], "type": "message_batch_deleted"}
    assert not api.files.list().data and not api.batches.list().data
    assert messages.call("GET", f"/{done['id']}", status=404)["error"]["type"] == "not_found_error"


def test_a_cancelled_batch_has_a_result_for_each_request(messages, stand_in):
    stand_in.num_answered = 1
    batch = messages.create(asked("a"), asked("b"))
    until(lambda: len(stand_in.order) == 2 and stand_in.num_in_flight == 1)
    canceled = messages.call("POST", f"/{batch['id']}/cancel")
    assert canceled["cancel_initiated_at"] and canceled["processing_status"] != "in_progress"
    done = messages.wait(batch)
    assert done["request_counts"] == counts(succeeded=1, canceled=1)
    assert sorted(one["type"] for one in messages.results(done).values()) == [
        "canceled",
        "succeeded",
    ]
    # 409 would be sent again by Anthropic's client.
    messages.call("POST", f"/{batch['id']}/cancel", status=400)


def test_what_was_never_checked_expires(folder):
    clock = Clock()
    stand_in = StandIn(BatchesConfig(folder=str(folder)), clock=clock)
    with serving(stand_in) as url:
        messages = Messages(url)
        stand_in.service.store.begin_validation = lambda *args, **named: False
        batch = messages.create(asked("a"), asked("b"))
        clock.now_s += 86_400
        done = messages.wait(batch)
        assert done["request_counts"] == counts(expired=2)
        assert messages.results(done) == {key: {"type": "expired"} for key in "ab"}


def test_the_list_is_of_a_key_and_has_pages_in_both_directions(messages, stand_in):
    Api(str(messages.http.base_url)).create([])  # of another endpoint
    made = [messages.create(asked("a"))["id"] for _ in range(4)][::-1]

    def page(**query):
        found = messages.call("GET", params=query)
        ids = [one["id"] for one in found["data"]]
        assert (found["first_id"], found["last_id"]) == (ids[0], ids[-1])
        return ids, found["has_more"]

    assert page() == (made, False)
    assert page(limit=2) == (made[:2], True)
    assert page(limit=2, after_id=made[1]) == (made[2:], False)
    assert page(limit=1, before_id=made[2]) == (made[1:2], True)
    assert page(limit=2, before_id=made[2]) == (made[:2], False)
    error = messages.call("GET", params={"limit": 1001}, status=400)["error"]
    assert "limit must be" in error["message"]


@pytest.mark.parametrize(
    "stand_in",
    [{"max_lines": 3, "max_line_bytes": 5000, "quota": QuotaConfig(max_open_batches=1)}],
    indirect=True,
)
def test_what_is_refused_leaves_nothing(messages, stand_in):
    def refusal(*requests, status, kind):
        error = messages.create(*requests, status=status)["error"]
        assert error["type"] == kind
        return error["message"]

    wrong = {"status": 400, "kind": "invalid_request_error"}
    large = {"status": 413, "kind": "request_too_large"}
    assert "requests.1: custom_id 'a' is" in refusal(asked("a"), asked("a"), **wrong)
    assert "requests.0: streaming" in refusal(asked("a", stream=True), **wrong)
    assert "requests.0: Expected `str` matching" in refusal(asked("a b"), **wrong)
    assert "requests.0: longer than 5000 bytes" in refusal(asked("a", "x" * 5000), **large)
    assert "max_lines" in refusal(*map(asked, "abcd"), **large)
    stand_in.is_held = True
    messages.create(asked("a"))
    message = refusal(asked("a"), status=429, kind="rate_limit_error")
    assert "batches.quota.max_open_batches" in message
    other = Messages(str(messages.http.base_url), key="other")
    assert other.create(asked("a"))["processing_status"] == "in_progress"
    stand_in.offer = Offer(endpoints=("/v1/embeddings",))
    assert "/v1/messages" in refusal(asked("a"), **wrong)
    assert len(Api(str(messages.http.base_url)).files.list().data) == 1


BODIES = {
    "no JSON": b"requests",
    "cut": b'{"requests": [{"custom_id": "a", "par',
    "empty": b"",
    "no requests": b'{"requests": []}',
    "another field": b'{"requests": [{"custom_id": "a", "params": {}}], "x": 1}',
    "params are a list": b'{"requests": [{"custom_id": "a", "params": []}]}',
    "no params": b'{"requests": [{"custom_id": "a"}]}',
    "not a number": b'{"requests": [{"custom_id": "a", "params": {"top_p": NaN}}]}',
    "not UTF-8": b'{"requests": [{"custom_id": "a", "params": {"x": "\xff"}}]}',
    "nested": b'{"requests": [' + b"[" * 100_000,
    "a lone surrogate": b'{"requests": [{"custom_id": "a", "params": {"x": "\\ud800"}}]}',
}


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_body_is_refused(name):
    with pytest.raises(ApiError) as error:
        list(lines_of(io.BytesIO(BODIES[name]), BatchesConfig()))
    assert error.value.status == 400 and "requests" in str(error.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.lists(st.dictionaries(st.text(min_size=2), json_values), min_size=1),
    st.integers(1, 9),
    st.sampled_from((None, 1)),
)
def test_each_request_is_a_line_wherever_windows_end(params, window, indent):
    message_lines._READ_CHARS, before = window, message_lines._READ_CHARS
    try:
        requests = [{"custom_id": f"c{n}", "params": one} for n, one in enumerate(params)]
        body = json.dumps({"requests": requests}, indent=indent, ensure_ascii=False).encode()
        lines = list(lines_of(io.BytesIO(body), BatchesConfig()))
    finally:
        message_lines._READ_CHARS = before
    assert all(line.count(b"\n") == 1 and line.endswith(b"\n") for line in lines)
    assert [json.loads(line)["body"] for line in lines] == params
