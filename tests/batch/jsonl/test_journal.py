"""The output files are the only record of what is done, whatever was cut off them."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosched.batch.jsonl.errors import JobFileError
from cosched.batch.jsonl.journal import Journal, JournalPaths, LineSet
from cosched.batch.jsonl.line_results import Answer, Failure
from cosched.batch.jsonl.lines import BadLine, RequestLine
from cosched.batch.jsonl.source import read_source

NUM_LINES = 6


class Files:
    def __init__(self, folder):
        self.input = folder / "in.jsonl"
        self.out = folder / "out.jsonl"
        self.errors = folder / "out.jsonl.errors.jsonl"
        self.input.write_bytes(b"line\n" * NUM_LINES)

    def open(self, *, overwrite=False, ordered=False, errors=None):
        paths = JournalPaths(out=str(self.out), errors=errors)
        return Journal.open(
            paths=paths,
            source=read_source(str(self.input)),
            ordered=ordered,
            max_line_bytes=100,
            overwrite=overwrite,
        )


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def line(number):
    return RequestLine(number=number, custom_id=f"id {number}", url="/v1/completions", body=b"{}")


def answered(journal, number):
    body = json.dumps({"text": f"ä {number}\n"}).encode()
    answer = Answer(status=200, request_id="r", body=body, prompt_tokens=1, completion_tokens=1)
    return journal.records.record(line(number), answer)


def failed(journal, number):
    failure = Failure(code="http_400", message="no", status=400, request_id="r", body=b'{"a": 1}')
    return journal.records.record(line(number), failure)


def done(journal):
    return {number for number in range(1, NUM_LINES + 1) if number in journal.done}


def test_records_have_the_promised_form_and_are_found_again(files):
    with files.open() as journal:
        journal.write(answered(journal, 2))
        journal.write(failed(journal, 5))
        journal.write(
            journal.records.record(
                BadLine(number=6, custom_id=None, code="invalid_json_line", message="m", param=None)
            )
        )
    with files.open() as journal:
        assert done(journal) == {2, 5, 6}
        assert (journal.num_answered, journal.num_failed, journal.num_cut_bytes) == (1, 2, 0)
    [answer] = [json.loads(text) for text in files.out.read_text().splitlines()]
    assert answer.pop("id").startswith("batch_req_")
    assert answer == {
        "custom_id": "id 2",
        "response": {"status_code": 200, "request_id": "r", "body": {"text": "ä 2\n"}},
        "error": None,
    }
    first, second = [json.loads(text) for text in files.errors.read_text().splitlines()]
    assert first.pop("id") != second.pop("id")
    common = {"type": "invalid_request_error", "param": None}
    refused = {"message": "no", "code": "http_400", **common}
    wrong = {"message": "m", "code": "invalid_json_line", **common}
    assert first == {
        "custom_id": "id 5",
        "line": 5,
        "response": {"status_code": 400, "request_id": "r", "body": {"a": 1, "error": refused}},
        "error": None,
    }
    assert second == {
        "custom_id": None,
        "line": 6,
        "response": {"status_code": 400, "request_id": "", "body": {"error": wrong}},
        "error": None,
    }


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
@given(
    cut=st.floats(0, 1), order=st.permutations(range(1, NUM_LINES + 1)), tail=st.binary(max_size=9)
)
def test_a_file_cut_anywhere_keeps_its_whole_records_and_resumes(files, cut, order, tail):
    with files.open(overwrite=True) as journal:
        sizes = []
        for number in order[:4]:
            journal.write(answered(journal, number))
            sizes.append(files.out.stat().st_size)
    length = int(cut * sizes[-1])
    os.truncate(files.out, length)
    with open(files.out, "ab") as file:
        file.write(tail.lstrip(b"\n"))  # what a crash of the machine may leave there
    whole = [number for number, size in zip(order, sizes, strict=False) if size <= length]
    with files.open() as journal:
        assert done(journal) == set(whole)
        assert files.out.stat().st_size == (sizes[len(whole) - 1] if whole else 0)
        for number in set(order) - set(whole):
            journal.write(answered(journal, number))
    ids = [json.loads(text)["custom_id"] for text in files.out.read_text().splitlines()]
    assert sorted(ids) == [f"id {number}" for number in range(1, NUM_LINES + 1)]


def test_two_jobs_cannot_share_a_file(files, tmp_path):
    with files.open():
        with pytest.raises(JobFileError, match=r"another run_batch is writing .*out\.jsonl"):
            files.open()
        other = Files(tmp_path)
        other.out = tmp_path / "other.jsonl"
        with pytest.raises(JobFileError, match="another run_batch"):
            other.open(errors=str(files.errors))
    files.open().close()


def test_another_input_is_refused_until_overwritten(files):
    with files.open() as journal:
        journal.write(answered(journal, 1))
    before = files.out.read_bytes()
    files.input.write_bytes(b"Line\n" * NUM_LINES)
    with pytest.raises(JobFileError, match="not the one this output was started with"):
        files.open()
    assert files.out.read_bytes() == before
    with files.open(overwrite=True) as journal:
        assert done(journal) == set()
    assert files.out.read_bytes() == b""


def test_a_moved_input_is_the_same_input(files, tmp_path):
    files.open().close()
    files.input = files.input.rename(tmp_path / "renamed.jsonl")
    files.open().close()


@pytest.mark.parametrize("change", [{"ordered": True}, {"errors": "elsewhere.jsonl"}])
def test_a_setting_that_would_mix_the_outputs_is_refused(files, change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.open().close()
    with pytest.raises(JobFileError, match=f"--{next(iter(change))} is .* was started with"):
        files.open(**change)


def test_a_file_of_another_program_is_not_touched(files):
    files.out.write_text("my results\n")
    with pytest.raises(JobFileError, match="was not written by this program"):
        files.open()
    assert files.out.read_text() == "my results\n"


def test_a_changed_line_in_the_middle_is_not_cut_off_with_the_rest(files):
    with files.open() as journal:
        journal.write(answered(journal, 1))
        journal.write(answered(journal, 2))
    text = files.out.read_text()
    files.out.write_text("edited\n" + text)
    with pytest.raises(JobFileError, match="did not write for this input"):
        files.open()
    files.out.write_text(text + text)
    with pytest.raises(JobFileError, match="line 1 of the input a second time"):
        files.open()


def test_a_broken_sidecar_is_named(files):
    files.open().close()
    for content in ("", "[]", '{"format": 99}', '{"format": 1}', '{"format": 1, "input": 3}'):
        (files.out.parent / "out.jsonl.state.json").write_text(content)
        with pytest.raises(JobFileError, match=r"out\.jsonl\.state\.json is not a state"):
            files.open()


def test_nothing_follows_half_a_record(files, monkeypatch):
    write = os.write

    def nearly_full(fd, data):
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return write(fd, data[:40])

    with files.open() as journal:
        journal.write(answered(journal, 1))
        monkeypatch.setattr(os, "write", nearly_full)
        with pytest.raises(JobFileError, match="No space left"):
            for _ in range(9):
                journal.write(answered(journal, 2))
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(JobFileError, match="after an earlier failure"):
            journal.write(answered(journal, 3))
    with files.open() as journal:
        assert done(journal) == {1}
        assert journal.num_cut_bytes > 0


@given(st.integers(1, 100).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n)))))
def test_line_numbers_are_kept_apart(case):
    num_lines, numbers = case
    lines = LineSet(num_lines=num_lines)
    for number in numbers:
        lines.add(number)
    assert {n for n in range(1, num_lines + 1) if n in lines} == numbers
