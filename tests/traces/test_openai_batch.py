"""OpenAI batch files become requests of real tokens."""

import pytest

from cosched.core.request import RequestClass
from cosched_traces.errors import RowError
from cosched_traces.openai_batch import read_openai_batch
from tests.traces.samples import common_prefix, write_jsonl


def tokenize(text):
    return list(text.encode())


def text_of(prompt):
    return bytes(list(prompt)).decode()


def line(custom_id="a", url="/v1/chat/completions", **body):
    body = body or {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_chat_and_completions(tmp_path):
    system = {"role": "system", "content": "Sort the words."}
    chats = [
        line(str(i), messages=[system, {"role": "user", "content": word}], max_tokens=8)
        for i, word in enumerate(["oak elm", "ash fir"])
    ]
    path = write_jsonl(
        tmp_path / "b.jsonl",
        *chats,
        line("text", "/v1/completions", prompt="abc", max_completion_tokens=3, max_tokens=9),
        line("ids", "/v1/completions", prompt=[5, 6]),
    )
    read = read_openai_batch(path, tokenize, default_max_tokens=2)
    assert [r.rid for r in read.requests] == ["0", "1", "text", "ids"]
    assert [r.num_output_tokens for r in read.requests] == [8, 8, 3, 2]
    assert {r.request_class for r in read.requests} == {RequestClass.OFFLINE}
    first, second, text, ids = (r.prompt(vocab_size=300) for r in read.requests)
    assert text_of(first) == "system: Sort the words.\nuser: oak elm\nassistant:"
    assert common_prefix(first, second) == len("system: Sort the words.\nuser: ")
    assert text_of(text) == "abc"
    assert list(ids) == [5, 6]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"url": "/v1/completions", "body": {}}, "custom_id is not a text: None"),
        (line(), "custom_id 'a' is on an earlier line"),
        ({"custom_id": "b", "url": "/v1/completions"}, "body is not an object"),
        (line("b", "/v1/embeddings", input="x"), "'/v1/embeddings' generates no text"),
        (line("b", messages="hi", max_tokens=1), "messages is not a list"),
        (line("b", messages=[{"role": "user"}], max_tokens=1), "messages is not a list"),
        (line("b", "/v1/completions", prompt=[[1]], max_tokens=1), "prompt is neither"),
        (line("b", "/v1/completions", prompt="", max_tokens=1), "the prompt has no tokens"),
        (line("b", "/v1/completions", prompt="x"), "give default_max_tokens"),
        (
            line("b", "/v1/completions", prompt="x", max_tokens=0),
            "max_tokens is not a number above",
        ),
    ],
)
def test_a_bad_line_names_file_line_and_reason(tmp_path, row, reason):
    path = write_jsonl(tmp_path / "bad.jsonl", line(), row)
    with pytest.raises(RowError, match=r"bad.jsonl:2: ") as error:
        read_openai_batch(path, tokenize)
    assert reason in str(error.value)
