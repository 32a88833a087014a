"""MMLU 5-shot: one head for all questions of a subject."""

import pytest

from cosched_traces.errors import RowError
from cosched_traces.mmlu import generate_mmlu, read_mmlu
from cosched_traces.trace_summary import shared_ratio
from tests.traces.samples import common_prefix, rids_of, summarize, write_jsonl


def row(subject, question, answer="B"):
    choices = ["one", "two", "three", "four"]
    return {"subject": subject, "question": question, "choices": choices, "answer": answer}


@pytest.fixture
def files(tmp_path):
    dev = write_jsonl(
        tmp_path / "dev.jsonl.gz", *(row(s, f"shot {i}") for i in range(5) for s in ("law", "art"))
    )
    test = write_jsonl(
        tmp_path / "test.jsonl.gz", *(row(s, f"ask {i}?") for s in ("law", "art") for i in range(8))
    )
    return dev, test


def tokenize(text):
    return list(text.encode())


def test_real_files_with_a_tokenizer(files):
    made = read_mmlu(*files, seed=0, tokenize=tokenize)
    texts = [bytes(list(r.prompt(vocab_size=300))).decode() for r in made.requests]
    assert len(texts) == 16
    shot = "shot 0\nA. one\nB. two\nC. three\nD. four\nAnswer: B\n\n"
    intro = "The following are multiple choice questions (with answers) about law.\n\n"
    law = [text for text in texts if text.startswith(intro)]
    assert len(law) == 8
    assert law[0].startswith(intro + shot)
    assert law[0].count("Answer: B") == 5
    assert law[0].endswith("?\nA. one\nB. two\nC. three\nD. four\nAnswer:")
    assert {r.num_output_tokens for r in made.requests} == {16}


def test_without_a_tokenizer_lengths_are_estimated_and_heads_shared(files):
    exact = read_mmlu(*files, seed=0, tokenize=tokenize)
    made = read_mmlu(*files, seed=0, num_output_tokens=3)
    assert rids_of(made) == rids_of(exact)
    for estimated, real in zip(made.requests, exact.requests, strict=True):
        assert estimated.num_prompt_tokens == pytest.approx(real.num_prompt_tokens / 4, abs=2)
    assert len({r.segments[0] for r in made.requests}) == 2
    assert shared_ratio(made) > 0.7
    assert {r.num_output_tokens for r in made.requests} == {3}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({**row("law", "q"), "choices": ["x"]}, "`array` of length 4 - at `$.choices`"),
        ({"subject": "law", "choices": [1, 2, 3, 4]}, "missing required field `question`"),
        (row("physics", "q"), "subject 'physics' has no examples in"),
    ],
)
def test_a_bad_row_names_file_line_and_reason(tmp_path, files, bad, reason):
    test = write_jsonl(tmp_path / "bad.jsonl", row("law", "q"), bad)
    with pytest.raises(RowError, match=r"bad.jsonl:2: ") as error:
        read_mmlu(files[0], test, seed=0)
    assert reason in str(error.value)


def test_the_generated_set_has_the_measured_statistics():
    made = generate_mmlu(seed=0)
    heads = {r.segments[0] for r in made.requests}
    assert len(made.requests) == 14_042
    assert len(heads) == 57
    assert sum(head.num_tokens for head in heads) / 57 == pytest.approx(539.9, rel=0.01)
    questions = [r.segments[1].num_tokens for r in made.requests]
    assert sum(questions) / len(questions) == pytest.approx(117.1, rel=0.03)
    assert 11 <= min(questions) <= max(questions) <= 1224
    assert summarize(made).mean_prompt_tokens == pytest.approx(757.5, rel=0.01)
    assert shared_ratio(made) == pytest.approx(0.843, abs=0.01)
    longest = [r for r in made.requests if r.segments[0].num_tokens == 2907]
    one, other = (r.prompt(vocab_size=50_000) for r in longest[:2])
    assert common_prefix(one, other) == 2907
