"""run_batch as its users call it, against a server that answers or misbehaves."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.batch.api import line, lines, until
from tests.fake_server import Reply, answer
from tests.request_lines import error_of


def names(count):
    return sorted(f"a{n}" for n in range(count))


def write(batch, count, *more):
    batch.write([*lines(count, "a"), *more])


def once_there_are(num, server):
    """Answers when so many requests are at the server, however slow the client is."""

    def behave(asked):
        until(lambda: server.max_waiting >= num)
        return answer(asked, delay_s=0.01)

    return behave


def test_every_line_is_answered_with_as_many_requests_at_a_time_as_allowed(batch):
    write(batch, 50)
    batch.server.behave = once_there_are(7, batch.server)
    report = batch.run("--concurrency", "7")
    assert batch.server.max_waiting == 7
    assert batch.answered() == names(50)
    assert batch.failures() == []
    for record in batch.answers():
        assert record["response"]["body"]["choices"][0]["text"] == f"to {record['custom_id']}"
        assert (record["error"], record["response"]["status_code"]) == (None, 200)
    assert report["counts"] == {
        "lines": 50, "empty": 0, "answered": 50, "failed": 0, "answered_now": 50, "failed_now": 0,
    }  # fmt: skip
    assert report["tokens"] == {"prompt": 150, "completion": 100}
    assert all(asked.body["service_tier"] == "flex" for asked in batch.server.asked)


def documents_asked(batch):
    return [prompt.split()[1] for prompt in batch.server.prompts()]


def write_questions(batch, *, num_documents):
    """Forty lines that ask about documents in turn, and a line that is wrong."""
    documents = [f"document {n} " * 60 for n in range(num_documents)]
    found = [line(f"a{n:02}", documents[n % num_documents] + f"question {n}") for n in range(40)]
    batch.write([found[0], "bad", *found[1:]])
    return [one["custom_id"] for one in found]


def changes_of_document(batch):
    asked = [prompt.split()[1] for prompt in batch.server.prompts()]
    return sum(a != b for a, b in itertools.pairwise(asked))


def test_lines_with_one_document_are_sent_together(batch):
    asked = write_questions(batch, num_documents=4)
    batch.run("--concurrency", "1", code=1)
    assert changes_of_document(batch) == 3
    assert batch.answered() == asked and len(batch.failures()) == 1


def test_an_ordered_job_sends_them_together_as_far_as_its_output_may_wait(batch):
    asked = write_questions(batch, num_documents=2)
    batch.run("--ordered", "--concurrency", "4", code=1)
    assert [record["custom_id"] for record in batch.answers()] == asked
    # Eight lines are sorted at a time, and four arrive in any order; in the file there are 39.
    assert changes_of_document(batch) <= 20


def test_fewer_open_files_than_requests_make_them_fewer(batch, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (64, 70))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: None)
    write(batch, 30)
    batch.server.behave = once_there_are(6, batch.server)
    batch.run()
    assert batch.server.max_waiting == 6
    assert "6 requests at the server at a time: --concurrency 2048 needs" in batch.stderr


def test_rows_of_a_parquet_file_are_lines(batch):
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow (cosched[parquet])")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [*lines(50, "a"), line("a7")]
    parquet.write_table(pa.Table.from_pylist(rows), batch.input, row_group_size=7)
    batch.run(code=1)
    assert batch.answered() == names(50)
    [failure] = batch.failures()
    assert (failure["line"], error_of(failure)["code"]) == (51, "duplicate_custom_id")
    assert batch.run(code=1)["counts"]["answered_now"] == 0


def test_good_and_bad_lines_end_in_their_files(batch):
    batch.write(
        [
            line("a"),
            "",
            "{broken",
            line("a"),
            b"\xff\xfe",
            line("long", "x" * 3000),
            "   ",
            line("refused"),
            line("b", url="/v1/nothing"),
            line("c", body={"prompt": "c", "stream": True}),
            line("ü"),
        ]
    )
    refusal = Reply(status=400, body=b'{"message": "bad prompt"}')
    batch.server.behave = lambda asked: (
        refusal if asked.body["prompt"] == "refused" else answer(asked)
    )
    report = batch.run("--max-line-bytes", "1000", code=1)
    assert batch.answered() == ["a", "ü"]
    found = {r["line"]: (r["custom_id"], error_of(r)["code"]) for r in batch.failures()}
    assert found == {
        3: (None, "invalid_json_line"),
        4: ("a", "duplicate_custom_id"),
        5: (None, "invalid_encoding"),
        6: (None, "line_too_long"),
        8: ("refused", "http_400"),
        9: ("b", "invalid_url"),
        10: ("c", "streaming_unsupported"),
    }
    assert (report["counts"]["empty"], report["counts"]["failed"]) == (2, 7)
    assert str(batch.errors) in batch.stderr


def test_a_finished_job_is_not_run_again(batch):
    write(batch, 20, "bad")
    batch.run(code=1)
    before = batch.out.read_bytes(), batch.errors.read_bytes()
    batch.server.stop()
    report = batch.run("--max-wait", "1", code=1)
    assert (batch.out.read_bytes(), batch.errors.read_bytes()) == before
    assert (report["counts"]["answered"], report["counts"]["answered_now"]) == (20, 0)


def test_an_ordered_job_that_is_killed_resumes_in_order(batch):
    write(batch, 60)
    options = ("--ordered", "--concurrency", "4")
    batch.server.behave = lambda asked: answer(
        asked, delay_s=1.0 if asked.body["prompt"] in ("a0", "a31") else 0.02
    )
    process = batch.start(*options)
    until(lambda: batch.out.exists() and len(batch.answers()) > 10)
    process.kill()
    process.communicate()
    batch.run(*options)
    assert [record["custom_id"] for record in batch.answers()] == [f"a{n}" for n in range(60)]
    # While a0 was slow, no more than its window was answered.
    assert batch.server.prompts().index("a16") >= 16


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_says_how_to_resume_and_does(batch, number):
    write(batch, 40)
    batch.server.behave = lambda asked: answer(
        asked, delay_s=60 if asked.body["prompt"] >= "a2" else 0
    )
    process = batch.start("--concurrency", "40")
    until(lambda: len(batch.server.asked) == 40 and batch.out.stat().st_size)
    process.send_signal(number)
    report = batch.end(process, 130)
    assert "run the same command again" in batch.stderr
    assert report["exit_code"] == 130
    until(lambda: batch.server.num_waiting == 0)  # it saw the requests being given up
    batch.server.behave = answer
    answered = len(batch.answers())
    assert 0 < answered < 40
    assert batch.run()["counts"]["answered_now"] == 40 - answered
    assert batch.answered() == names(40)


def test_a_server_that_restarts_and_misbehaves_costs_no_line(batch):
    write(batch, 300)
    faults = [
        Reply(status=503),
        Reply(status=429),
        Reply(body=b"{}" * 500, cut_at=700),
        Reply(cut_at=0),
        Reply(status=500),
    ]

    restarts = []

    def behave(asked):
        number = int(asked.body["prompt"][1:])
        if asked.nth == 1 and number % 7 < len(faults):
            return faults[number % 7]
        # The job cannot end before the last restart.
        is_held = len(restarts) < 2 and number >= 200
        return answer(asked, delay_s=600 if is_held else 0.02)

    batch.server.behave = behave
    process = batch.start("--concurrency", "20")
    for number in range(2):
        until(lambda: batch.server.num_waiting > 5)
        batch.server.stop()
        restarts.append(number)
        time.sleep(0.3)
        batch.server.start()
    batch.end(process)
    assert batch.answered() == names(300)
    assert batch.failures() == []


@pytest.mark.parametrize(
    ("option", "messages"),
    [
        ("--max-wait", ["not ready after 0.3 s"]),
        # And not the ten minutes of --max-wait.
        ("--wait-s", ["no server at http://127.0.0.1:", "--wait-s"]),
    ],
)
def test_a_server_that_never_comes_is_exit_code_3(batch, option, messages):
    batch.server.stop()
    write(batch, 1)
    report = batch.run(option, "0.3", code=3)
    assert all(message in report["message"] for message in messages), report
    assert (report["counts"]["lines"], report["exit_code"]) == (1, 3)
    assert batch.stdout.count("\n") == 1, "no table of zeros"
    batch.server.start()
    batch.run()
    assert batch.answered() == ["a0"]


def test_another_program_is_refused_and_not_waited_for(batch):
    batch.server.health_status = batch.server.models_status = 404
    write(batch, 1)
    report = batch.run(code=3)
    assert "does not serve these requests" in report["message"]
    assert "again" not in report["message"]
    assert (batch.answers(), batch.failures()) == ([], [])


@pytest.mark.parametrize("state", [None, {"policy": "sglang"}])
def test_a_server_that_knows_no_offline_requests_is_warned_of_or_refused(batch, state):
    batch.server.state = state
    write(batch, 1)
    report = batch.run("--require-offline", code=3)
    assert "does not know offline requests" in report["message"]
    assert batch.server.asked == []
    batch.run()
    assert batch.stderr.count("WARNING") == 1
    assert batch.answered() == ["a0"]
    for policy in ("hygen", "priority"):
        batch.server.state = {"policy": policy}
        batch.run("--require-offline", "--overwrite")
        assert "WARNING" not in batch.stderr


def test_failed_lines_are_sent_again_when_asked_for(batch):
    write(batch, 3, "{")
    report = batch.run("--retry-failed", code=2)
    assert "there is no earlier job" in report["message"]
    batch.server.behave = lambda asked: (
        answer(asked) if asked.body["prompt"] == "a0" else Reply(status=404)
    )
    report = batch.run(code=1)
    assert report["failed_by_code"] == {"http_404": 2, "invalid_json_line": 1}
    assert "--retry-failed" in report["message"]
    batch.server.asked.clear()
    batch.server.behave = answer
    report = batch.run("--retry-failed", code=1)
    assert sorted(batch.server.prompts()) == ["a1", "a2"]
    assert (report["counts"]["answered"], report["counts"]["failed"]) == (3, 1)
    assert [failure["line"] for failure in batch.failures()] == [4]
    kept = Path(f"{batch.errors}.before-retry").read_bytes().splitlines()
    assert sorted(json.loads(line)["line"] for line in kept) == [2, 3, 4]
    # Deleting the error file sends its lines again too.
    batch.errors.unlink()
    assert batch.run(code=1)["counts"]["failed_now"] == 1


def test_one_cause_of_all_failures_is_named(batch):
    write(batch, 5)
    body = json.dumps({"error": {"message": "no model 'x'"}}).encode()
    batch.server.behave = lambda asked: Reply(status=404, body=body)
    report = batch.run(code=1)
    assert "All 5 of this call: http_404: no model 'x'" in report["message"]
    assert "same command" not in report["message"]


def test_a_full_disk_ends_with_a_report_and_nothing_is_lost(batch, monkeypatch):
    """The disk is full after some records; then there is room again."""
    write(batch, 20)
    written, os_write = [], os.write

    def full(descriptor, data):
        if b"batch_req_" in bytes(data[:40]) and len(written) >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(len(data))
        return os_write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr("cosched.batch.jsonl.journal.os.write", full)
        report = batch.run("--concurrency", "2", code=2)
    assert "No space left on device" in report["message"]
    assert "run the same command again" in report["message"]
    assert report["counts"]["answered"] == len(batch.answers()) < 20
    batch.run()
    assert batch.answered() == names(20)


def test_an_input_that_cannot_be_read_ends_with_one_line_of_json(batch):
    report = batch.run(code=2)
    assert report["exit_code"] == 2 and "cannot read the input" in report["message"]
    assert batch.stdout.count("\n") == 1, "no table of zeros"


def test_a_server_that_goes_for_good_is_exit_code_3(batch):
    write(batch, 40)
    batch.server.behave = lambda asked: answer(
        asked, delay_s=0 if len(batch.server.asked) <= 6 else 600
    )
    process = batch.start("--concurrency", "2", "--max-wait", "1")
    until(lambda: batch.out.exists() and len(batch.answers()) > 3)
    batch.server.stop()
    assert "--max-wait" in batch.end(process, 3)["message"]
    batch.server.start()
    batch.server.behave = answer
    batch.run()
    assert batch.answered() == names(40)


def test_a_wrong_key_fails_the_call_and_no_line(batch):
    batch.server.models_status = 401
    write(batch, 1)
    batch.run("--api-key", "wrong", code=2)
    assert "--api-key" in batch.stderr
    assert (batch.answers(), batch.failures()) == ([], [])


def test_validate_checks_all_lines_and_touches_nothing(batch):
    batch.server.stop()
    batch.write([])
    assert batch.run("--validate")["counts"]["lines"] == 0
    batch.write([line("a"), line("a"), "{", ""])
    report = batch.run("--validate", code=1)
    assert report["counts"] == {"lines": 4, "empty": 1, "valid": 1, "bad": 2}
    assert report["bad_by_code"] == {"duplicate_custom_id": 1, "invalid_json_line": 1}
    assert ":3: invalid_json" in batch.stderr
    assert [path.name for path in batch.folder.iterdir()] == ["in.jsonl"]


def test_the_input_may_not_change_while_the_job_runs(batch):
    write(batch, 10)
    changed = threading.Event()

    def behave(asked):
        changed.wait()
        return answer(asked)

    batch.server.behave = behave
    process = batch.start()
    until(lambda: len(batch.server.asked) == 10)
    with open(batch.input, "a") as file:
        file.write(json.dumps(line("late")) + "\n")
    changed.set()
    batch.end(process, 2)
    assert "was changed while the job ran" in batch.stderr


USAGE = {
    "no such input": (["-i", "/nowhere/in.jsonl"], "/nowhere/in.jsonl: No such file"),
    "a folder as input": (["-i", "/tmp"], "not a regular file"),
    "no such output folder": (["-o", "/nowhere/out.jsonl"], "cannot write /nowhere/out.jsonl"),
    "a device as output": (["-o", "/dev/null"], "cannot write /dev/null: not a regular file"),
    "no scheme": (["--base-url", "localhost:30000"], "--base-url must look like http://"),
    "a bad port": (["--base-url", "http://x:99999999"], "--base-url"),
    "no concurrency": (["--concurrency", "0"], "--concurrency must be at least 1, not 0"),
    "too much concurrency": (["--concurrency", "2000000000"], "open files"),
    "a negative wait": (["--max-wait", "-1"], "--max-wait must be at least 0, not -1"),
    "no number": (["--wait-s", "nan"], "--wait-s must be at least 0, not nan"),
    "no time": (["--timeout", "nan"], "--timeout must be above 0 seconds, not nan"),
    "no time to start": (["--start-timeout", "0"], "--start-timeout must be above 0 seconds"),
    "a port that is none": (["--port", "70000"], "--port must be from 1 to 65535, not 70000"),
    "retry and overwrite": (["--retry-failed", "--overwrite"], "give one"),
    "flags without a server": (["--", "--tp", "2"], "flags after -- (--tp 2)"),
    "a flag of run_batch after --": (["--", "--tp=2", "--port=3"], "--port after -- is set by"),
    "two servers": (["--model-path", "x"], "give one of them"),
    "the input as output": (["-o", "IN"], "input and output are the same file"),
    "no window": (["--window", "3y"], "a number and m, h or d (30m, 1h, 24h, 2d), at most 30d"),
    "an unknown option": (["--nonsense"], "--nonsense"),
}


@pytest.mark.parametrize("name", USAGE)
def test_bad_usage_is_exit_code_2_and_says_what_is_wrong(batch, name):
    options, message = USAGE[name]
    write(batch, 1)
    batch.run(*(str(batch.input) if each == "IN" else each for each in options), code=2)
    assert message in batch.stderr
    assert batch.server.asked == []


def test_a_bug_is_not_taken_for_a_finished_job(batch, monkeypatch):
    write(batch, 1)
    monkeypatch.setattr("cosched.batch.jsonl.command.run_job", lambda config: 1 // 0)
    batch.run(code=70)
    assert "ZeroDivisionError" in batch.stderr
