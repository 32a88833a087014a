"""The values of the fuzz reach every field, and both sides of every bound."""

from __future__ import annotations

import json
import random

import pytest

from cosched.batch.jsonl.lines import URLS as LINE_URLS
from cosched.batch.jsonl.lines import BadLine, RawLine, RequestLine, parse_line
from cosched.limits.bounds import Free, Scope
from cosched.limits.table import INTERNAL, TABLE
from tests.fuzz.boundaries import OPENAI, URLS, boundary_body, values_of

SCOPE = Scope(vocab_size=2048, context_len=1024, hidden_size=64)

BOUNDED = [
    (struct, name)
    for struct, fields in TABLE.items()
    for name, bound in fields.items()
    if not isinstance(bound, Free)
]


@pytest.mark.parametrize(("struct", "name"), BOUNDED)
def test_values_lie_on_both_sides_of_each_bound(struct, name):
    bound = TABLE[struct][name]
    faults = [bound.fault(value, SCOPE) for value in [*values_of(bound, SCOPE), "x" * 10**6]]
    assert None in faults, "no value is within"
    assert any(faults), "no value is beyond"


def test_every_field_of_a_request_is_reached():
    rng = random.Random(1)
    seen = set()
    for _ in range(6000):
        body = boundary_body(rng, rng.choice(URLS), "m", SCOPE)
        params = body.get("sampling_params")
        seen |= set(body) | set(params if isinstance(params, dict) else ())
    wanted = {
        OPENAI.get(name, name)
        for struct in ("SamplingParams", "GenerateReqInput", "EmbeddingReqInput")
        for name, bound in TABLE[struct].items()
        if bound is not INTERNAL
    }
    assert wanted <= seen, wanted - seen


def test_a_line_with_any_of_the_values_is_read_or_named_wrong():
    rng = random.Random(2)
    kinds = set()
    for number in range(2000):
        url = rng.choice(LINE_URLS)
        body = boundary_body(rng, url, "m", SCOPE)
        entry = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        data = json.dumps(entry).encode()
        line = parse_line(RawLine(number=number, data=data), max_line_bytes=1 << 24, scope=SCOPE)
        kinds.add(type(line) if isinstance(line, RequestLine) else line.code)
        assert isinstance(line, RequestLine) or (line.message and line.code)
    assert {RequestLine, "invalid_value"} <= kinds
    assert kinds <= {RequestLine, "invalid_value", "invalid_json", "stream_unsupported",
                     "background_unsupported", BadLine}  # fmt: skip
