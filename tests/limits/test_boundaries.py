"""The values of the fuzz reach every field, and both sides of every bound."""

from __future__ import annotations

import json
import random

from cosched.batch.jsonl.lines import URLS as LINE_URLS
from cosched.batch.jsonl.lines import BadLine, RawLine, RequestLine, parse_line
from cosched.limits.bounds import Scope
from cosched.limits.bounds_table import INTERNAL, TABLE
from tests.fuzz.boundaries import OPENAI, URLS, boundary_body

SCOPE = Scope(vocab_size=2048, context_len=1024, hidden_size=64)


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
    assert kinds <= {RequestLine, "invalid_value", "invalid_json_line", "streaming_unsupported",
                     "background_unsupported", BadLine}  # fmt: skip
