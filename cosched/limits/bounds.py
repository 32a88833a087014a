"""Kinds of bounds: what is wrong with a value, and the description for docs/api.md."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np

from cosched.limits.grammars import (
    MOST_DEPTH,
    MOST_DOCUMENT_BYTES,
    MOST_ENTRIES,
    MOST_RULE_BYTES,
    grammar_fault,
)
from cosched.limits.patterns import MOST_PATTERN_BYTES, MOST_PATTERN_ITEMS, pattern_fault

INT64 = 2**63 - 1
INT32 = 2**31 - 1
WHOLE_VOCABULARY = 1 << 30
"""SGLang's ``top_k`` without a limit, beside -1."""

MOST_SAMPLES = 128
"""Sequences per prompt, as OpenAI. They are served in order of arrival: 1,024 of one online request
made all others wait for more than 100 iterations."""

MOST_STOPS, MOST_STOP_CHARS = 32, 1024
MOST_NAME_CHARS = 1024
MOST_JSON_BYTES = 64 * 1024
MOST_BIASES = 1024
MOST_BIAS = 1e30
"""Above any use and below float32's maximum: infinite logits have no probabilities."""

MOST_TEMPERATURE = 1e6

MOST_LOGPROBS = 1 << 22
"""Log probabilities of one answer: positions times log probabilities per position."""

_repr = Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxlist = _repr.maxdict = 3
_repr.maxlevel = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What bounds depend on.

    chars_per_token     a text with more characters per token of the context is refused before it is
                        tokenized
    max_input_tokens    of the longest prompt that fits the KV memory; None: the context length
    max_offline_tokens  of the longest offline prompt; None: as for online prompts
    fields              of the bodies of each endpoint; the fields of other endpoints are not known
    tools               types that /v1/responses can call; empty: not known
    keeps_seeds         tokens are drawn by the ``seed`` of a request
    """

    vocab_size: int = INT32
    context_len: int = INT32
    hidden_size: int = INT32
    chars_per_token: int = 16
    max_input_tokens: int | None = None
    max_offline_tokens: int | None = None
    fields: Mapping[str, frozenset[str]] = field(default_factory=dict, compare=False)
    tools: frozenset[str] = frozenset()
    keeps_seeds: bool = True

    @property
    def max_chars(self) -> int:
        return self.chars_per_token * self.context_len


ANY_MODEL = Scope()
"""For an unknown model: the bounds that hold for all models."""


@dataclass(frozen=True, slots=True)
class ScopeLevel:
    """A level that depends on the model."""

    name: str
    value: Callable[[Scope], int]

    def __call__(self, scope: Scope) -> int:
        return self.value(scope)


Level = int | float | ScopeLevel

vocabulary = ScopeLevel("vocabulary size", lambda scope: scope.vocab_size)
last_token = ScopeLevel("last token id", lambda scope: scope.vocab_size - 1)
half_vocabulary = ScopeLevel(
    f"half the vocabulary, at most {MOST_SAMPLES}",
    lambda scope: min(MOST_SAMPLES, scope.vocab_size // 2),
)
context = ScopeLevel("context length", lambda scope: scope.context_len)
characters = ScopeLevel("as many as a text may have characters", lambda scope: scope.max_chars)
hidden = ScopeLevel("hidden size", lambda scope: scope.hidden_size)

_POWERS: Mapping[int | float, str] = {
    2**63 - 1: "2^63-1",
    -(2**63): "-2^63",
    2**31 - 1: "2^31-1",
    -(2**31): "-2^31",
}


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    try:
        return _repr.repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of more than 4,300 digits"


def _at(level: Level, scope: Scope) -> int | float:
    return level(scope) if isinstance(level, ScopeLevel) else level


def _named(level: Level) -> str:
    if isinstance(level, ScopeLevel):
        return level.name
    return _POWERS.get(level) or (f"{level:g}" if isinstance(level, float) else f"{level:,}")


def _above(value: Any, level: Level, scope: Scope) -> str:
    limit = _at(level, scope)
    name = f" ({level.name})" if isinstance(level, ScopeLevel) else ""
    return f"{shown(value)} is above {limit:{'g' if isinstance(limit, float) else ''}}{name}"


class Bound(Protocol):
    def fault(self, value: Any, scope: Scope) -> str | None:
        """The error of a value that is not None; None: it is within the bound."""

    def described(self) -> str:
        """For the table in docs/api.md."""


@dataclass(frozen=True, slots=True)
class Free:
    """No bound, with the reason."""

    reason: str

    def fault(self, value: Any, scope: Scope) -> str | None:
        return None

    def described(self) -> str:
        return f"none: {self.reason}"


@dataclass(frozen=True, slots=True)
class Flag:
    def fault(self, value: Any, scope: Scope) -> str | None:
        return None if isinstance(value, bool) else f"must be true or false, not {shown(value)}"

    def described(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class OneOf:
    values: tuple[Any, ...]

    def fault(self, value: Any, scope: Scope) -> str | None:
        if isinstance(value, bool | int | str) and value in self.values:
            return None
        return f"must be one of {', '.join(map(str, self.values))}, not {shown(value)}"

    def described(self) -> str:
        return " or ".join(f"`{value}`".lower() for value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """is_above: `low` is excluded. also: further allowed values."""

    low: Level
    high: Level
    is_whole: bool = True
    is_above: bool = False
    also: tuple[int, ...] = ()

    def fault(self, value: Any, scope: Scope) -> str | None:
        kinds = (int,) if self.is_whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            kind = "a whole number" if self.is_whole else "a number"
            return f"must be {kind}, not {shown(value)}"
        if value in self.also:
            return None
        if isinstance(value, float) and math.isnan(value):
            return "must be a number, not NaN"
        low = _at(self.low, scope)
        if value < low or (self.is_above and value == low):
            return f"{shown(value)} is {'not above' if self.is_above else 'below'} {low}"
        return _above(value, self.high, scope) if value > _at(self.high, scope) else None

    def described(self) -> str:
        kind = "whole number" if self.is_whole else "number"
        start = "above " if self.is_above else ""
        also = "".join(f", or {_named(value)}" for value in self.also)
        return f"{kind}, {start}{_named(self.low)} to {_named(self.high)}{also}"


@dataclass(frozen=True, slots=True)
class Text:
    most_chars: int = MOST_NAME_CHARS

    def fault(self, value: Any, scope: Scope) -> str | None:
        if not isinstance(value, str):
            return f"must be a string, not {shown(value)}"
        if len(value) > self.most_chars:
            return f"{len(value)} characters are above {self.most_chars}"
        return None

    def described(self) -> str:
        return f"string, at most {self.most_chars:,} characters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A string or a list of strings."""

    most: int
    most_chars: int = MOST_NAME_CHARS

    def fault(self, value: Any, scope: Scope) -> str | None:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple):
            return f"must be a string or a list of strings, not {shown(value)}"
        if len(texts) > self.most:
            return f"{len(texts)} strings are above {self.most}"
        faults = (Text(self.most_chars).fault(text, scope) for text in texts)
        return next(filter(None, faults), None)

    def described(self) -> str:
        return f"at most {self.most} strings of {self.most_chars:,} characters"


@dataclass(frozen=True, slots=True)
class Patterns:
    def fault(self, value: Any, scope: Scope) -> str | None:
        fault = Texts(most=MOST_STOPS).fault(value, scope)
        return fault or pattern_fault([value] if isinstance(value, str) else value)

    def described(self) -> str:
        return (
            f"at most {MOST_STOPS} patterns of {MOST_PATTERN_BYTES} bytes, and together "
            f"{MOST_PATTERN_ITEMS} characters and classes with repetitions written out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A list of whole numbers from 0 on."""

    most: Level
    high: Level
    depth: ClassVar[int] = 1

    def fault(self, value: Any, scope: Scope) -> str | None:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            return f"must be a list of whole numbers, not {shown(value)}"
        if isinstance(value, array):  # of integers: the tokens of a prompt in the scheduler
            return self._range_fault(np.asarray(value), scope)
        values = list(value)
        for each in values:
            if type(each) is not int:
                return f"must be a list of whole numbers; {shown(each)} is not one"
        return self._range_fault(values, scope)

    def _range_fault(self, values: Any, scope: Scope) -> str | None:
        most = _at(self.most, scope)
        if len(values) > most:
            return f"{len(values)} numbers are above {most}"
        if not len(values):
            return None
        found = values if isinstance(values, list) else (int(values.min()), int(values.max()))
        lowest, highest = min(found), max(found)
        if lowest < 0:
            return f"{shown(lowest)} is below 0"
        return _above(highest, self.high, scope) if highest > _at(self.high, scope) else None

    def described(self) -> str:
        return f"at most {_named(self.most)} whole numbers, 0 to {_named(self.high)}"


@dataclass(frozen=True, slots=True)
class Vectors:
    """Embeddings in place of tokens."""

    depth: ClassVar[int] = 2

    def fault(self, value: Any, scope: Scope) -> str | None:
        if not isinstance(value, list) or not value:
            return "must be a list of vectors"
        if len(value) > scope.context_len:
            return f"{len(value)} vectors are above {scope.context_len} (context length)"
        for row in value:
            if not isinstance(row, list) or (
                scope.hidden_size != INT32 and len(row) != scope.hidden_size
            ):
                return f"each vector must have {scope.hidden_size} numbers (hidden size)"
            if not all(type(x) in (int, float) and abs(x) < MOST_BIAS for x in row):
                return "each number must be finite"
        return None

    def described(self) -> str:
        return "at most context length vectors of hidden size finite numbers"


@dataclass(frozen=True, slots=True)
class Biases:
    def fault(self, value: Any, scope: Scope) -> str | None:
        if not isinstance(value, Mapping):
            return f"must be an object, not {shown(value)}"
        if len(value) > MOST_BIASES:
            return f"{len(value)} entries are above {MOST_BIASES}"
        for token, bias in value.items():
            if not isinstance(token, str) or not (token.isascii() and token.isdigit()):
                return f"{shown(token)} is not a token id"
            if len(token) > 10 or int(token) >= scope.vocab_size:
                return f"{shown(token)} is not a token id; the model's are 0 to {last_token(scope)}"
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                return f"the bias of token {token} must be a number, not {shown(bias)}"
            if not -MOST_BIAS <= bias <= MOST_BIAS:
                return f"{shown(bias)} for token {token} is beyond {MOST_BIAS:g}"
        return None

    def described(self) -> str:
        return f"at most {MOST_BIASES:,} token ids of the vocabulary, each with at most 1e30"


@dataclass(frozen=True, slots=True)
class Grammar:
    name: str

    def fault(self, value: Any, scope: Scope) -> str | None:
        if not isinstance(value, str):
            return f"must be a string, not {shown(value)}"
        return grammar_fault(self.name, value) if value else None

    def described(self) -> str:
        if self.name in ("regex", "ebnf"):
            return f"at most {MOST_RULE_BYTES:,} bytes"
        return f"at most {MOST_DOCUMENT_BYTES:,} bytes, {MOST_ENTRIES:,} enum entries"


@dataclass(frozen=True, slots=True)
class Json:
    """An object or a list, as JSON."""

    most_bytes: int = MOST_JSON_BYTES

    def fault(self, value: Any, scope: Scope) -> str | None:
        if not isinstance(value, dict | list):
            return f"must be an object or a list, not {shown(value)}"
        if _depth(value) > MOST_DEPTH:
            return f"nested more than {MOST_DEPTH} levels deep"
        try:
            num_bytes = len(msgspec.json.encode(value))
        except (TypeError, ValueError, OverflowError) as error:
            return f"is not JSON: {error}"
        is_within = num_bytes <= self.most_bytes
        return None if is_within else f"{num_bytes} bytes are above {self.most_bytes}"

    def described(self) -> str:
        return f"JSON, at most {self.most_bytes:,} bytes and {MOST_DEPTH} levels"


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted up to one more than is allowed."""
    level = [value]
    for depth in range(MOST_DEPTH + 1):
        inner = [
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)
        ]
        if not inner:
            return depth
        level = [each for values in inner for each in values]
    return MOST_DEPTH + 1
