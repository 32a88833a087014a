"""What pydantic says of a body that does not fit, in one line with the names that clients use.

For a value that may have several forms pydantic reports the errors of each: 29 for one part of a
message. Here the errors of the form that fits best are told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST_TOLD = 3
_MOST_CHARS = 400
_SOURCE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+: ")
"""What xgrammar puts before a reason."""
_KINDS = ("role", "type")
"""Fields that say which form a value has."""

_MISSING, _LITERAL = "missing", "literal_error"

Error = Mapping[str, Any]


def summary(errors: Sequence[Error], body: Any) -> str:
    """`errors`: as pydantic's ``errors()``, with ``body`` as the first part of each place."""
    found = _tell([_Found(error) for error in errors], body)
    told = [f"{_path(place)}: {text}" for place, text in found[:_MOST_TOLD]]
    more = f"; and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
    return "; ".join(told) + more


def one_line(message: str) -> str:
    """The reason in a message of another library: its first paragraph, without the time and the
    source file before it (xgrammar) or the schemas after it (jsonschema)."""
    [reason, *_] = message.strip().split("\n\n", 1)
    return _shortened(" ".join(_SOURCE.sub("", reason).split()))


@dataclass(slots=True)
class _Found:
    error: Error
    rest: Sequence[Any] = ()
    """The part of its place that has not been followed yet."""
    place: tuple[Any, ...] = field(default=())

    def __post_init__(self) -> None:
        loc = tuple(self.error["loc"])
        self.rest = loc[1:] if loc[:1] == ("body",) else loc


def _tell(found: list[_Found], value: Any) -> list[tuple[tuple[Any, ...], str]]:
    """Place and text of each error of a value, for one form only."""
    told: list[tuple[tuple[Any, ...], str]] = []
    inner: dict[Any, list[_Found]] = {}
    forms: dict[Any, list[_Found]] = {}
    for each in found:
        if not each.rest:
            told.append((each.place, _text(each.error)))
            continue
        key = each.rest[0]
        is_last = len(each.rest) == 1 and each.error["type"] == _MISSING
        is_inside = is_last or (
            key in value
            if isinstance(value, Mapping)
            else isinstance(value, list) and isinstance(key, int)
        )
        moved = _Found(each.error)
        moved.rest = each.rest[1:]
        moved.place = (*each.place, key) if is_inside else each.place
        (inner if is_inside else forms).setdefault(key, []).append(moved)
    for key, some in inner.items():
        told += _tell(some, _at(value, key))
    if forms:
        told += _tell_best(list(forms.values()), value)
    return told


def _tell_best(forms: list[list[_Found]], value: Any) -> list[tuple[tuple[Any, ...], str]]:
    def wrong_kind(form: list[_Found]) -> list[_Found]:
        """Forms may have forms in turn, whose names come between."""
        fields = value.keys() if isinstance(value, Mapping) else ()

        def is_of_value(each: _Found) -> bool:
            *names, last = each.rest or [None]
            return last in _KINDS and not any(isinstance(n, int) or n in fields for n in names)

        return list(filter(is_of_value, form))

    if all(map(wrong_kind, forms)):  # a kind that no form has
        errors = [each for form in forms for each in wrong_kind(form)]
        [first, *_] = sorted(errors, key=lambda each: each.error["type"] == _LITERAL)
        kind = first.rest[-1]
        place = (*first.place, kind)
        if first.error["type"] != _LITERAL:
            return [(place, _text(first.error))]
        known = dict.fromkeys(str(each.error["ctx"]["expected"]) for each in errors)
        return [(place, f"must be {', '.join(known)}, not {_at(value, kind)!r}")]
    best = min(
        forms,
        key=lambda form: (
            bool(wrong_kind(form)),
            -max(len(each.rest) for each in form),
            len(form),
        ),
    )
    return _tell(best, value)


def _at(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except (KeyError, IndexError, TypeError):
        return None


def _path(place: Sequence[Any]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return path.removeprefix(".") or "body"


def _text(error: Error) -> str:
    if error["type"] == _MISSING:
        return "is required"
    return _shortened(str(error["msg"]).removeprefix("Value error, "))


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else text[:_MOST_CHARS] + "…"
