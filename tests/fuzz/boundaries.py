"""Values at the bounds of a request's fields, just beyond them, and far from them.

They are derived from the table that the server checks requests against, so that a field that is
added there is tried too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from cosched.limits.bodies import NATIVE
from cosched.limits.bounds import (
    Biases,
    Bound,
    Grammar,
    Json,
    Number,
    Numbers,
    OneOf,
    Patterns,
    Scope,
    Text,
    Texts,
    Vectors,
)
from cosched.limits.bounds_table import INTERNAL, TABLE

URLS = (
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)

OPENAI: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs_num": "top_logprobs",
}
"""SGLang's name -> the one that its OpenAI endpoints have."""

_ANYWHERE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, -(2**31), -(2**63),
    -(2**64), 10**40, 0.5, -0.0, 1e-320, 1e300, float("nan"), float("inf"), "", "5", "nan",
    "x" * 5000, "\x00", "\ud83d\ude00", [], {}, [None], [[]], [[1], [2]], {"": None}, [2**64],
)  # fmt: skip


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": [value]}
    return value


def values_of(bound: Bound, scope: Scope) -> list[Any]:
    """Within, at the ends and beyond, for what a field may be."""
    if isinstance(bound, Number):
        low, high = (at(scope) if callable(at) else at for at in (bound.low, bound.high))
        return [low - 1, low, low + 1, high - 1, high, high + 1, *bound.also, float(low), str(high)]
    if isinstance(bound, Text):
        return ["x", "x" * bound.most_chars, "x" * (bound.most_chars + 1), ["x", "y"]]
    if isinstance(bound, Texts):
        longest = "x" * bound.most_chars
        return ["x", longest, longest + "x", ["y"] * bound.most, ["y"] * (bound.most + 1), [""]]
    if isinstance(bound, Numbers):
        last = bound.high(scope) if callable(bound.high) else int(bound.high)
        return [[0], [last], [last + 1], [-1], [0] * 5000, [0, last], [[0], [last]], [0.5], ["0"]]
    if isinstance(bound, OneOf):
        return [*bound.values, "nonsense"]
    if isinstance(bound, Patterns):
        return ["[a-c]$", "(a+)+$", r"(a)\1", "(?=a)", "[a", "a{128}", "a{129}", ["b"] * 33, "("]
    if isinstance(bound, Biases):
        tokens = (0, scope.vocab_size - 1, scope.vocab_size, -1)
        return [{str(token): bias} for token in tokens for bias in (0, -100, 1e30, 1.1e30, "a")]
    if isinstance(bound, Grammar):
        return _grammars(bound.name)
    if isinstance(bound, Json):
        return [{"a": 1}, {"a": "x" * bound.most_bytes}, deep(31), deep(33), deep(300)]
    if isinstance(bound, Vectors):
        return [[[0.1] * scope.hidden_size] * 2, [[0.1] * 3], [[float("nan")]], [[]]]
    return [True, False]


def _grammars(name: str) -> list[Any]:
    if name == "json_schema":
        entries = ",".join(map(str, range(5001)))
        return [
            '{"type": "integer"}', '{"enum": [' + entries + "]}", '{"$ref": "#"}', "{", "[" * 65,
            '{"type": "string", "maxLength": 100001}', '{"type": "string", "pattern": "("}',
        ]  # fmt: skip
    if name == "structural_tag":
        return ["{}", '{"type": "structural_tag"}', "[" * 100 + "]" * 100]
    if name == "regex":
        return ["a{1,5}", "a{100001}", "(" * 64 + "a" + ")" * 64, "(" * 65, "a" * 32769, "[a"]
    return ['root ::= "a"', "root ::= a\na ::= root", "root ::= " + "(" * 65, "x" * 32769]


def boundary_body(rng: random.Random, path: str, model: str, scope: Scope) -> dict[str, Any]:
    """A request to `path` with one to three fields of the table at or beyond their bounds."""
    body: dict[str, Any] = {
        "/generate": {"text": "one two three", "sampling_params": {"max_new_tokens": 4}},
        "/v1/completions": {"model": model, "prompt": "one two three", "max_tokens": 4},
        "/v1/embeddings": {"model": model, "input": "one two three"},
        "/v1/responses": {"model": model, "input": "one two three", "max_output_tokens": 4},
    }.get(path) or {
        "model": model,
        "messages": [{"role": "user", "content": "one two three"}],
        "max_tokens": 4,
    }
    structs = ["SamplingParams", NATIVE.get(path, "GenerateReqInput")]
    if path == "/v1/embeddings":
        structs = ["EmbeddingReqInput"]
    for _ in range(rng.choice([1, 1, 2, 3])):
        struct = rng.choice(structs)
        name = rng.choice([name for name, bound in TABLE[struct].items() if bound is not INTERNAL])
        bound = TABLE[struct][name]
        values = values_of(bound, scope) if rng.random() < 0.7 else list(_ANYWHERE)
        value = rng.choice(values)
        if name in ("text", "sampling_params", "stream", "rid") and path != "/generate":
            continue
        if path != "/generate":
            body[OPENAI.get(name, name)] = value
        elif struct == "SamplingParams":
            params = body["sampling_params"]
            if isinstance(params, dict):
                params[name] = value
        else:
            body[name] = value
        if name.endswith(("logprobs_num", "logprob_start_len")):
            body["return_logprob" if path == "/generate" else "logprobs"] = True
    return body
