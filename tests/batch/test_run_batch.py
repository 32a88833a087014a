"""`run_batch` on a server that has batches: the outputs are those of lines sent one by one."""

from __future__ import annotations

import json

import httpx
import pytest

from cosched.batch.config import BatchesConfig
from cosched.batch.jsonl import remote
from cosched.batch.jsonl.batch_api import BatchApi
from cosched.run_batch import main
from tests.batch.api import Api, line, lines, serving
from tests.batch.stand_in import StandIn
from tests.request_lines import error_of


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "_POLL_S", 0.05)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


class Job:
    """Ten lines, if a test writes no others."""

    def __init__(self, folder):
        self.source, self.out = folder / "in.jsonl", folder / "out.jsonl"
        self.write(lines(10))

    def write(self, entries):
        texts = [e if isinstance(e, str) else json.dumps(e) for e in entries]
        self.source.write_text("\n".join(texts) + "\n")

    def run(self, url, *options):
        files = ("-i", str(self.source), "-o", str(self.out))
        return main([*files, "--base-url", url, "--api-key", "key", *options])

    def ask(self, command, capsys):
        code = main([command, "-o", str(self.out), "--api-key", "key"])
        shown = capsys.readouterr().out
        assert "…" not in shown, "an id is cut off"
        return code, json.loads(shown.splitlines()[-1])

    def outcome(self):
        """Line -> custom_id, and text or code, from both files."""
        found = {}
        for path in (self.out, self.out.with_name("out.jsonl.errors.jsonl")):
            for text in path.read_text().splitlines():
                record = json.loads(text)
                is_answer = "line" not in record
                number = int(record["id"][-8:], 16)
                assert number not in found, "a line has two records"
                body = record["response"]["body"] if is_answer else None
                told = body["choices"][0]["text"] if body else error_of(record)["code"]
                found[number] = (record["custom_id"], told)
        return found


ANSWERED = {n + 1: (f"c{n}", f"to c{n}") for n in range(10)}


def test_outputs_are_those_of_lines_sent_one_by_one(api, job, folder):
    job.write([line("a"), "", "{broken", line("bad", "refuse"), line("a", "again"), line("b")])
    assert job.run(api.url) == 1
    assert job.outcome() == {
        1: ("a", "to a"),
        3: (None, "invalid_json_line"),
        4: ("bad", "http_400"),
        5: ("a", "duplicate_custom_id"),
        6: ("b", "to b"),
    }
    [batch] = api.batches.list().data
    assert batch.request_counts.total == 3
    # What was uploaded is taken away again, and so are the results.
    assert not api.files.list().data and not list((folder / "files").iterdir())


def test_the_progress_says_how_many_lines_the_server_works_on(api, job, stand_in, capsys):
    stand_in.delay_s = 0.5
    assert job.run(api.url, "--progress-every", "0.01") == 0
    assert "0/10 lines (0.0%), 10 in flight" in capsys.readouterr().err


def test_endpoints_become_batches_of_their_own(api, job):
    job.write([line("a"), line("r", url="/v1/responses", body={"input": "x"}), line("b")])
    assert job.run(api.url) == 0
    batches = api.batches.list().data
    assert sorted(batch.endpoint for batch in batches) == ["/v1/completions", "/v1/responses"]
    records = [json.loads(text) for text in job.out.read_text().splitlines()]
    assert {record["custom_id"]: int(record["id"][-8:], 16) for record in records} == {
        "a": 1,
        "r": 2,
        "b": 3,
    }


def test_detach_status_fetch(api, job, stand_in, capsys):
    stand_in.is_held = True
    assert job.run(api.url, "--detach", "--window", "6h") == 0
    [batch] = api.batches.list().data
    assert batch.completion_window == "6h"
    api.wait(batch, "in_progress")
    code, told = job.ask("status", capsys)
    assert code == 4 and told["batches"][0]["status"] == "in_progress"
    assert job.ask("fetch", capsys)[0] == 4 and not job.out.read_text()
    stand_in.is_held = False
    api.wait(batch)
    assert job.ask("fetch", capsys)[0] == 0
    assert job.outcome() == ANSWERED
    code, told = job.ask("status", capsys)
    assert code == 0 and told["batches"][0]["is_fetched"]
    # Nothing is left to do, nor done again.
    assert job.run(api.url) == 0 and len(api.batches.list().data) == 1
    assert set(stand_in.asked.values()) == {1}


def test_cancel_keeps_what_is_answered_and_the_rest_can_be_sent_again(api, job, stand_in, capsys):
    stand_in.is_held = True
    job.run(api.url, "--detach")
    [batch] = api.batches.list().data
    api.wait(batch, "in_progress")
    job.ask("cancel", capsys)
    assert api.wait(batch).status == "cancelled"
    assert job.ask("fetch", capsys)[0] == 1
    assert {code for _, code in job.outcome().values()} == {"batch_cancelled"}
    stand_in.is_held = False
    assert job.run(api.url, "--retry-failed") == 0
    assert job.outcome() == ANSWERED


def test_a_batch_that_was_made_just_before_the_end_is_not_made_again(api, job, stand_in):
    stand_in.is_held = True
    job.run(api.url, "--detach")
    # Killed between the server's answer and the note of it.
    path = job.out.with_name("out.jsonl.batches.json")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "open": []}))
    stand_in.is_held = False
    assert job.run(api.url) == 0
    assert len(api.batches.list().data) == 1 and job.outcome() == ANSWERED


def test_results_that_were_written_in_part_are_completed(api, job, monkeypatch):
    whole = BatchApi.for_each_line

    async def half(self, file_id, handle):
        found = []
        await whole(self, file_id, found.append)
        for data in found[:5]:
            handle(data)
        raise RuntimeError("here it is killed")

    monkeypatch.setattr(BatchApi, "for_each_line", half)
    assert job.run(api.url) == 70 and len(job.outcome()) == 5
    with job.out.open("a") as out:
        out.write('{"id": "batch_req_')
    monkeypatch.setattr(BatchApi, "for_each_line", whole)
    assert job.run(api.url) == 0
    assert job.outcome() == ANSWERED and len(api.batches.list().data) == 1


def test_a_batch_that_the_server_has_lost_is_sent_again(api, job, stand_in, capsys):
    job.run(api.url, "--detach")
    api.wait(api.batches.list().data[0])
    stand_in.service.store.remove_ended(kept_s=-2)
    assert not api.batches.list().data
    assert job.run(api.url) == 0 and job.outcome() == ANSWERED
    assert "has lost batch" in capsys.readouterr().err


def test_overwrite_cancels_the_batches_of_the_earlier_job(api, job, stand_in):
    stand_in.is_held = True
    job.write([line(f"old{n}") for n in range(10)])
    job.run(api.url, "--detach")
    [old] = api.batches.list().data
    api.wait(old, "in_progress")
    job.write(lines(10))
    job.run(api.url, "--detach", "--overwrite")
    assert api.wait(old).status == "cancelled"
    stand_in.is_held = False
    assert job.run(api.url) == 0 and job.outcome() == ANSWERED
    names = [file.filename for file in api.files.list()]
    assert names == [f"{old.id}_error.jsonl"], "written after it was cancelled"


def test_overwrite_needs_no_server_of_the_earlier_job(api, job, capsys):
    job.run(api.url, "--detach")
    manifest = job.out.with_name("out.jsonl.batches.json")
    manifest.write_text(manifest.read_text().replace(api.url, "http://127.0.0.1:1"))
    assert job.run(api.url, "--overwrite") == 0 and job.outcome() == ANSWERED
    assert "cannot cancel the batches of the earlier job" in capsys.readouterr().err


def test_results_that_are_gone_are_sent_again(api, job, stand_in, capsys):
    """Somebody has deleted them, or they have expired: the job must not fail at every call."""
    job.run(api.url, "--detach")
    batch = api.wait(api.batches.list().data[0])
    api.files.delete(batch.output_file_id)
    assert job.run(api.url) == 0 and job.outcome() == ANSWERED
    assert "are gone" in capsys.readouterr().err


def test_a_download_gives_up_after_max_wait(api, job, monkeypatch, capsys):
    """As any other call: the server answers status requests and fails each download."""
    job.run(api.url, "--detach")
    api.wait(api.batches.list().data[0])

    def fail(self, *arguments, **options):
        raise httpx.ConnectError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(httpx.AsyncClient, "stream", fail)
        assert job.run(api.url, "--max-wait", "0.2") == 3
    assert "answered nothing for 0.2 s" in capsys.readouterr().err
    assert job.run(api.url) == 0 and job.outcome() == ANSWERED


def test_lines_one_by_one_where_that_is_asked_for_or_there_are_no_batches(job, folder):
    stand_in = StandIn(BatchesConfig(folder=str(folder)))
    job.write([line("a"), line("b")])
    with serving(stand_in) as url:
        # The stand-in takes lines from its own feeder only.
        assert job.run(url, "--via", "lines", "--retries", "0") == 1
        assert not Api(url).batches.list().data
    assert not job.out.with_name("out.jsonl.batches.json").exists()


def test_what_the_server_refuses_is_told(job, folder, capsys):
    with serving(StandIn(BatchesConfig(folder=str(folder), max_lines=5))) as url:
        assert job.run(url) == 3
        assert "a batch may have 5 lines (batches.max_lines)" in capsys.readouterr().err
        assert not job.out.read_text()
        assert not Api(url).files.list().data, "no other client would delete it"


def test_a_wrong_window_is_refused_and_the_next_call_may_have_another(api, job, capsys):
    with pytest.raises(SystemExit, match="2"):
        job.run(api.url, "--window", "24x")
    assert "completion_window must be" in capsys.readouterr().err
    assert not api.files.list().data and not api.batches.list().data
    assert job.run(api.url, "--window", "30m") == 0
    assert job.outcome() == ANSWERED
    assert [batch.completion_window for batch in api.batches.list()] == ["30m"]


def test_lines_that_are_sent_again_have_the_window_of_their_call(api, job, stand_in, capsys):
    stand_in.is_held = True
    job.write([line("a")])
    job.run(api.url, "--detach", "--window", "30m")
    for options in ((), ("--window", "2d")):
        [batch] = api.batches.list(limit=1).data
        api.wait(batch, "in_progress")
        job.ask("cancel", capsys)
        api.wait(batch)
        code, told = job.ask("fetch", capsys)
        assert code == 1 and told["config"]["base_url"] == api.url
        job.run(api.url, "--detach", "--retry-failed", *options)
    assert [batch.completion_window for batch in api.batches.list()] == ["2d", "30m", "30m"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--detach", "--via", "lines"), "--detach needs batches of the server"),
        (("--detach", "--ordered"), "--detach and --ordered"),
        (("--via", "batches", "--ordered"), "--via batches and --ordered"),
    ],
)
def test_options_that_do_not_go_together(job, capsys, options, message):
    job.write([line("a")])
    assert job.run("http://127.0.0.1:1", *options) == 2
    assert message in capsys.readouterr().err


def test_there_must_be_a_job_to_ask_for(job, capsys):
    for command in ("status", "cancel", "fetch"):
        assert main([command, "-o", str(job.out)]) == 2
        assert "no job at" in capsys.readouterr().err
