"""What a client is told of a body that does not fit: one line, for the form that it meant."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ValidationError

from cosched.limits.validation import one_line, summary


class Text(BaseModel):
    type: Literal["text"]
    text: str


class Image(BaseModel):
    type: Literal["image"]
    url: str


class Sound(BaseModel):
    type: Literal["sound"]
    url: str


class User(BaseModel):
    role: Literal["user"]
    content: str | list[Text | Image | Sound]


class Other(BaseModel):
    role: Literal["system", "tool"]
    content: str | list[Text] | None = None


class Body(BaseModel):
    messages: list[User | Other]
    n: int = 1


def told(**body: Any) -> str:
    with pytest.raises(ValidationError) as error:
        Body.model_validate(body)
    errors = [{**each, "loc": ("body", *each["loc"])} for each in error.value.errors()]
    return summary(errors, body)


def message(content, role="user"):
    return {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "messages: is required"),
        (message("a", role="robot"), "messages[1].role: must be 'user', 'system' or 'tool'"),
        (
            message([{"type": "film"}]),
            "messages[1].content[0].type: must be 'text', 'image', 'sound'",
        ),
        (message([{"type": "image"}]), "messages[1].content[0].url: is required"),
        (message(None), "messages[1].content: Input should be a valid string"),
        (message([{"type": "text"}], role="tool"), "messages[1].content[0].text: is required"),
        (message("a") | {"n": "x"}, "n: Input should be a valid integer"),
    ],
)
def test_the_form_that_fits_best_is_told(body, text):
    found = told(**body)
    assert found.startswith(text), found
    assert "\n" not in found and len(found) < 200


def test_no_more_than_three_errors_are_told():
    found = summary(
        [{"loc": ("body", f"f{n}"), "type": "missing", "msg": ""} for n in range(30)], {}
    )
    assert found == "f0: is required; f1: is required; f2: is required; and 27 more"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            'Failed to compile: [23:20:11] /x/converter.cc:12: Unsupported type "no"\n',
            'Failed to compile: Unsupported type "no"',
        ),
        (
            "None is no 'array'\n\nFailed validating 'type':\n    {'type': 'array'}",
            "None is no 'array'",
        ),
        ("a\n  b", "a b"),
        ("a" * 500, "a" * 400 + "…"),
        ("", ""),
    ],
)
def test_messages_of_libraries_are_one_line(message, reason):
    assert one_line(message) == reason
