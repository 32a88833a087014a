"""run_batch as its users call it, against a server that answers or misbehaves."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest

from cosched.batch.jsonl.server import free_port
from cosched.run_batch import main


def ids(records):
    return [record["custom_id"] for record in records]


def wait_for(condition, within_s=20.0):
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "nothing happened"
        time.sleep(0.01)


def test_every_line_is_answered(batch, tools):
    batch.write([tools.completion(f"a{n}") for n in range(50)])
    report = batch.run()
    assert sorted(ids(batch.answers())) == sorted(f"a{n}" for n in range(50))
    assert batch.failures() == []
    for answer in batch.answers():
        assert answer["response"]["body"]["choices"][0]["text"] == f"to {answer['custom_id']}"
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
    assert report["counts"] == {
        "lines": 50, "empty": 0, "answered": 50, "failed": 0, "answered_now": 50, "failed_now": 0,
    }  # fmt: skip
    assert report["tokens"] == {"prompt": 150, "completion": 100}
    assert all(asked.body["service_tier"] == "flex" for asked in batch.server.asked)


def test_rows_of_a_parquet_file_are_lines(batch, tools):
    pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow (cosched[parquet])")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [tools.completion(f"a{n}") for n in range(50)]
    rows[20]["custom_id"] = "a7"
    parquet.write_table(pa.Table.from_pylist(rows), batch.input, row_group_size=7)
    batch.run(code=1)
    assert sorted(ids(batch.answers())) == sorted(f"a{n}" for n in range(50) if n != 20)
    assert [(one["line"], one["error"]["code"]) for one in batch.failures()] == [
        (21, "duplicate_custom_id")
    ]
    assert batch.run(code=1)["counts"]["answered_now"] == 0


def test_good_and_bad_lines_end_in_their_files(batch, tools):
    long = tools.completion("long", prompt="x" * 3000)
    batch.write(
        [
            tools.completion("a"),
            "",
            "{broken",
            tools.completion("a"),
            b"\xff\xfe",
            long,
            "   ",
            tools.completion("refused"),
            tools.completion("b") | {"url": "/v1/nothing"},
            tools.completion("c", stream=True),
            tools.completion("ü"),
        ]
    )
    refusal = tools.Reply(status=400, body=b'{"message": "bad prompt"}')
    batch.server.behave = lambda asked: (
        refusal if asked.body["prompt"] == "refused" else tools.answer(asked)
    )
    report = batch.run("--max-line-bytes", "1000", code=1)
    assert sorted(ids(batch.answers())) == ["a", "ü"]
    found = {r["line"]: (r["custom_id"], r["error"]["code"]) for r in batch.failures()}
    assert found == {
        3: (None, "invalid_json"),
        4: ("a", "duplicate_custom_id"),
        5: (None, "invalid_encoding"),
        6: (None, "line_too_long"),
        8: ("refused", "http_400"),
        9: ("b", "invalid_url"),
        10: ("c", "stream_unsupported"),
    }
    assert all(r["error"]["line"] == r["line"] for r in batch.failures())
    assert (report["counts"]["empty"], report["counts"]["failed"]) == (2, 7)
    assert str(batch.errors) in batch.stderr


def test_an_empty_input_is_done_at_once_and_needs_no_server(batch):
    batch.server.stop()
    batch.write([])
    assert batch.run()["counts"]["lines"] == 0


def test_a_finished_job_is_not_run_again(batch, tools):
    batch.write([tools.completion(f"a{n}") for n in range(20)] + ["bad"])
    batch.run(code=1)
    before = batch.out.read_bytes(), batch.errors.read_bytes()
    batch.server.stop()
    report = batch.run("--max-wait", "1", code=1)
    assert (batch.out.read_bytes(), batch.errors.read_bytes()) == before
    assert (report["counts"]["answered"], report["counts"]["answered_now"]) == (20, 0)


def test_deleting_the_error_file_sends_the_failed_lines_again(batch, tools):
    batch.write([tools.completion(f"a{n}") for n in range(20)])
    batch.server.behave = lambda asked: (
        tools.Reply(status=400) if asked.body["prompt"] in ("a3", "a7") else tools.answer(asked)
    )
    batch.run(code=1)
    batch.errors.unlink()
    batch.server.behave = tools.answer
    assert batch.run()["counts"]["answered_now"] == 2
    assert sorted(ids(batch.answers())) == sorted(f"a{n}" for n in range(20))


def test_ordered_answers_come_in_the_order_of_the_input(batch, tools):
    batch.write([tools.completion(f"a{n}") for n in range(60)])
    batch.server.behave = lambda asked: tools.answer(
        asked, delay_s=0.3 if asked.body["prompt"] in ("a0", "a31") else 0.0
    )
    batch.run("--ordered", "--concurrency", "4")
    assert ids(batch.answers()) == [f"a{n}" for n in range(60)]
    # While a0 was slow, no more than its window was answered.
    assert batch.server.prompts().index("a16") >= 16


def test_an_ordered_job_resumes_in_order(batch, tools):
    batch.write([tools.completion(f"a{n}") for n in range(60)])
    batch.server.behave = lambda asked: tools.answer(asked, delay_s=0.05)
    process = batch.start("--ordered", "--concurrency", "4")
    wait_for(lambda: batch.out.exists() and len(batch.answers()) > 10)
    process.kill()
    process.communicate()
    batch.run("--ordered", "--concurrency", "4")
    assert ids(batch.answers()) == [f"a{n}" for n in range(60)]


def test_no_more_requests_are_sent_at_a_time_than_allowed(batch, tools):
    batch.write([tools.completion(f"a{n}") for n in range(40)])
    batch.server.behave = lambda asked: tools.answer(asked, delay_s=0.05)
    batch.run("--concurrency", "7")
    assert batch.server.max_waiting == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_says_how_to_resume_and_does(batch, tools, number):
    batch.write([tools.completion(f"a{n}") for n in range(40)])
    slow = [True]
    batch.server.behave = lambda asked: tools.answer(
        asked, delay_s=60 if slow and asked.body["prompt"] >= "a2" else 0
    )
    process = batch.start("--concurrency", "40")
    wait_for(lambda: len(batch.server.asked) == 40 and batch.out.stat().st_size)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "run the same command again" in stderr
    assert json.loads(stdout.splitlines()[-1])["exit_code"] == 130
    wait_for(lambda: batch.server.num_waiting == 0)  # it saw the requests being given up
    slow.clear()
    answered = len(batch.answers())
    assert 0 < answered < 40
    assert batch.run()["counts"]["answered_now"] == 40 - answered
    assert sorted(ids(batch.answers())) == sorted(f"a{n}" for n in range(40))


def test_a_server_that_restarts_and_misbehaves_costs_no_line(batch, tools):
    names = [f"a{n}" for n in range(300)]
    batch.write([tools.completion(name) for name in names])
    faults = [
        tools.Reply(status=503),
        tools.Reply(status=429),
        tools.Reply(body=b"{}" * 500, cut_at=700),
        tools.Reply(cut_at=0),
        tools.Reply(status=500),
    ]

    def behave(asked):
        kind = int(asked.body["prompt"][1:]) % 7
        if asked.nth == 1 and kind < len(faults):
            return faults[kind]
        return tools.answer(asked, delay_s=0.05)

    batch.server.behave = behave
    process = batch.start("--concurrency", "20")
    for _ in range(2):
        wait_for(lambda: batch.server.num_waiting > 5)
        batch.server.stop()
        time.sleep(0.3)
        batch.server.start()
    assert process.wait(timeout=60) == 0
    assert sorted(ids(batch.answers())) == sorted(names)
    assert batch.failures() == []


def test_a_server_that_never_comes_is_exit_code_3(batch, tools):
    batch.server.stop()
    batch.write([tools.completion("a")])
    report = batch.run("--max-wait", "0.5", code=3)
    assert "not ready after 0.5 s" in report["message"]
    batch.server.start()
    batch.run()
    assert ids(batch.answers()) == ["a"]


def test_a_port_without_a_listener_is_reported_in_seconds(batch, tools):
    batch.server.stop()
    batch.write([tools.completion("a")])
    report = batch.run("--wait-s", "0.3", code=3)  # and not the ten minutes of --max-wait
    assert f"no server at {batch.server.base_url}" in report["message"]
    assert "--wait-s" in report["message"]
    assert report["counts"]["lines"] == 1


def test_another_program_is_refused_and_not_waited_for(batch, tools):
    batch.server.health_status = batch.server.models_status = 404
    batch.write([tools.completion("a")])
    report = batch.run(code=3)
    assert "does not serve these requests" in report["message"]
    assert "again" not in report["message"]
    assert (batch.answers(), batch.failures()) == ([], [])


@pytest.mark.parametrize("state", [None, {"policy": "sglang"}])
def test_a_server_that_knows_no_offline_requests_is_warned_of_or_refused(batch, tools, state):
    batch.server.state = state
    batch.write([tools.completion("a")])
    report = batch.run("--require-offline", code=3)
    assert "does not know offline requests" in report["message"]
    assert batch.server.asked == []
    batch.run()
    assert batch.stderr.count("WARNING") == 1
    assert ids(batch.answers()) == ["a"]


@pytest.mark.parametrize("policy", ["hygen", "priority"])
def test_a_server_that_knows_them_is_not_warned_of(batch, tools, policy):
    batch.server.state = {"policy": policy}
    batch.write([tools.completion("a")])
    batch.run("--require-offline")
    assert "WARNING" not in batch.stderr


def test_failed_lines_are_sent_again_when_asked_for(batch, tools):
    batch.write([tools.completion("a"), tools.completion("b"), tools.completion("c"), "{"])
    batch.server.behave = lambda asked: (
        tools.answer(asked) if asked.body["prompt"] == "a" else tools.Reply(status=404)
    )
    report = batch.run(code=1)
    assert report["failed_by_code"] == {"http_404": 2, "invalid_json": 1}
    assert "--retry-failed" in report["message"]
    batch.server.asked.clear()
    batch.server.behave = tools.answer
    report = batch.run("--retry-failed", code=1)
    assert sorted(batch.server.prompts()) == ["b", "c"]
    assert (report["counts"]["answered"], report["counts"]["failed"]) == (3, 1)
    assert [failure["line"] for failure in batch.failures()] == [4]
    kept = Path(f"{batch.errors}.before-retry").read_bytes().splitlines()
    assert sorted(json.loads(line)["line"] for line in kept) == [2, 3, 4]


def test_there_must_be_an_earlier_job_to_retry(batch, tools):
    batch.write([tools.completion("a")])
    report = batch.run("--retry-failed", code=2)
    assert "there is no earlier job" in report["message"]
    batch.run()
    assert ids(batch.answers()) == ["a"]


def test_one_cause_of_all_failures_is_named(batch, tools):
    batch.write([tools.completion(f"a{n}") for n in range(5)])
    body = json.dumps({"error": {"message": "no model 'x'"}}).encode()
    batch.server.behave = lambda asked: tools.Reply(status=404, body=body)
    report = batch.run(code=1)
    assert "All 5 of this call: http_404: no model 'x'" in report["message"]
    assert "same command" not in report["message"]


def test_a_full_disk_ends_with_a_report_and_nothing_is_lost(batch, tools, monkeypatch, capsys):
    """The disk is full after some records; then there is room again."""
    batch.write([tools.completion(f"a{n}") for n in range(20)])
    written, write = [], os.write

    def full(descriptor, data):
        if b"batch_req_" in bytes(data[:40]) and len(written) >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(len(data))
        return write(descriptor, data)

    options = ["-i", str(batch.input), "-o", str(batch.out), "--base-url", batch.server.base_url]
    with monkeypatch.context() as patch:
        patch.setattr("cosched.batch.jsonl.journal.os.write", full)
        assert main([*options, "--concurrency", "2"]) == 2
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "No space left on device" in report["message"]
    assert "run the same command again" in report["message"]
    assert report["counts"]["answered"] == len(batch.answers()) < 20
    batch.run()
    assert sorted(ids(batch.answers())) == sorted(f"a{n}" for n in range(20))


def test_an_input_that_cannot_be_read_ends_with_a_report(batch):
    report = batch.run(code=2)
    assert report["exit_code"] == 2 and "cannot read the input" in report["message"]


@pytest.mark.parametrize("fault", ["no input", "no server"])
def test_a_call_that_has_no_answer_prints_no_table_of_zeros(batch, tools, capsys, fault):
    if fault == "no server":
        batch.write([tools.completion("a")])
    before = signal.getsignal(signal.SIGTERM)
    server = ["--base-url", f"http://127.0.0.1:{free_port()}"]
    code = main(["-i", str(batch.input), "-o", str(batch.out), *server])
    signal.signal(signal.SIGTERM, before)
    shown = capsys.readouterr()
    assert code == {"no input": 2, "no server": 3}[fault]
    assert shown.out.count("\n") == 1 and json.loads(shown.out)["exit_code"] == code


def test_a_server_that_goes_for_good_is_exit_code_3(batch, tools):
    batch.write([tools.completion(f"a{n}") for n in range(40)])
    batch.server.behave = lambda asked: tools.answer(asked, delay_s=0.2)
    process = batch.start("--concurrency", "2", "--max-wait", "1")
    wait_for(lambda: batch.out.exists() and len(batch.answers()) > 3)
    batch.server.stop()
    stdout, _ = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "--max-wait" in json.loads(stdout.splitlines()[-1])["message"]
    batch.server.start()
    batch.server.behave = tools.answer
    batch.run()
    assert sorted(ids(batch.answers())) == sorted(f"a{n}" for n in range(40))


def test_a_wrong_key_fails_the_call_and_no_line(batch, tools):
    batch.server.models_status = 401
    batch.write([tools.completion("a")])
    batch.run("--api-key", "wrong", code=2)
    assert "--api-key" in batch.stderr
    assert (batch.answers(), batch.failures()) == ([], [])


def test_validate_checks_all_lines_and_touches_nothing(batch, tools):
    batch.server.stop()
    batch.write([tools.completion("a"), tools.completion("a"), "{", ""])
    report = batch.run("--validate", code=1)
    assert report["counts"] == {"lines": 4, "empty": 1, "valid": 1, "bad": 2}
    assert report["bad_by_code"] == {"duplicate_custom_id": 1, "invalid_json": 1}
    assert ":3: invalid_json" in batch.stderr
    assert [path.name for path in batch.folder.iterdir()] == ["in.jsonl"]


def test_the_input_may_not_change_while_the_job_runs(batch, tools):
    batch.write([tools.completion(f"a{n}") for n in range(10)])
    batch.server.behave = lambda asked: tools.answer(asked, delay_s=0.5)
    process = batch.start()
    wait_for(lambda: len(batch.server.asked) == 10)
    with open(batch.input, "a") as file:
        file.write(json.dumps(tools.completion("late")) + "\n")
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "was changed while the job ran" in stderr


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
    "two servers": (["--model-path", "x"], "give one of them"),
    "the input as output": (["-o", "IN"], "input and output are the same file"),
    "no window": (
        ["--window", "3y"],
        "a number and m, h or d (30m, 1h, 24h, 2d), at most 30d, not",
    ),
    "an unknown option": (["--nonsense"], "--nonsense"),
}


@pytest.fixture
def call(capsys):
    """Call run_batch in this process; its exit code and what it says on stderr."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", USAGE)
def test_bad_usage_is_exit_code_2_and_says_what_is_wrong(batch, tools, call, name):
    options, message = USAGE[name]
    batch.write([tools.completion("a")])
    options = [batch.input if option == "IN" else option for option in options]
    server = ["--base-url", batch.server.base_url]
    code, stderr = call("-i", batch.input, "-o", batch.out, *server, *options)
    assert (code, message in stderr) == (2, True), stderr
    assert batch.server.asked == []


def test_flags_that_run_batch_sets_itself_are_refused(batch, tools, call):
    batch.write([tools.completion("a")])
    command = ["-i", batch.input, "-o", batch.out, "--model-path", "/nowhere/model"]
    code, stderr = call(*command, "--", "--tp=2", "--port=3")
    assert code == 2
    assert "--port after -- is set by run_batch itself" in stderr


def test_a_bug_is_not_taken_for_a_finished_job(batch, tools, call, monkeypatch):
    batch.write([tools.completion("a")])
    monkeypatch.setattr("cosched.batch.jsonl.command.run_job", lambda config: 1 // 0)
    code, stderr = call("-i", batch.input, "-o", batch.out)
    assert code == 70
    assert "ZeroDivisionError" in stderr
