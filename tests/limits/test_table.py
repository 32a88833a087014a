"""The bounds of a request's fields: which there are, and what they let through."""

from __future__ import annotations

import dataclasses
import math
import re
from array import array
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cosched.bootstrap  # noqa: F401  # before SGLang
from cosched.errors import RequestError
from cosched.limits.bodies import check_body
from cosched.limits.bounds import ANY_MODEL, MOST_SAMPLES, WHOLE_VOCABULARY, Free, Number, Scope
from cosched.limits.bounds_table import TABLE, check_field, check_fields, check_text

VOCAB, CONTEXT, HIDDEN = 2048, 1024, 64
SCOPE = Scope(vocab_size=VOCAB, context_len=CONTEXT, hidden_size=HIDDEN)

ALL = [(struct, name) for struct, fields in TABLE.items() for name in fields]


def is_within(struct, name, value, scope=SCOPE):
    try:
        check_field(name, value, TABLE[struct][name], scope)
    except RequestError:
        return False
    return True


def fields_of(struct):
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling import sampling_params

    kind = getattr(io_struct, struct, None) or getattr(sampling_params, struct)
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return {field.name for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize("struct", TABLE)
def test_every_field_of_sglang_s_requests_has_a_bound_or_a_reason_for_none(struct):
    fields = fields_of(struct)
    without, gone = fields - set(TABLE[struct]), set(TABLE[struct]) - fields
    assert not without, f"{struct}: neither bound nor reason for {sorted(without)}"
    assert not gone, f"{struct}: SGLang has no {sorted(gone)}"
    assert all(bound.reason for bound in TABLE[struct].values() if isinstance(bound, Free))


def test_the_page_names_every_bound():
    page = Path("docs/api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", page, re.MULTILINE)
    documented = {(name, bound) for names, bound in rows for name in names.split(", ")}
    for struct in TABLE:
        stated = {(f"`{name}`", bound.described()) for name, bound in TABLE[struct].items()}
        assert stated <= documented, struct


NUMBERS = [key for key in ALL if isinstance(TABLE[key[0]][key[1]], Number)]


def ends_of(bound):
    low, high = (level(SCOPE) if callable(level) else level for level in (bound.low, bound.high))
    return low, high


@pytest.mark.parametrize(("struct", "name"), NUMBERS)
@given(value=st.integers() | st.floats())
def test_a_number_within_its_ends_is_all_that_is_taken(struct, name, value):
    bound = TABLE[struct][name]
    low, high = ends_of(bound)
    step = 1 if bound.is_whole else max(1e-9, high * 1e-9)
    for each in (value, low, high, low - step, high + step, *bound.also):
        fits = isinstance(each, int) or not bound.is_whole
        fits = fits and low <= each <= high and not (bound.is_above and each == low)
        fits = fits or (type(each) is int and each in bound.also)
        assert is_within(struct, name, each) == fits, each


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from(ALL), json_values)
def test_whatever_the_value_is_the_check_says_within_or_names_the_field(key, value):
    struct, name = key
    try:
        check_field(name, value, TABLE[struct][name], SCOPE)
    except RequestError as error:
        assert str(error).startswith(f"{name}: ")
        assert len(str(error)) < 500


@given(
    st.sampled_from(["/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses"]),
    st.dictionaries(st.sampled_from([name for _, name in ALL] + ["prompt", "tools"]), json_values),
)
def test_whatever_the_body_is_the_check_ends_with_a_verdict(path, body):
    try:
        check_body(path, body, SCOPE)
    except RequestError as error:
        assert error.field.split("[")[0] in body


def test_top_k_is_within_the_vocabulary_or_for_all_of_it():
    for value in (-1, 1, VOCAB, WHOLE_VOCABULARY, None):
        assert is_within("SamplingParams", "top_k", value), value
    # Of these some end stock SGLang.
    for value in (2**31, 2**32, 2**62, 2**63, VOCAB + 1, WHOLE_VOCABULARY + 1, 0):
        assert not is_within("SamplingParams", "top_k", value), value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
@pytest.mark.parametrize(("struct", "name"), NUMBERS)
def test_no_number_is_infinite(struct, name, value):
    assert not is_within(struct, name, value)


WRONG = [
    ("logit_bias", {"-1": 0}),
    ("logit_bias", {str(VOCAB): 0}),
    ("logit_bias", {"a": 0}),
    ("logit_bias", {"1": math.nan}),
    ("logit_bias", {"1": 1e31}),
    ("logit_bias", {"1": "a"}),
    ("logit_bias", {str(i): 0 for i in range(1025)}),
    ("stop", ["x"] * 33),
    ("stop", "x" * 1025),
    ("stop", [1]),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", "12"),
    ("stop_regex", "(?=a)"),
    ("stop_regex", ["a"] * 33),
    ("json_schema", {"type": "object"}),
    ("json_schema", "{"),
    ("custom_params", {"a": "x" * 70_000}),
    ("n", MOST_SAMPLES + 1),
    ("n", 0),
    ("beam_width", VOCAB // 2 + 1),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_sampling_parameter_beyond_its_bound_is_refused_by_its_name(name, value):
    with pytest.raises(RequestError, match=rf"^sampling_params\.{name}: "):
        check_fields("SamplingParams", {name: value}, SCOPE, prefix="sampling_params.")


def test_token_ids_are_of_the_vocabulary():
    ids = TABLE["TokenizedGenerateReqInput"]["input_ids"]
    assert ids.fault([0, VOCAB - 1], SCOPE) is None
    assert ids.fault(array("q", [0, VOCAB - 1]), SCOPE) is None
    for wrong in ([VOCAB], [-1], [1, 2**40], ["a"], [None], [1.5]):
        assert ids.fault(wrong, SCOPE) is not None
    assert "above 2047" in ids.fault(array("q", [5, VOCAB]), SCOPE)


def test_a_batch_may_have_a_value_for_each_prompt():
    def check(**values):
        check_fields("GenerateReqInput", values, SCOPE, of_batch=True)

    check(input_ids=[[1, 2], [3]], top_logprobs_num=[1, None], rid=["a", "b"])
    check(token_ids_logprob=[[1], [2]], input_embeds=[[[0.5] * HIDDEN]])
    for wrong in (
        {"input_ids": [[1], [VOCAB]]},
        {"top_logprobs_num": [1, VOCAB + 1]},
        {"token_ids_logprob": [[1], [VOCAB]]},
        {"input_embeds": [[[0.5] * 3]]},
        {"input_embeds": [[math.nan] * HIDDEN]},
    ):
        with pytest.raises(RequestError):
            check(**wrong)


def test_a_text_may_have_so_many_characters_for_each_token_of_the_context():
    check_text("text", 16 * CONTEXT, SCOPE)
    with pytest.raises(RequestError, match=r"text: 16385 characters are above 16384"):
        check_text("text", 16 * CONTEXT + 1, SCOPE)


BODIES = [
    ("/v1/chat/completions", {"top_logprobs": VOCAB + 1}, "top_logprobs"),
    ("/v1/chat/completions", {"max_completion_tokens": 2**31}, "max_completion_tokens"),
    ("/v1/chat/completions", {"seed": 2**63}, "seed"),
    ("/v1/chat/completions", {"top_k": "4096"}, "top_k"),
    ("/v1/chat/completions", {"temperature": "nan"}, "temperature"),
    ("/v1/chat/completions", {"tools": [{"a": {"enum": [1] * 6000}}]}, "tools"),
    ("/v1/chat/completions", {"messages": [{"content": "x" * 9000}] * 2}, "messages"),
    ("/v1/completions", {"logprobs": VOCAB + 1}, "logprobs"),
    ("/v1/completions", {"prompt": ["x", "x" * 16385]}, r"prompt\[1\]"),
    ("/v1/completions", {"bootstrap_port": [1, 2**20]}, "bootstrap_port"),
    ("/v1/embeddings", {"dimensions": HIDDEN + 1}, "dimensions"),
    ("/v1/embeddings", {"input": "x" * 16385}, "input"),
    ("/v1/responses", {"max_output_tokens": 2**31}, "max_output_tokens"),
    ("/v1/responses", {"text": {"format": {"schema": {"enum": [1] * 6000}}}}, "text"),
    ("/v1/messages", {"stop_sequences": ["x"] * 33}, "stop_sequences"),
    ("/generate", {"positional_embed_overrides": {}}, "positional_embed_overrides"),
    ("/generate", {"text": "x" * 16385}, "text"),
    ("/tokenize", {"prompt": "x" * 16385}, "prompt"),
    ("/detokenize", {"tokens": [7, -1]}, "tokens"),
    ("/v1/detokenize", {"tokens": [[7], [VOCAB]]}, "tokens"),
    ("/v1/detokenize", {"tokens": [7] * 16385}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), BODIES)
def test_a_body_is_refused_by_the_name_that_the_client_used(path, body, field):
    with pytest.raises(RequestError, match=f"^{field}: "):
        check_body(path, body, SCOPE)


GOOD = [
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 20, "max_tokens": None}),
    ("/v1/chat/completions", {"top_k": "5", "n": 2.0, "temperature": "0.5", "stream": "true"}),
    ("/v1/chat/completions", {"stop": ["a"], "rid": ["a", "b"], "logit_bias": {"5": -100}}),
    (
        "/v1/chat/completions",
        {"messages": [{"content": [{"image_url": {"url": "x" * 10**6}}, {"text": "what?"}]}]},
    ),
    ("/v1/completions", {"logprobs": 5, "prompt": ["x" * 16384] * 50}),
    ("/v1/completions", {"prompt": [1, 2, 3]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/detokenize", {"tokens": [[1], [], [2, 3]]}),
    ("/v1/responses", {"text": {"format": {"type": "text"}}, "input": "hello"}),
    ("/v1/messages", {"top_k": 5, "metadata": {"user_id": "u"}}),
    ("/v1/chat/completions", []),
]


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_an_ordinary_body_is_taken(path, body):
    check_body(path, body, SCOPE)


def test_where_the_model_is_not_known_the_bounds_of_all_models_hold():
    assert is_within("SamplingParams", "top_k", 100_000, ANY_MODEL)
    assert not is_within("SamplingParams", "top_k", 2**32, ANY_MODEL)
    check_body("/v1/chat/completions", {"messages": [{"content": "x" * 10**6}]}, ANY_MODEL)
