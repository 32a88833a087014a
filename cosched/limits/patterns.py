"""Stop patterns (``stop_regex``): Python's regular expressions, matched in linear time.

Python's `re` backtracks: ``(a+)+$`` takes exponential time, on the scheduler's thread, at every
step. So Python parses a pattern, and it is rewritten for Rust's regex engine (part of pydantic),
whose time is bounded by pattern times text. That engine has no look-around and no back-references;
patterns with them are refused. A time limit would refuse fewer patterns, but ranks of one model
could disagree about it. Classes are written out, so that ``\\d``, ``\\w`` and ``\\s`` are Python's.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

# The parser that `re.compile` uses; SGLang reads stop patterns with it too.
from re import _constants as ops  # type: ignore[attr-defined]  # isort: skip
from re import _parser as parser  # type: ignore[attr-defined]  # isort: skip

MOST_PATTERN_BYTES = 256  # of one pattern (SGLang's own limit)
MOST_PATTERN_ITEMS = 128  # characters and classes of one request, repetitions written out
MOST_TEXT_CHARS = 1024  # of the end of the output, where matches are searched

_SPACES = r"\t-\r\x1c-\x1f\x{85}\p{Z}"
_CLASSES = {
    ops.CATEGORY_DIGIT: (r"\p{Nd}", False),
    ops.CATEGORY_NOT_DIGIT: (r"\p{Nd}", True),
    ops.CATEGORY_SPACE: (_SPACES, False),
    ops.CATEGORY_NOT_SPACE: (_SPACES, True),
    ops.CATEGORY_WORD: (r"\p{L}\p{N}_", False),
    ops.CATEGORY_NOT_WORD: (r"\p{L}\p{N}_", True),
}
_PLACES = {
    ops.AT_BEGINNING: r"\A",
    ops.AT_BEGINNING_STRING: r"\A",
    ops.AT_END_STRING: r"\z",
    ops.AT_BOUNDARY: r"\b",
    ops.AT_NON_BOUNDARY: r"\B",
}
_NAMES = {
    ops.ASSERT: "look-around",
    ops.ASSERT_NOT: "look-around",
    ops.GROUPREF: "a back-reference",
    ops.GROUPREF_EXISTS: "a conditional group",
    ops.ATOMIC_GROUP: "an atomic group",
    ops.POSSESSIVE_REPEAT: "a possessive repetition",
}
_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL


def matches(pattern: str, text: str) -> bool:
    """Whether the pattern matches in the last `MOST_TEXT_CHARS` characters. ValueError for an
    invalid pattern."""
    return bool(_compiled(pattern)[0].isinstance_python(text[-MOST_TEXT_CHARS:]))


def pattern_fault(patterns: Sequence[str]) -> str | None:
    """The error of the stop patterns of one request; None: there is none."""
    num_items = 0
    for pattern in patterns:
        if len(pattern.encode("utf-8", "surrogatepass")) > MOST_PATTERN_BYTES:
            return f"a pattern is longer than {MOST_PATTERN_BYTES} bytes"
        try:
            num_items += _compiled(pattern)[1]
        except ValueError as error:
            return f"{pattern!r}: {error}"
    return _size_fault(num_items)


def _size_fault(num_items: int) -> str | None:
    if num_items <= MOST_PATTERN_ITEMS:
        return None
    return (
        f"{num_items} characters and classes, repetitions written out, are above "
        f"{MOST_PATTERN_ITEMS}"
    )


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> tuple[SchemaValidator, int]:
    """The pattern in Rust's engine, and its size [items]. ValueError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    flags = tree.state.flags
    if flags & re.ASCII:
        raise ValueError("the flag (?a) is not supported")
    written, num_items = _sequence(tree, flags, is_last=True)
    if (fault := _size_fault(num_items)) is not None:
        raise ValueError(fault)
    if flags & re.IGNORECASE:
        written = f"(?i:{written})"
    try:
        schema = core_schema.str_schema(pattern=written, regex_engine="rust-regex")
        return SchemaValidator(schema), num_items
    except SchemaError as error:
        raise ValueError(str(error).splitlines()[-1].strip()) from None


def _sequence(items: Iterable[Any], flags: int, *, is_last: bool) -> tuple[str, int]:
    """A sequence of items; is_last: nothing follows it."""
    listed = list(items)
    parts = [
        _item(op, value, flags, is_last=is_last and index == len(listed) - 1)
        for index, (op, value) in enumerate(listed)
    ]
    return "".join(text for text, _ in parts), sum(size for _, size in parts)


def _item(op: Any, value: Any, flags: int, *, is_last: bool) -> tuple[str, int]:
    if op in (ops.LITERAL, ops.NOT_LITERAL):
        return f"[{'^' if op is ops.NOT_LITERAL else ''}{_char(value)}]", 1
    if op is ops.ANY:
        return "(?s:.)" if flags & re.DOTALL else r"[^\n]", 1
    if op is ops.IN:
        return _class(value), 1
    if op is ops.AT:
        return _place(value, flags, is_last=is_last), 0
    if op is ops.BRANCH:
        parts = [_sequence(branch, flags, is_last=is_last) for branch in value[1]]
        return f"(?:{'|'.join(text for text, _ in parts)})", sum(size for _, size in parts)
    if op is ops.SUBPATTERN:
        return _group(value, flags, is_last=is_last)
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
        least, most, inner = value
        is_open = most == ops.MAXREPEAT
        text, size = _sequence(inner, flags, is_last=is_last and most == 1)
        times = f"{{{least},{'' if is_open else most}}}"
        return f"(?:{text}){times}", max(size, 1) * (least + 1 if is_open else most)
    raise ValueError(f"{_NAMES.get(op, str(op).lower())} is not supported")


def _group(value: Any, flags: int, *, is_last: bool) -> tuple[str, int]:
    _, added, removed, inner = value
    if (added | removed) & ~_FLAGS:
        raise ValueError("of the flags of a group, only i, m and s are supported")
    text, size = _sequence(inner, (flags | added) & ~removed, is_last=is_last)
    case = "i" if added & re.IGNORECASE else "-i" if removed & re.IGNORECASE else ""
    return f"(?{case}:{text})", size


def _place(place: Any, flags: int, *, is_last: bool) -> str:
    if place is ops.AT_BEGINNING and flags & re.MULTILINE:
        return "(?m:^)"
    if place is ops.AT_END:
        if flags & re.MULTILINE:
            return "(?m:$)"
        if not is_last:
            raise ValueError("$ is supported at the end of a pattern only; elsewhere use (?m:$)")
        return r"(?:\n?\z)"  # Python's also matches before a newline at the end
    return _PLACES[place]


def _class(members: Sequence[tuple[Any, Any]]) -> str:
    is_negated = bool(members) and members[0][0] is ops.NEGATE
    parts = []
    for op, value in members[is_negated:]:
        if op is ops.CATEGORY:
            inner, is_other = _CLASSES[value]
            parts.append(f"[{'^' if is_other else ''}{inner}]")
        elif op is ops.RANGE:
            parts.append(f"{_char(value[0])}-{_char(value[1])}")
        else:
            parts.append(_char(value))
    return f"[{'^' if is_negated else ''}{''.join(parts)}]"


def _char(code: int) -> str:
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError("a surrogate is not supported")
    return f"\\x{{{code:x}}}"
