"""Stop patterns: the same answers as Python's `re`, and no pattern that takes long."""

from __future__ import annotations

import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosched.limits.patterns import MOST_TEXT_CHARS, matches, pattern_fault

LETTERS = "abcXé木Kß0٣_ .-\n\t\u00a0\u2028$"
chars = st.sampled_from(LETTERS)
classes = st.sampled_from(
    [
        *(r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", "[a-c]", "[^a\n]", r"[\w-]", r"[^\s\d]"),
        *("[[a]", "[a&&b]", "[a--c]", r"[\]x^]", r"\<", r"\x41", "X*?", r"[\D5]"),
    ]
)
places = st.sampled_from(["^", r"\b", r"\A", "(?m:^)", "(?m:$)"])


def grouped(inner):
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "*?", "{1,2}", "{2}", "{,3}"])).map(
            lambda two: f"({two[0]}){two[1]}"
        ),
        st.tuples(st.sampled_from(["?i:", "?s:", "?m:", "?P<n>"]), inner).map(
            lambda two: f"({two[0]}{two[1]})" if two[0] != "?P<n>" else f"(?:{two[1]})"
        ),
    )


patterns = st.recursive(
    st.one_of(chars.map(re.escape), classes, places), grouped, max_leaves=6
).flatmap(lambda body: st.sampled_from([body, body + "$", body + r"\Z", "(?i)" + body]))


@settings(max_examples=800, deadline=None)
@given(patterns, st.text(LETTERS, min_size=1, max_size=12))
def test_an_ordinary_pattern_is_found_where_python_finds_it(pattern, text):
    if pattern_fault([pattern]) is not None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = re.search(pattern, text) is not None
    assert matches(pattern, text) == expected


@pytest.mark.parametrize(
    "pattern",
    ["\n\n", r"END\b", r"\d{3}-\d{4}", "(yes|no)$", r"(?i)stop\s*here", r"</?[a-z]+>", "[.!?]$"],
)
def test_common_patterns_are_taken(pattern):
    assert pattern_fault([pattern]) is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "back-reference"),
        ("(?>a+)b", "atomic"),
        ("a++b", "possessive"),
        ("[a", "unterminated"),
        ("a$b", "end of a pattern"),
        ("(?a)x", "(?a)"),
        ("(a{100}){100}", "above 128"),
        ("\ud800", "surrogate"),
        ("a" * 257, "256 bytes"),
        ("(" * 120 + ")" * 120, None),
    ],
)
def test_a_pattern_that_has_no_linear_form_is_refused_with_the_reason(pattern, reason):
    fault = pattern_fault([pattern])
    assert reason is None or (fault is not None and reason in fault)


def test_the_patterns_of_a_request_are_bounded_together():
    assert pattern_fault(["a" * 64, "b" * 64]) is None
    assert "above 128" in pattern_fault(["a" * 64, "b" * 65])


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(x+x+)+y", "(.*,){11}P", "(?:a?){40}a{40}", "(.{0,14}a){8}z"]
)
def test_no_pattern_takes_long(pattern):
    assert pattern_fault([pattern]) is None
    matches(pattern, "")
    for text in ("a" * MOST_TEXT_CHARS, "xa," * 400):
        started_s = time.thread_time()
        matches(pattern, text)
        assert time.thread_time() - started_s < 0.2
