"""Requests that a careless, a curious or a hostile client could send.

`make_case(seed, number, world)` gives the same request for the same numbers, whatever came before:
one that did harm can be sent again alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cosched.limits.bounds import Scope
from tests.fuzz.boundaries import URLS, boundary_body

FEATURES = ("penalties", "lora", "logprobs", "beam", "grammars", "sessions", "aborts", "targets")
"""What `--without` can leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the requests may refer to.

    context_len  tokens of the longest request that the server takes
    vocab_size   token ids from here on are not the model's
    loras        adapters that exist
    without      `FEATURES` that are left out
    """

    model: str
    context_len: int
    vocab_size: int
    loras: Sequence[str] = ()
    without: frozenset[str] = frozenset()

    @property
    def scope(self) -> Scope:
        """What the bounds of its requests depend on."""
        return Scope(vocab_size=self.vocab_size, context_len=self.context_len, hidden_size=64)

    def has(self, feature: str) -> bool:
        return feature not in self.without


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One HTTP request.

    content        the body as it goes out
    abort_after_s  the client hangs up after so long; None: it reads to the end
    """

    number: int
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    abort_after_s: float | None = None

    def shown(self) -> str:
        """As a command line, shortened."""
        body = self.content.decode("utf-8", "backslashreplace")
        if len(body) > 2000:
            body = f"{body[:2000]}… ({len(self.content)} bytes)"
        headers = "".join(f" -H {name}:{value!r}" for name, value in self.headers.items())
        hung_up = "" if self.abort_after_s is None else f"  # hangs up after {self.abort_after_s} s"
        return f"#{self.number} {self.method} {self.path}{headers} -d {body!r}{hung_up}"


WORDS = (
    "one two three river stone light under over green slow quick paper glass wind and or".split()
)

JSON_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 8}},
    "required": ["a"],
}
GARBAGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 10**9, -(10**12), 2**63 - 1, 0.5, -1e-9, 1e300, "", "x", "\x00",
    "\N{PILE OF POO}", [], [None], [[]], [-1], ["a", 1], {}, {"a": {"b": [1]}}, {"": None},
)  # fmt: skip
HEADER_GARBAGE = ("", "x", "-1", "0", "nan", "1e400", "flex", "bulk", "9" * 40, "\xe9", "1,2", "{}")
TARGETS = (1e-9, 0.001, 1, 20, 200, 5000, 1e6, 1e12, 10**30, 0, -1, "5", None, [1], True)


def make_case(seed: int, number: int, world: World) -> Case:
    """Request `number` of the sequence `seed`."""
    rng = random.Random(f"{seed}/{number}")
    usable = [
        (maker, weight)
        for maker, feature, weight in _MAKERS
        # Its fields are those of all features.
        if (not world.without if maker is _at_bounds else feature is None or world.has(feature))
    ]
    maker = rng.choices([maker for maker, _ in usable], [weight for _, weight in usable])[0]
    method, path, body = maker(rng, world)
    headers = {"content-type": "application/json"}
    content = b""
    if body is not None:
        _claim(rng, world, path, body, headers)
        if rng.random() < 0.06:
            _spoil(rng, body)
        content = json.dumps(body).encode()
        if rng.random() < 0.03:
            content = _garble(rng, content)
        if rng.random() < 0.01:
            headers["content-type"] = rng.choice(["text/plain", "multipart/form-data", ""])
    abort_after_s = None
    if world.has("aborts") and path not in _SMALL and rng.random() < 0.2:
        abort_after_s = round(rng.choice([0.0, 0.02, 0.1, 0.5, 1.5, 4.0]) * rng.random(), 3)
    return Case(
        number=number,
        method=method,
        path=path,
        headers=headers,
        content=content,
        abort_after_s=abort_after_s,
    )


def _claim(
    rng: random.Random,
    world: World,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
) -> None:
    """Class and targets, right and wrong."""
    if rng.random() < 0.4:
        body["priority"] = rng.choice([-5, -1, -(2**31), 0, 3, 2**31, -(2**63)])
    if rng.random() < 0.3:
        body["service_tier"] = rng.choice(["flex"] * 6 + ["auto", "default", "standard_only"])
    if rng.random() < 0.1:
        headers["x-smg-priority"] = rng.choice(["bulk", "bulk", "system", *HEADER_GARBAGE[:4]])
    if rng.random() < 0.04:
        body["priority"] = rng.choice(GARBAGE)
    if rng.random() < 0.03:
        body["service_tier"] = rng.choice(GARBAGE)
    if not world.has("targets"):
        return
    for header in ("x-slo-ttft-ms", "x-slo-tpot-ms"):
        if rng.random() < 0.1:
            text = (
                str(rng.choice(TARGETS[:8])) if rng.random() < 0.8 else rng.choice(HEADER_GARBAGE)
            )
            headers[header] = text
    if rng.random() < 0.15:
        keys = ["ttft_slo_ms", "tpot_slo_ms", "deadline_s"]
        good = rng.random() < 0.7
        wanted: Any = {key: rng.choice(TARGETS[:8]) for key in keys if rng.random() < 0.6}
        if not good:
            wanted = rng.choice([{"ttft_ms": 5}, {rng.choice(keys): rng.choice(TARGETS)}, *GARBAGE])
        custom = {"cosched": wanted} if good or rng.random() < 0.7 else rng.choice(GARBAGE)
        params = body.get("sampling_params")
        if path == "/generate" and isinstance(params, dict):
            params["custom_params"] = custom
        else:
            body["custom_params"] = custom
    if rng.random() < 0.03:
        headers[rng.choice(["x-data-parallel-rank", "authorization", "x-api-key", "accept"])] = (
            rng.choice(HEADER_GARBAGE)
        )


def _spoil(rng: random.Random, body: dict[str, Any]) -> None:
    """One value of the wrong kind, somewhere."""
    inner = [value for value in body.values() if isinstance(value, dict) and value]
    target = rng.choice([body, *inner])
    target[rng.choice(list(target) or ["nonsense"])] = rng.choice(GARBAGE)


def _garble(rng: random.Random, content: bytes) -> bytes:
    """Not JSON any more, most of the time."""
    return rng.choice(
        [
            b"",
            b"null",
            b"[]",
            b'"text"',
            b"\xff\xfe\x00",
            content[: rng.randrange(len(content))],
            content + b"}",
            content.replace(b":", b"=", 1),
            content.replace(b"}", b', "x": NaN}', 1),
            b"[" * 5000,
            b'{"a":' * 2000,
        ]
    )


# What is asked for ----------------------------------------------------------------------------


def _text(rng: random.Random, *, most: int = 80) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def _ids(rng: random.Random, world: World) -> list[int]:
    return [rng.randrange(6, world.vocab_size) for _ in range(rng.choice([1, 3, 20, 100, 300]))]


def _prompt(rng: random.Random, world: World) -> str:
    """Empty and longer than the context too."""
    kind = rng.random()
    if kind < 0.03:
        return rng.choice(["", " ", "\x00", "\ud800".encode("utf-8", "replace").decode()])
    if kind < 0.06:
        return "river stone " * world.context_len
    return _text(rng, most=rng.choice([5, 30, 200]))


def _tokens(rng: random.Random, world: World) -> Any:
    """How many new tokens. Few replies are as long as the context: each keeps a slot for as long
    as 100 others."""
    return rng.choices(
        [
            1,
            rng.randint(2, 8),
            rng.randint(8, 30),
            world.context_len - 1,
            10**6,
            2**31,
            0,
            -1,
            None,
        ],
        [25, 60, 60, 1, 1, 2, 6, 4, 2],
    )[0]


def _num_replies(rng: random.Random) -> int:
    """Of one prompt. Many are rare for the same reason."""
    return rng.choices([1, 2, 3, 0, -1, rng.choice([20, 100])], [2, 5, 3, 2, 2, 0.3])[0]


def _logit_bias(rng: random.Random, world: World) -> dict[str, Any]:
    token = rng.choice([7, world.vocab_size - 1, world.vocab_size, -1, 10**9, "x", 7, 8])
    return {str(token): rng.choice([5, -100, 100, 1e9, 1e300, "a", 1])}


def _penalties(rng: random.Random) -> dict[str, Any]:
    return {
        rng.choice(["frequency_penalty", "presence_penalty"]): rng.choice(
            [0.5, -2, 2, 1.1, 3, "a"]
        ),
        "repetition_penalty": rng.choice([1.0, 1.2, 0.5, 2.0, 0, -1, 2.5]),
    }


_REGEXES = (r"[a-z]{1,8}", r"(yes|no)", r"\d+", r"[a-z", r"(a+)+$", r"\p{Xx}", "", r"(?<=x)a")
_EBNFS = ('root ::= "yes" | "no"', "root ::= [a-z]+", 'root ::= "a" root2', "nonsense ::=", "")
_SCHEMAS: tuple[Any, ...] = (
    JSON_SCHEMA,
    {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    {"type": "nonsense"},
    {"$ref": "#/$defs/missing"},
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"enum": []},
    {"type": "string", "pattern": "[a-z"},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {},
    True,
    {"allOf": [JSON_SCHEMA, {"type": "string"}]},
)
_STRUCTURAL_TAGS: tuple[Any, ...] = (
    {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}},
    {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": JSON_SCHEMA, "end": "</a>"}],
        "triggers": ["<a"],
    },
    {"type": "structural_tag", "structures": [], "triggers": []},
    {"type": "structural_tag", "structures": [{"begin": "b"}], "triggers": ["z"]},
    {"type": "structural_tag", "format": {"type": "nonsense"}},
    {},
)


def _native_grammar(rng: random.Random) -> dict[str, Any]:
    schema = rng.choice(_SCHEMAS)
    found: dict[str, Any] = rng.choice(
        [
            {"json_schema": json.dumps(schema)},
            {"json_schema": rng.choice(["{", "", "nonsense", schema])},
            {"regex": rng.choice(_REGEXES)},
            {"ebnf": rng.choice(_EBNFS)},
            {"structural_tag": json.dumps(rng.choice(_STRUCTURAL_TAGS))},
            {"regex": "a+", "ebnf": _EBNFS[0]},
        ]
    )
    return found


Made = tuple[str, str, dict[str, Any] | None]
"""Method, path and body."""

Extras = list[tuple[str | None, Callable[[], dict[str, Any]]]]
"""(The feature that they belong to, fields)."""


def _some_of(
    extras: Extras, rng: random.Random, world: World, counts: Sequence[int]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for feature, extra in rng.sample(extras, rng.choice(counts)):
        if feature is None or world.has(feature):
            found |= extra()
    return found


def _stream(rng: random.Random) -> dict[str, Any]:
    return {"stream": True} if rng.random() < 0.4 else {}


def _sampling(rng: random.Random, world: World) -> dict[str, Any]:
    """Sampling parameters that /generate takes."""
    params: dict[str, Any] = {"max_new_tokens": _tokens(rng, world)}
    extras: Extras = [
        (None, lambda: {"temperature": rng.choice([0, 0.7, 1, 2, -1, 1e-9, 1e9])}),
        (None, lambda: {"top_p": rng.choice([1, 0.9, 0, 1e-9, 1.1]), "top_k": rng.choice(
            [1, 20, -1, 0, world.vocab_size, 10**7, -2])}),
        (None, lambda: {"min_p": rng.choice([0, 0.1, 0.99, 1, 1.1, -0.1])}),
        ("penalties", lambda: {"min_new_tokens": rng.choice([0, 1, 5, 100, -1])}),
        (None, lambda: {"stop": rng.choice(["a", ["a", "river"], "", [], [""], ["x"] * 50, [1]])}),
        (None, lambda: {"stop_regex": rng.choice([r"[a-c]", "[a", "", ["a|b"]])}),
        (None, lambda: {"stop_token_ids": rng.choice(
            [[7], [], [world.vocab_size], [-1], ["a"], 7, [10**12]])}),
        (None, lambda: {"n": _num_replies(rng)}),
        (None, lambda: {"sampling_seed": rng.choice([0, 1, -1, 2**31, 2**62, "a"])}),
        (None, lambda: {"logit_bias": _logit_bias(rng, world)}),
        (None, lambda: {"ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True}),
        (None, lambda: {"stream_interval": rng.choice([1, 3, 0, -1])}),
        (None, lambda: {"custom_params": rng.choice(GARBAGE)}),
        (None, lambda: {rng.choice(["nonsense", "stop_strs"]): rng.choice(GARBAGE)}),
        (None, lambda: {"is_normalized": rng.choice(GARBAGE)}),
        ("penalties", lambda: _penalties(rng)),
        ("penalties", lambda: _penalties(rng)),
        ("grammars", lambda: _native_grammar(rng)),
        ("grammars", lambda: _native_grammar(rng)),
        ("beam", lambda: {"beam_width": rng.choice([1, 2, 3, 4, 0, -1, 10**6])}),
    ]  # fmt: skip
    return params | _some_of(extras, rng, world, [0, 1, 1, 2, 3])


def _lora(rng: random.Random, world: World) -> Any:
    return rng.choice([*world.loras, *world.loras, "missing", "", None, 5, ["a", None]])


def _session_id(rng: random.Random) -> str:
    return f"session-{rng.randrange(6)}"


def _generate(rng: random.Random, world: World) -> Made:
    body: dict[str, Any] = {"sampling_params": _sampling(rng, world)}
    kind = rng.random()
    if kind < 0.45:
        body["text"] = _prompt(rng, world)
    elif kind < 0.6:
        body["text"] = [_prompt(rng, world) for _ in range(rng.choice([0, 1, 2, 4]))]
        if rng.random() < 0.5:
            num = len(body["text"]) + rng.choice([0, 0, 0, 1])
            body["sampling_params"] = [_sampling(rng, world) for _ in range(num)]
    elif kind < 0.85:
        body["input_ids"] = _ids(rng, world)
        if rng.random() < 0.25:
            position = rng.randrange(len(body["input_ids"]))
            body["input_ids"][position] = rng.choice(
                [world.vocab_size, -1, 2**31, 2**40, world.vocab_size - 1]
            )
    elif kind < 0.9:
        body["input_ids"] = rng.choice(
            [[], [[]], [[1], []], [_ids(rng, world), [7]], [0], [1.5], ["a"], [None]]
        )
    elif kind < 0.95:
        body |= {"text": "a", "input_ids": [7]}
    else:
        body["input_embeds"] = rng.choice([[[0.1] * 64] * 3, [[0.1] * 3], [], [[]], [[[]]]])
    extras: Extras = [
        ("logprobs", lambda: {"return_logprob": True, "logprob_start_len": rng.choice(
            [-1, 0, 3, 10**6, -5]), "top_logprobs_num": rng.choice([0, 2, 20, -1, 10**5])}),
        ("logprobs", lambda: {"return_logprob": True, "token_ids_logprob": rng.choice(
            [[7], [], [world.vocab_size], [-1], [[7]], 7])}),
        ("logprobs", lambda: {"return_logprob": True, "return_text_in_logprobs": True}),
        ("logprobs", lambda: {"return_logprob": rng.choice([[True], [True, False], "x"])}),
        ("lora", lambda: {"lora_path": _lora(rng, world)}),
        ("lora", lambda: {"lora_path": _lora(rng, world)}),
        ("sessions", lambda: {"session_params": rng.choice([
            {"id": _session_id(rng), "rid": None, "offset": rng.choice([-1, 0, 5, 10**6])},
            {"id": _session_id(rng), "rid": f"rid-{rng.randrange(20)}", "replace": True},
            {"id": _session_id(rng)}, {"id": "missing"}, {"id": 5}, {}, {"nonsense": 1}])}),
        (None, lambda: {"rid": rng.choice([f"rid-{rng.randrange(20)}", "", ["a"], ["a", "a"]])}),
        (None, lambda: {"extra_key": rng.choice(["a", "b", ["a"], 5])}),
        (None, lambda: {"return_hidden_states": True}),
        (None, lambda: {"image_data": rng.choice(["x", ["x"], 5])}),
        (None, lambda: {"custom_logit_processor": rng.choice(["x", "{}", ["x"]])}),
        (None, lambda: {"bootstrap_room": rng.choice([1, -1, [1]])}),
        (None, lambda: {"data_parallel_rank": rng.choice([0, 1, -1, 99])}),
        (None, lambda: {"routed_dp_rank": rng.choice([0, 1, -1, 99])}),
        (None, lambda: {"return_bytes": True, "return_prompt_token_ids": True}),
        (None, lambda: {"return_entropy": True}),
        (None, lambda: {"max_thinking_tokens": rng.choice([0, 5, -1])}),
        (None, lambda: {"background": True}),
    ]  # fmt: skip
    body |= _some_of(extras, rng, world, [0, 0, 1, 1, 2]) | _stream(rng)
    return rng.choice(["POST", "POST", "PUT"]), "/generate", body


def _openai_extras(rng: random.Random, world: World, body: dict[str, Any], *, chat: bool) -> None:
    """Fields that chat completions and completions share."""
    extras: Extras = [
        (None, lambda: {"temperature": rng.choice([0, 0.7, 1, 2, 3, -1])}),
        (None, lambda: {"top_p": rng.choice([1, 0.5, 0, 2]), "top_k": rng.choice([1, 5, 0, -1])}),
        (None, lambda: {"min_p": rng.choice([0, 0.1, 1, 1.1])}),
        (None, lambda: {"n": _num_replies(rng)}),
        (None, lambda: {"stop": rng.choice(["a", ["a", "b"], "", [], [""], ["x"] * 20, 5])}),
        (None, lambda: {"stop_token_ids": rng.choice([[7], [-1], [world.vocab_size], ["a"]])}),
        (None, lambda: {"stop_regex": rng.choice(["[ab]", "[a"])}),
        (None, lambda: {"seed": rng.choice([0, 5, -1, 2**40])}),
        ("penalties", lambda: {"min_tokens": rng.choice([1, 5, 1000, -1]), "ignore_eos": True}),
        (None, lambda: {"logit_bias": _logit_bias(rng, world)}),
        (None, lambda: {"rid": rng.choice([f"rid-{rng.randrange(20)}", ["a", "b"]])}),
        (None, lambda: {"user": "u", "nonsense": rng.choice(GARBAGE)}),
        (None, lambda: {"custom_params": rng.choice(GARBAGE)}),
        (None, lambda: {"return_hidden_states": rng.choice([True, "last"])}),
        ("penalties", lambda: _penalties(rng)),
        ("penalties", lambda: _penalties(rng)),
        ("lora", lambda: {"lora_path": _lora(rng, world)}),
        ("lora", lambda: {"model": f"{world.model}:{_lora(rng, world)}"}),
        ("sessions", lambda: {"session_params": {"id": _session_id(rng)}}),
        ("grammars", lambda: {"response_format": rng.choice([
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": rng.choice(_SCHEMAS)}},
            {"type": "json_schema"}, {"type": "nonsense"}, {"type": "text"},
            rng.choice(_STRUCTURAL_TAGS)])}),
        ("grammars", lambda: {"regex": rng.choice(_REGEXES)}),
        ("grammars", lambda: {"ebnf": rng.choice(_EBNFS)}),
    ]  # fmt: skip
    if chat:
        extras += [
            ("logprobs", lambda: {"logprobs": True, "top_logprobs": rng.choice(
                [0, 3, 20, 99, -1])}),
            ("grammars", lambda: {"tools": [rng.choice(_TOOLS)], "tool_choice": rng.choice(
                ["auto", "required", "none", {"type": "function", "function": {"name": "f"}},
                 {"type": "function", "function": {"name": "missing"}}])}),
            (None, lambda: {"continue_final_message": True}),
            (None, lambda: {"chat_template_kwargs": rng.choice([{"a": 1}, {"messages": 5}, {}])}),
            (None, lambda: {"reasoning_effort": rng.choice(["low", "none", "nonsense"])}),
            (None, lambda: {"input_ids": rng.choice([[7, 8], [world.vocab_size], []])}),
        ]  # fmt: skip
    else:
        extras += [
            ("logprobs", lambda: {"logprobs": rng.choice([0, 1, 5, 100, -1]), "echo": True}),
            ("logprobs", lambda: {"logprobs": rng.choice([0, 1, 5])}),
            (None, lambda: {"best_of": rng.choice([1, 2, 5, 0, -1])}),
            (None, lambda: {"echo": True}),
            (None, lambda: {"suffix": "x"}),
            ("grammars", lambda: {"json_schema": json.dumps(rng.choice(_SCHEMAS))}),
        ]
    body |= _some_of(extras, rng, world, [0, 1, 1, 2, 3]) | _stream(rng)
    if "stream" in body and rng.random() < 0.3:
        body["stream_options"] = {"include_usage": True}


_TOOLS: tuple[Any, ...] = (
    {"type": "function", "function": {"name": "f", "parameters": JSON_SCHEMA}},
    {"type": "function", "function": {"name": "f"}},
    {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}},
    {"type": "nonsense"},
)


def _messages(rng: random.Random, world: World) -> Any:
    messages: list[Any] = [{"role": "user", "content": _prompt(rng, world)}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": _text(rng, most=20)})
    if rng.random() < 0.15:
        messages.append(
            rng.choice(
                [
                    {"role": "assistant", "content": "yes"},
                    {"role": "nobody", "content": "x"},
                    {"role": "user", "content": [{"type": "text", "text": "x"}]},
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                    {"role": "user", "content": None},
                    {"role": "user"},
                    {"role": "tool", "content": "x", "tool_call_id": "a"},
                    {"role": "assistant", "content": None, "tool_calls": []},
                    {},
                ]
            )
        )
    return messages if rng.random() < 0.97 else rng.choice([[], None, "x", [None]])


def _chat(rng: random.Random, world: World) -> Made:
    limit = rng.choice(["max_tokens", "max_tokens", "max_completion_tokens"])
    body = {"model": world.model, "messages": _messages(rng, world), limit: _tokens(rng, world)}
    _openai_extras(rng, world, body, chat=True)
    return "POST", rng.choices(["/v1/chat/completions", "/invocations"], [9, 1])[0], body


def _completions(rng: random.Random, world: World) -> Made:
    prompt: Any = rng.choice(
        [
            _prompt(rng, world),
            _prompt(rng, world),
            [_prompt(rng, world) for _ in range(rng.choice([0, 1, 3]))],
            _ids(rng, world),
            [_ids(rng, world), [7]],
            [world.vocab_size],
            [[-1]],
            [],
        ]
    )
    body = {"model": world.model, "prompt": prompt, "max_tokens": _tokens(rng, world)}
    _openai_extras(rng, world, body, chat=False)
    return "POST", "/v1/completions", body


def _responses(rng: random.Random, world: World) -> Made:
    body: dict[str, Any] = {
        "model": world.model,
        "input": rng.choice(
            [
                _prompt(rng, world),
                _prompt(rng, world),
                _messages(rng, world),
                [],
                5,
                [{"type": "x"}],
            ]
        ),
        "max_output_tokens": _tokens(rng, world),
    }
    extras: Extras = [
        (None, lambda: {"instructions": rng.choice(["be short", "", 5])}),
        (None, lambda: {"previous_response_id": rng.choice(["resp_1", "", "x"])}),
        (None, lambda: {"store": rng.choice([False, True])}),
        (None, lambda: {"background": True}),
        (None, lambda: {"temperature": rng.choice([0, 1, -1]), "top_p": rng.choice([1, 0.5, 2])}),
        ("logprobs", lambda: {"include": rng.choice(
            [[], ["x"], ["message.output_text.logprobs"]])}),
        (None, lambda: {"tools": rng.choice([[], [{"type": "web_search_preview"}], [{"type": "x"}],
            [{"type": "function", "name": "f", "parameters": JSON_SCHEMA}]])}),
        (None, lambda: {"reasoning": rng.choice([{"effort": "low"}, {"effort": "x"}])}),
        ("logprobs", lambda: {"top_logprobs": rng.choice([0, 5, -1, 99])}),
        (None, lambda: {"metadata": rng.choice([{}, {"a": "b"}, 5])}),
        (None, lambda: {"request_id": rng.choice(["resp_a", "", "resp_a"])}),
        (None, lambda: {"top_k": rng.choice([1, -1]), "min_p": 0.1}),
        ("grammars", lambda: {"text": {"format": rng.choice([
            {"type": "json_schema", "name": "a", "schema": rng.choice(_SCHEMAS)},
            {"type": "json_object"}, {"type": "text"}])}}),
        ("penalties", lambda: {"presence_penalty": 0.5, "repetition_penalty": 1.2}),
    ]  # fmt: skip
    body |= _some_of(extras, rng, world, [0, 0, 1, 1, 2]) | _stream(rng)
    return "POST", "/v1/responses", body


def _anthropic(rng: random.Random, world: World) -> Made:
    body: dict[str, Any] = {
        "model": world.model,
        "messages": _messages(rng, world),
        "max_tokens": _tokens(rng, world),
    }
    extras: Extras = [
        (None, lambda: {"system": rng.choice(["be short", [{"type": "text", "text": "x"}], 5])}),
        (None, lambda: {"stop_sequences": rng.choice([["a"], [], [""], "a"])}),
        (None, lambda: {"temperature": rng.choice([0, 1, 2, -1]), "top_k": rng.choice([1, 0, -1])}),
        (None, lambda: {"thinking": rng.choice([{"type": "enabled", "budget_tokens": 5}, {}, 5])}),
        (None, lambda: {"tools": [{"name": "f", "input_schema": JSON_SCHEMA}]}),
        (None, lambda: {"metadata": {"user_id": "u"}}),
    ]
    body |= _some_of(extras, rng, world, [0, 1, 2]) | _stream(rng)
    return "POST", rng.choice(["/v1/messages"] * 5 + ["/v1/messages/count_tokens"]), body


def _other_models(rng: random.Random, world: World) -> Made:
    """Endpoints for models that embed, rank or classify, and some that any model serves."""
    text = _prompt(rng, world)
    documents = [_prompt(rng, world) for _ in range(rng.choice([0, 1, 3]))]
    model = world.model
    labels: Any = rng.choice([[7, 8], [], [world.vocab_size], [-1], ["a"], None, [7, 7]])
    path, body = rng.choice(
        [
            ("/v1/embeddings", {"model": model, "input": rng.choice(
                [text, documents, [7], [], 5])}),
            ("/v1/classify", {"model": model, "input": rng.choice([text, documents])}),
            ("/classify", {"text": text}),
            ("/encode", {"text": rng.choice([text, documents])}),
            ("/v1/rerank", {"query": text, "documents": documents, "top_n": rng.choice([1, 0, 9])}),
            ("/v1/score", {"model": model, "query": text, "items": documents,
                "label_token_ids": labels, "apply_softmax": rng.choice([True, False]),
                "item_first": rng.choice([True, False])}),
            ("/v1/score", {"model": model, "query": _ids(rng, world),
                "items": [_ids(rng, world), [7]], "label_token_ids": labels}),
            ("/v1/score", {"model": model, "query": text, "items": documents,
                "label_token_ids": labels, "temperature": rng.choice([1, 0.5, 0, -1])}),
            ("/v1/decisions", {"model": model, "input": text, "questions": rng.choice([
                [{"id": "a", "type": "boolean", "question": "is it?"}], [{}], [], 5])}),
            ("/v1/systemone", {"model": model, "input": text, "questions": [{"type": "noul"}]}),
        ]
    )  # fmt: skip
    return "POST", path, body


def _tokenizing(rng: random.Random, world: World) -> Made:
    path, body = rng.choice(
        [
            ("/tokenize", {"prompt": rng.choice([_prompt(rng, world), ["a", "b"], [], 5, None])}),
            ("/v1/tokenize", {"model": world.model, "messages": _messages(rng, world)}),
            ("/detokenize", {"tokens": rng.choice([_ids(rng, world), [], [[7], [8]], [-1], [10**9],
                [world.vocab_size], ["a"], [2**40], [[]]])}),
            ("/parse_function_call", {"text": "x", "tools": [], "tool_call_parser": "x"}),
            ("/separate_reasoning", {"text": "x", "reasoning_parser": "x"}),
        ]
    )  # fmt: skip
    return "POST", path, body


def _sessions(rng: random.Random, world: World) -> Made:
    name: Any = _session_id(rng)
    if rng.random() < 0.15:
        name = rng.choice([None, "", "missing", 5])
    if rng.random() < 0.4:
        return "POST", "/close_session", {"session_id": name}
    body: dict[str, Any] = {
        "capacity_of_str_len": rng.choice([1000, 1000, 1000, 0, -1, 10**12, "a"]),
        "session_id": name,
    }
    if rng.random() < 0.3:
        body["streaming"] = rng.choice([True, False])
    if rng.random() < 0.3:
        body["timeout"] = rng.choice([0.5, 0, -1, 1e9])
    return "POST", "/open_session", body


def _abort(rng: random.Random, world: World) -> Made:
    # Never all of them: that would be an operator's order, and end the probe beside.
    rid = rng.choice([f"rid-{rng.randrange(20)}", "missing", f"rid-{rng.randrange(20)}", 5])
    return "POST", "/abort_request", {"rid": rid}


def _looking(rng: random.Random, world: World) -> Made:
    path = rng.choice(
        ["/health", "/health_generate", "/get_server_info", "/v1/models", "/v1/models/missing",
         "/v1/loads", "/v1/loads?include=nonsense", "/v1/loads?dp_rank=99", "/get_model_info",
         "/v1/responses/resp_missing", "/nothing/here", "/ping", "/ready", "/api/tags"]
    )  # fmt: skip
    return "GET", path, None


def _gateways(rng: random.Random, world: World) -> Made:
    """Other vendors' forms of the same."""
    options = {"num_predict": rng.choice([4, -1, 0]), "temperature": rng.choice([0, 1, "a"])}
    path, body = rng.choice(
        [
            ("/vertex_generate", {"instances": rng.choice([
                [{"text": _prompt(rng, world)}], [], [{}],
                [{"input_ids": _ids(rng, world)}], [5]]), "parameters": {
                    "sampling_params": _sampling(rng, world)}}),
            ("/api/chat", {"model": world.model, "messages": _messages(rng, world),
                "stream": rng.choice([True, False]), "options": options}),
            ("/api/generate", {"model": world.model, "prompt": _prompt(rng, world),
                "stream": rng.choice([True, False]), "options": options}),
            ("/api/show", {"model": rng.choice([world.model, "missing"])}),
            ("/v1/responses/resp_missing/cancel", {}),
        ]
    )  # fmt: skip
    return "POST", path, body


def _at_bounds(rng: random.Random, world: World) -> Made:
    """Fields of the table that requests are checked against, at their bounds and beyond."""
    path = rng.choice(URLS)
    return "POST", path, boundary_body(rng, path, world.model, world.scope)


Maker = Callable[[random.Random, World], Made]

_MAKERS: tuple[tuple[Maker, str | None, int], ...] = (
    (_generate, None, 30),
    (_at_bounds, None, 30),
    (_chat, None, 22),
    (_completions, None, 12),
    (_responses, None, 8),
    (_anthropic, None, 7),
    (_other_models, None, 7),
    (_tokenizing, None, 4),
    (_sessions, "sessions", 5),
    (_abort, "aborts", 3),
    (_looking, None, 3),
    (_gateways, None, 4),
)

_SMALL = ("/open_session", "/close_session", "/abort_request")
"""Over at once, and later requests build on them: their clients wait for the answer."""
