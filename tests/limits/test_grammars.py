"""The size of a request's grammar."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.limits.grammars import (
    MOST_DEPTH,
    MOST_DOCUMENT_BYTES,
    MOST_ENTRIES,
    MOST_PROPERTIES_OF_OBJECT,
    MOST_REPEATS,
    MOST_RULE_BYTES,
    grammar_fault,
)


def nested(depth):
    return "[" * depth + "]" * depth


def enum(count):
    return {"enum": list(range(count))}


def properties(count, prefix="p"):
    return {"type": "object", "properties": {f"{prefix}{i}": {} for i in range(count)}}


@pytest.mark.parametrize(
    ("name", "grammar"),
    [
        ("json_schema", "$$ANY$$"),
        ("json_schema", enum(MOST_ENTRIES)),
        ("json_schema", properties(MOST_PROPERTIES_OF_OBJECT)),
        ("json_schema", nested(MOST_DEPTH)),
        ("json_schema", {"type": "string", "maxLength": MOST_REPEATS}),
        ("json_schema", {"type": "object", "properties": {"a": {"$ref": "#"}}}),
        ("json_schema", {"anyOf": [{"$ref": "#"}, {"type": "string"}]}),
        ("json_schema", {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}),
        ("json_schema", {"$ref": "#/$defs/missing"}),
        ("json_schema", {"$ref": "https://example.org/schema"}),
        ("json_schema", {"const": '"[[[' * 200}),
        ("structural_tag", {"type": "structural_tag", "structures": [], "triggers": []}),
        ("regex", "a{1,100000}"),
        ("regex", r"\(" * 1000),
        ("ebnf", 'root ::= "a"'),
    ],
)
def test_grammars_within_the_bounds_are_taken(name, grammar):
    text = grammar if isinstance(grammar, str) else json.dumps(grammar)
    assert grammar_fault(name, text) is None


@pytest.mark.parametrize(
    ("name", "grammar", "reason"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", enum(MOST_ENTRIES + 1), "enum entries"),
        ("json_schema", enum(200_000), "bytes are above"),
        ("json_schema", {"a": [enum(3000), enum(3000)]}, "enum entries"),
        ("json_schema", properties(MOST_PROPERTIES_OF_OBJECT + 1), "properties"),
        (
            "json_schema",
            {"allOf": [properties(400, f"{i}x") for i in range(13)]},
            "5000 properties",
        ),
        ("json_schema", nested(MOST_DEPTH + 1), "levels deep"),
        ("json_schema", nested(100_000), "levels deep"),
        ("json_schema", {"type": "string", "maxLength": MOST_REPEATS + 1}, "maxLength"),
        ("json_schema", {"type": "string", "pattern": "(" * 65}, "pattern: nested"),
        ("json_schema", {"$ref": "#"}, "back to itself"),
        (
            "json_schema",
            {"$ref": "#/d/a", "d": {"a": {"$ref": "#/d/b"}, "b": {"$ref": "#/d/a"}}},
            "back to itself",
        ),
        ("structural_tag", " " * MOST_DOCUMENT_BYTES + "{}", "bytes are above"),
        ("regex", "a" * (MOST_RULE_BYTES + 1), "bytes are above"),
        ("regex", "é" * (MOST_RULE_BYTES // 2 + 1), "bytes are above"),
        ("regex", "(" * (MOST_DEPTH + 1), "levels deep"),
        ("regex", "a{100001}", "{100001} is above 100000"),
        ("regex", "a{0,99999999999999999999}", "is above"),
        ("ebnf", "root ::= " + "(" * 65, "levels deep"),
    ],
)
def test_grammars_beyond_the_bounds_are_refused_with_the_bound(name, grammar, reason):
    text = grammar if isinstance(grammar, str) else json.dumps(grammar)
    assert reason in grammar_fault(name, text)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["$ref", "enum", "properties", "maxLength", "pattern", "#", "a"]),
            inner | st.just("#/properties/a"),
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.sampled_from(["json_schema", "structural_tag", "regex", "ebnf"]), json_values | st.text())
def test_whatever_the_text_is_the_check_ends_with_a_reason_or_none(name, value):
    text = value if isinstance(value, str) else json.dumps(value)
    fault = grammar_fault(name, text)
    assert fault is None or fault


def test_a_long_chain_of_references_is_checked_in_linear_time():
    """The check runs in the server's event loop."""
    names = [f"a{n}" for n in range(8000)]
    chain = {one: {"$ref": f"#/d/{next_one}"} for one, next_one in itertools.pairwise(names)}
    text = json.dumps({"$ref": "#/d/a0", "d": {**chain, names[-1]: {"type": "string"}}})
    began_s = time.thread_time()
    assert grammar_fault("json_schema", text) is None
    assert time.thread_time() - began_s < 2
    circle = json.dumps({"$ref": "#/d/a0", "d": {**chain, names[-1]: {"$ref": "#/d/a0"}}})
    assert "back to itself" in grammar_fault("json_schema", circle)


@pytest.mark.parametrize("text", ["{" + " " * 30_000, "{1" * 15_000, "{1 " * 10_000])
def test_repetitions_are_found_in_linear_time(text):
    began_s = time.thread_time()
    assert grammar_fault("regex", text) is None
    assert grammar_fault("json_schema", json.dumps({"pattern": text})) is None
    assert time.thread_time() - began_s < 1
