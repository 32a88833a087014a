"""Reading one line: what is accepted, what each mistake is called, what is sent."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.batch.jsonl.file_kinds import fault_of_file
from cosched.batch.jsonl.line_results import Failure, encode_line, failure_in, record_of
from cosched.batch.jsonl.lines import (
    UNREADABLE,
    URLS,
    BadLine,
    IdSet,
    RawLine,
    RequestLine,
    parse_line,
    raw_lines,
)
from cosched.limits.bounds import ANY_MODEL, Scope

LIMIT = 1 << 20


def parse(entry, number=7, scope=ANY_MODEL):
    data = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    return parse_line(RawLine(number=number, data=data), max_line_bytes=LIMIT, scope=scope)


def entry(**changes):
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return {key: value for key, value in (good | changes).items() if value is not ...}


CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "image"}
LINK = {"url": "https://a.b/c"}
PARTS = [{"type": kind, kind: LINK} for kind in ("image_url", "video_url", "audio_url")]
PARTS.append({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})
INPUT_IMAGE = {"type": "input_image", "image_url": "https://a.b/c.png"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
SCHEMA = {"type": "object", "properties": {"image": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "draw", "parameters": SCHEMA}}

BOM = b"\xef\xbb\xbf"


def numbered(data, limit=LIMIT):
    return [(line.number, line.data) for line in raw_lines(io.BytesIO(data), max_line_bytes=limit)]


MISTAKES = {
    "not_json": (b"hello", "invalid_json_line", None),
    "cut_json": (b'{"custom_id": "a", "method"', "invalid_json_line", None),
    "two_objects": (b'{"custom_id": "a"} {"custom_id": "b"}', "invalid_json_line", None),
    "not_a_number": (b'{"custom_id": "a", "body": NaN}', "invalid_json_line", None),
    "lone_surrogate": (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
    "nested_deeply": (b"[" * 100_000, "invalid_json_line", None),
    "latin_1": ('{"custom_id": "ä"}'.encode("latin-1"), "invalid_encoding", None),
    "utf_16": ('{"custom_id": "a"}'.encode("utf-16-le"), "invalid_json_line", None),
    "zero_bytes": (bytes(100), "invalid_json_line", None),
    "array": ([1], "invalid_line", None),
    "string": ("a", "invalid_line", None),
    "null": (b"null", "invalid_line", None),
    "no_id": (entry(custom_id=...), "missing_required_parameter", "custom_id"),
    "null_id": (entry(custom_id=None), "missing_required_parameter", "custom_id"),
    "number_as_id": (entry(custom_id=3), "invalid_custom_id", "custom_id"),
    "empty_id": (entry(custom_id=""), "invalid_custom_id", "custom_id"),
    "no_method": (entry(method=...), "missing_required_parameter", "method"),
    "get": (entry(method="GET"), "invalid_method", "method"),
    "lower_case_post": (entry(method="post"), "invalid_method", "method"),
    "no_url": (entry(url=...), "missing_required_parameter", "url"),
    "other_url": (entry(url="/v1/models"), "invalid_url", "url"),
    "whole_url": (entry(url="http://x/v1/completions"), "invalid_url", "url"),
    "list_as_url": (entry(url=["/v1/completions"]), "invalid_url", "url"),
    "no_body": (entry(body=...), "missing_required_parameter", "body"),
    "string_as_body": (entry(body="{}"), "invalid_body", "body"),
    "stream": (entry(body={"stream": True}), "streaming_unsupported", "body.stream"),
    "stream_as_string": (entry(body={"stream": "true"}), "streaming_unsupported", "body.stream"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_has_its_code_and_names_the_part(name):
    data, code, param = MISTAKES[name]
    bad = parse(data)
    assert isinstance(bad, BadLine)
    assert (bad.number, bad.code, bad.param) == (7, code, param)
    assert bad.message


def test_the_message_names_the_value_and_the_choices():
    message = parse(entry(url="/v1/models")).message
    assert "/v1/models" in message
    assert all(url in message for url in URLS)
    assert len(parse(entry(url="x" * 10_000)).message) < 300
    assert "a guard model on /v1/chat/completions" in parse(entry(url="/v1/moderations")).message


@pytest.mark.parametrize("url", URLS)
def test_what_is_sent_is_offline(url):
    line = parse(entry(url=url, body={"input": "ü", "stream": False, "service_tier": "default"}))
    assert isinstance(line, RequestLine)
    body = json.loads(line.body)
    has_tier = url in ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    tier = "flex" if has_tier else "default"
    assert body == {"input": "ü", "stream": False, "service_tier": tier}


@pytest.mark.parametrize(
    ("has_media", "url", "body"),
    [
        *(
            (True, CHAT, {"messages": [{"role": "user", "content": [TEXT, part]}]})
            for part in PARTS
        ),
        (True, "/v1/responses", {"input": [{"role": "user", "content": [INPUT_IMAGE]}]}),
        (True, "/v1/messages", {"messages": [{"role": "user", "content": [TOOL_RESULT]}]}),
        (True, "/v1/embeddings", {"input": [{"image": "https://a.b/c.png"}]}),
        (True, "/v1/rerank", {"query": "a", "documents": ["b", [TEXT, PARTS[0]]]}),
        (False, CHAT, {"messages": [{"role": "user", "content": [TEXT]}], "tools": [TOOL]}),
        (False, CHAT, {"messages": [{"role": "user", "content": "image_url"}]}),
        (False, "/v1/embeddings", {"input": [{"text": "a", "image": None}]}),
        (False, "/v1/embeddings", {"input": [[1, 2], [3]]}),
    ],
)
def test_lines_with_images_video_or_sound_are_known(has_media, url, body):
    assert parse(entry(url=url, body=body)).has_media is has_media


@pytest.mark.parametrize(
    ("given_priority", "sent"), [(-5, -5), (-1, -1), (0, ...), (3, ...), (None, ...), ("2", "2")]
)
def test_only_an_offline_priority_is_sent(given_priority, sent):
    body = json.loads(parse(entry(body={"priority": given_priority})).body)
    assert body.get("priority", ...) == sent


def test_lines_are_numbered_as_in_an_editor():
    data = b"\xef\xbb\xbfone\r\n\n  \nfour\nno line break"
    assert numbered(data) == [
        (1, b"one\r\n"),
        (2, b"\n"),
        (3, b"  \n"),
        (4, b"four\n"),
        (5, b"no line break"),
    ]
    empty = [line.is_empty for line in raw_lines(io.BytesIO(data), max_line_bytes=LIMIT)]
    assert empty == [False, True, True, False, False]


def test_a_long_line_is_passed_over_without_being_held():
    class Endless(io.RawIOBase):
        left = 200 << 20

        def readable(self):
            return True

        def readinto(self, target):
            count = min(len(target), self.left)
            self.left -= count
            target[:count] = b"x" * count
            return count

    tracemalloc.start()
    lines = [line.data for line in raw_lines(io.BufferedReader(Endless()), max_line_bytes=1000)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines == [None]
    assert peak < 8 << 20


@given(
    st.lists(st.binary(max_size=12) | st.binary(max_size=12).map(lambda b: BOM + b)),
    st.integers(1, 8),
)
def test_no_limit_changes_the_numbering(parts, limit):
    data = b"\n".join(parts)
    whole, limited = numbered(data), numbered(data, limit=limit)
    assert [number for number, _ in limited] == [number for number, _ in whole]
    for (_, line), (_, cut) in zip(whole, limited, strict=True):
        assert cut == (line if len(line.removesuffix(b"\n")) <= limit else None)


@given(st.binary())
def test_no_bytes_make_it_raise(data):
    parse(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
parts = {"custom_id": st.just("a") | json_values, "method": st.just("POST") | json_values}
parts |= {"url": st.sampled_from(URLS) | json_values, "body": json_values}


@given(st.fixed_dictionaries({}, optional=parts))
def test_any_object_is_either_sent_whole_or_refused_with_a_reason(line):
    raw = json.dumps(line)
    parsed = parse(raw.encode())
    if isinstance(parsed, BadLine):
        assert parsed.code and parsed.message
        return
    sent = json.loads(parsed.body)
    for key, value in line["body"].items():
        if key not in ("service_tier", "priority"):
            assert sent.get(key) == value


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/v1/chat/completions", {"top_k": 2**32}, "body.top_k"),
        ("/v1/chat/completions", {"stop_regex": "(?=a)"}, "body.stop_regex"),
        ("/v1/completions", {"logit_bias": {"-1": 1}}, "body.logit_bias"),
        ("/v1/completions", {"seed": 2**64}, "body.seed"),
        ("/v1/embeddings", {"priority": -(2**64)}, "body.priority"),
        ("/v1/score", {"temperature": 1e9}, "body.temperature"),
        ("/v1/responses", {"max_output_tokens": 2**40}, "body.max_output_tokens"),
    ],
)
def test_a_field_beyond_every_model_s_bound_is_named(url, body, param):
    bad = parse(entry(url=url, body=body))
    assert isinstance(bad, BadLine)
    assert (bad.code, bad.param, bad.custom_id) == ("invalid_value", param, "a")


@given(st.lists(st.text(max_size=3), max_size=200))
def test_an_id_is_new_exactly_once(texts):
    ids, seen = IdSet(max_ids=len(texts)), set()
    for text in texts:
        assert ids.add(text) == (text not in seen)
        seen.add(text)
        assert len(ids) == len(seen)


def test_null_fields_of_a_body_are_absent():
    line = parse(entry(body={"prompt": "a", "n": None, "stream": None, "metadata": {"a": None}}))
    assert json.loads(line.body) == {
        "prompt": "a",
        "metadata": {"a": None},
        "service_tier": "flex",
    }


def test_a_url_of_azure_is_that_with_v1():
    assert parse(entry(url="/chat/completions")).url == "/v1/chat/completions"


@pytest.mark.parametrize("body", [b'{"p": NaN}', rb'{"p": "\udcff"}', b'{"p": "\xff"}'])
def test_a_line_that_only_lenient_readers_accept_keeps_its_id(body):
    data = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ' + body + b"}"
    bad = parse(data)
    assert isinstance(bad, BadLine) and bad.code in UNREADABLE and bad.custom_id == "a"
    assert parse(data.replace(b'"a"', rb'"\ud800"')).custom_id is None


KNOWN = Scope(
    fields={
        "/v1/completions": frozenset({"prompt"}),
        "/v1/responses": frozenset({"input", "tools"}),
    },
    tools=frozenset({"function"}),
)


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        ("/v1/completions", {"guided_json": {}}, "guided_json"),
        ("/v1/completions", {"best_of": 2}, "best_of"),
        ("/v1/completions", {"batch_size": 0}, "batch_size"),
        ("/v1/completions", {"best_of": 1, "suffix": "", "functions": [], "logprobs": None}, None),
        ("/v1/responses", {"conversation": "c"}, "conversation"),
        ("/v1/responses", {"tools": [{"type": "web_search_preview"}]}, "tools[0].type"),
        ("/v1/responses", {"tools": [{"type": "function"}], "conversation": None}, None),
        ("/v1/embeddings", {"other": 1}, None),
    ],
)
def test_a_line_may_have_only_fields_that_its_endpoint_uses(url, fields, param):
    line = parse(entry(url=url, body=fields), scope=KNOWN)
    found = line.param.removeprefix("body.") if isinstance(line, BadLine) else None
    assert found == param
    if param is not None:
        assert line.code == "invalid_value" and param in line.message


@given(st.text(alphabet='a\u0085\u2028\u2029\\\n"ü'))
def test_a_record_is_one_line_for_every_reader(text):
    data = encode_line({"custom_id": text}).decode()
    assert data.splitlines() == [data.removesuffix("\n")]
    assert json.loads(data) == {"custom_id": text}


@pytest.mark.parametrize(
    ("start", "word"),
    [
        (gzip.compress(b"{}"), "gzip"),
        (b"PK\x03\x04", "zip"),
        ("{}".encode("utf-16"), "UTF-16"),
        ("{}".encode("utf-16-le"), "UTF-16"),
        (b'{\n  "custom_id": 1\n}\n', "several lines"),
        (b"\xef\xbb\xbf[{}]", "array"),
        (b"{}\r{}\r", "CR"),
    ],
    ids="gzip zip bom utf-16 lines array cr".split(),
)
def test_a_file_of_another_kind_is_named(start, word):
    assert word in fault_of_file(start)
    assert fault_of_file(b'{"custom_id": "' + start[:0] + b'a"}\r\n{}\r\n') is None


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({"object": "error", "message": "m", "type": "BadRequest", "code": 400}, {}),
        ({"error": {"message": "m", "code": "own", "param": "p"}}, {"code": "own", "param": "p"}),
        ({"detail": "m"}, {}),
        ("text", {"rest": {"answer": "text"}}),
        ({"id": "r", "choices": []}, {"rest": {"id": "r", "choices": []}}),
    ],
)
def test_the_error_of_a_line_is_where_openai_has_it(told, error):
    rest = error.pop("rest", {})
    failure = Failure(code="http_400", message="m", status=400, body=json.dumps(told).encode())
    made = record_of(RequestLine(number=3, custom_id="a", url="", body=b""), failure, record_id="r")
    record = json.loads(made.data)
    fields = {"message": "m", "type": "invalid_request_error", "param": None, "code": "http_400"}
    assert record["response"]["body"] == {**rest, "error": {**fields, **error}}
    assert record["error"] is None and not made.is_answer
    assert failure_in(made.data) == (error.get("code", "http_400"), "m")
