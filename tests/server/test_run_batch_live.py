"""run_batch against a real server: offline answers, errors per line, and a server of its own."""

from __future__ import annotations

import json
import os
import signal

import httpx
import pytest

from cosched.batch.jsonl.server import free_port
from cosched.run_batch import main as run_batch
from tests.batch.api import until
from tests.request_lines import chat, completion, error_of, line
from tests.server.conftest import is_idle, prefilled
from tests.serving import TEST_FLAGS


class Job:
    def __init__(self, folder, capsys):
        self.capsys = capsys
        self.input, self.out = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, lines):
        self.input.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def arguments(self, *options):
        return ["-i", str(self.input), "-o", str(self.out), *options]

    def run(self, *options, code=0):
        """In this process."""
        ended = run_batch(self.arguments(*options))
        shown = self.capsys.readouterr()
        assert ended == code, shown.out + shown.err
        return json.loads(shown.out.splitlines()[-1])

    def answers(self):
        return {r["custom_id"]: r for r in map(json.loads, self.out.read_text().splitlines())}

    def failures(self):
        path = self.out.with_name("out.jsonl.errors.jsonl")
        return {r["custom_id"]: r for r in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def job(tmp_path, capsys):
    return Job(tmp_path, capsys)


def test_lines_are_answered_as_offline_work(job, server):
    lines = [chat(f"chat {n}") for n in range(20)] + [completion(f"text {n}") for n in range(20)]
    job.write([*lines, completion("urgent", priority=7), completion("last", priority=-50)])
    before = prefilled(server)
    report = job.run("--base-url", server.url)
    after = prefilled(server)
    assert after["online"] == before["online"]
    assert after["offline"] > before["offline"]
    answers = job.answers()
    assert len(answers) == report["counts"]["answered"] == 42
    for custom_id, answer in answers.items():
        body = answer["response"]["body"]
        assert body["usage"]["completion_tokens"] == 4, custom_id
        assert answer["response"]["request_id"] == body["id"]
    assert report["tokens"]["completion"] == 42 * 4
    assert job.failures() == {}


def test_what_the_server_refuses_is_an_error_of_that_line(job, server):
    too_long = completion("too long", prompt=[1] * 30_000)
    no_prompt = line("no prompt", "/v1/completions", model="default")
    embedding = line("embedding", "/v1/embeddings", model="default", input="hello")
    job.write([chat("good"), too_long, no_prompt, embedding, chat("bad", temperature=-1)])
    job.run("--base-url", server.url, "--via", "lines", code=1)
    assert set(job.answers()) == {"good"}
    failures = job.failures()
    assert set(failures) == {"too long", "no prompt", "embedding", "bad"}
    beyond = failures.pop("bad")  # a bound that holds for all models: it was not sent
    assert not beyond["response"]["request_id"] and error_of(beyond)["code"] == "invalid_value"
    for failure in failures.values():
        assert failure["response"]["status_code"] in (400, 404, 422), failure
        assert error_of(failure)["message"]


def test_an_interrupted_job_frees_the_server_and_goes_on(job, server, forks, tmp_path):
    job.write([completion(f"c{n}", max_tokens=40, ignore_eos=True) for n in range(30)])
    options = ("--base-url", server.url, "--via", "lines", "--concurrency", "2")
    command = ("cosched.run_batch", *job.arguments(*options))
    process = forks.start_module(*command, log=tmp_path / "log")
    until(lambda: job.out.exists() and job.out.stat().st_size)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=120) == 130
    assert 0 < len(job.answers()) < 30
    until(lambda: is_idle(server))
    job.run(*options)
    assert len(job.answers()) == 30


@pytest.mark.server
def test_a_server_of_its_own_is_started_and_stopped(job, tiny_model, forked_own_server):
    job.write([chat(f"chat {n}") for n in range(5)])
    port = free_port()
    options = ["--model-path", str(tiny_model), "--port", str(port), "--", *TEST_FLAGS]
    report = job.run(*options)
    assert report["counts"]["answered"] == 5
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    log = job.out.parent / "out.jsonl.server.log"
    assert "/v1/chat/completions" in log.read_text()
    # The second call has nothing to do, and starts no server for it.
    log.unlink()
    job.run(*options)
    assert not log.exists()


def test_a_server_that_cannot_start_is_exit_code_3(job, tmp_path, forked_own_server):
    job.write([chat("a")])
    log = str(tmp_path / "absent" / "log")  # found before SGLang is imported
    report = job.run("--model-path", "x", "--", "--cosched-decision-log", log, code=3)
    assert "exited with code 2" in report["message"]
    assert f"cannot write --decision-log '{log}'" in report["message"]
