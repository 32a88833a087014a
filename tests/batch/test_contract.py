"""OpenAI's contract, as the `openai` client sees it; what runs lines is a stand-in."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import socket
import sqlite3
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cosched.batch.batch_records import Offer
from cosched.batch.config import BatchesConfig
from cosched.batch.prometheus import METRICS, Snapshot, exposition
from cosched.batch.rate import Rate
from tests.batch.api import Api, line, lines, serving, until
from tests.batch.stand_in import StandIn
from tests.batch.test_store import batch_of
from tests.request_lines import chat, error_of

of_256 = pytest.mark.parametrize(
    "stand_in", [{"high_watermark": 256, "low_watermark": 192}], indirect=True
)


def with_body(custom_id, **fields):
    return line(custom_id, body={"prompt": custom_id, "max_tokens": 2, **fields})


def test_a_batch_from_the_upload_to_its_results(api, stand_in):
    batch = api.create([*lines(20), line("bad", "refuse")], metadata={"project": "p"})
    assert batch.object == "batch" and batch.status == "validating"
    assert batch.expires_at - batch.created_at == 86400 and batch.completion_window == "24h"
    done = api.wait(batch)
    assert done.status == "completed" and done.metadata == {"project": "p"}
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    times = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
    assert times == sorted(times)
    others = ("failed_at", "expired_at", "cancelling_at", "cancelled_at", "errors")
    assert [getattr(done, name) for name in others] == [None] * 5
    assert (done.usage.input_tokens, done.usage.output_tokens) == (60, 40)
    assert done.usage.total_tokens == 100

    output = api.records(done.output_file_id)
    assert [record["custom_id"] for record in output] == [f"c{n}" for n in range(20)]
    for record in output:
        assert record["id"].startswith("batch_req_") and record["error"] is None
        assert record["response"]["status_code"] == 200 and record["response"]["request_id"]
    [failed] = api.records(done.error_file_id)
    assert failed["custom_id"] == "bad" and failed["response"]["status_code"] == 400
    assert error_of(failed)["message"] == "not this one" and failed["line"] == 21

    file = api.files.retrieve(done.output_file_id)
    assert file.purpose == "batch_output" and file.expires_at is None
    assert file.filename == f"{done.id}_output.jsonl"
    assert file.bytes == len(api.files.content(file.id).content)
    assert set(stand_in.asked.values()) == {1}, "each line is sent once"


def test_wrong_lines_fail_the_batch_with_their_numbers(api, stand_in):
    wrong = [
        line("a"),
        "{broken",
        line("a"),
        line("b", url="/v1/chat/completions"),
        "",
        line("c", method="GET"),
        line("", method="GET"),
    ]
    failed = api.wait(api.create(wrong))
    assert failed.status == "failed" and failed.failed_at
    assert [(fault.line, fault.code, fault.param) for fault in failed.errors.data] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_url", "url"),
        (6, "invalid_method", "method"),
        (7, "invalid_custom_id", "custom_id"),
    ]
    assert failed.request_counts.total == 0 and not stand_in.asked
    assert failed.output_file_id is None and failed.error_file_id is None


def test_a_file_without_lines_fails(api):
    for content in ([], ["", " "]):
        failed = api.wait(api.create(content))
        assert [(fault.code, fault.line) for fault in failed.errors.data] == [("empty_file", None)]


@pytest.mark.parametrize("stand_in", [{"max_lines": 5, "max_line_bytes": 200}], indirect=True)
def test_limits_of_lines(api):
    assert api.wait(api.create(lines(5))).status == "completed"
    [fault] = api.wait(api.create(lines(9))).errors.data
    assert (fault.code, fault.line) == ("too_many_lines", 6) and "5 lines" in fault.message
    [fault] = api.wait(api.create([line("a", "x" * 300)])).errors.data
    assert fault.code == "line_too_long" and "200 bytes (batches.max_line_bytes)" in fault.message


@pytest.mark.parametrize("stand_in", [{"max_file_mb": 0.001}], indirect=True)
def test_limit_of_a_file(api, folder):
    api.upload(["x" * 999])
    with pytest.raises(openai.APIStatusError, match="1000 bytes") as error:
        api.upload(["x" * 1000])
    assert error.value.status_code == 413
    with pytest.raises(openai.APIStatusError, match="1000 bytes"):
        api.upload(["x" * 3_000_000])
    # Nothing says before how much this is.
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    chunks = itertools.chain([head], itertools.repeat(b"x" * 65536, 100))
    headers = {"content-type": "multipart/form-data; boundary=b"}
    reply = httpx.post(f"{api.url}/v1/files", content=chunks, headers=headers)
    assert reply.status_code == 413
    assert len(list((folder / "files").iterdir())) == 1


def test_cancel_keeps_what_is_finished(api, stand_in):
    stand_in.num_answered = 100
    batch = api.create(lines(400))
    until(lambda: api.batches.retrieve(batch.id).request_counts.completed == 100)
    until(lambda: stand_in.num_in_flight == 300)
    cancelling = api.batches.cancel(batch.id)
    assert cancelling.status in ("cancelling", "cancelled") and cancelling.cancelling_at
    ended = api.wait(batch)
    assert ended.status == "cancelled" and ended.cancelled_at >= ended.cancelling_at
    counts = ended.request_counts
    assert (counts.completed, counts.failed) == (100, 300)
    codes = [code for code in api.outcome(ended).values() if not code.startswith("to ")]
    assert codes == ["batch_cancelled"] * counts.failed
    # The engine gets the disconnects, and works on nothing more.
    until(lambda: not stand_in.num_in_flight)
    assert stand_in.hung_up
    with pytest.raises(openai.ConflictError, match="cannot cancel a batch with status 'cancelled'"):
        api.batches.cancel(batch.id)


def test_expiry_returns_what_is_finished(api, stand_in, folder):
    stand_in.num_answered = 200
    batch = api.create(lines(300))
    until(lambda: api.batches.retrieve(batch.id).request_counts.completed == 200)
    until(lambda: stand_in.num_in_flight == 100)
    with sqlite3.connect(folder / "batches.sqlite", timeout=120) as store:
        store.execute("UPDATE batches SET expires_at = ?", (int(time.time()),))
    store.close()
    ended = api.wait(batch)
    assert ended.status == "expired" and ended.expired_at and ended.completed_at is None
    outcome = api.outcome(ended)
    assert len(outcome) == 300
    codes = [code for code in outcome.values() if not code.startswith("to ")]
    assert codes == ["batch_expired"] * 100 and ended.request_counts.failed == 100


def test_results_expire_where_that_is_asked_for(api):
    expires = {"anchor": "created_at", "seconds": 3600}
    done = api.wait(api.create(lines(1), output_expires_after=expires))
    file = api.files.retrieve(done.output_file_id)
    assert file.expires_at - file.created_at == 3600
    file = api.upload(["x"], expires_after=expires)
    assert file.expires_at - file.created_at == 3600


def test_a_window_is_the_deadline_of_the_batch_and_of_its_lines(api, stand_in):
    for window, seconds in (("30m", 1800), ("6h", 21600), ("2d", 172_800)):
        batch = api.create(lines(1, window), window=window)
        assert batch.expires_at - batch.created_at == seconds
        assert batch.completion_window == window
        api.wait(batch)
        assert seconds - 120 < stand_in.deadlines[f"{window}0"] <= seconds


WRONG = [
    ({"completion_window": "1 day"}, "completion_window must be a number and m, h or d"),
    ({"completion_window": "0h"}, "not '0h'"),
    ({"completion_window": "31d"}, "at most 30d"),
    ({"endpoint": "/v1/images"}, "Supported values are: /v1/chat/completions"),
    ({"metadata": {str(n): "" for n in range(17)}}, r"length <= 16 - at `\$\.metadata`"),
    ({"metadata": {"k" * 65: ""}}, "length <= 64 - at `key` in"),
    ({"metadata": {"k": "v" * 513}}, r"length <= 512 - at `\$\.metadata"),
    ({"metadata": {"k": 1}}, "metadata"),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 60}},
        "output_expires_after.seconds",
    ),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "anchor"),
    ({"input_file_id": "file-0"}, "no file found with id 'file-0'"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_batches_are_refused(api, changes, message):
    file = api.upload(lines(1))
    good = {
        "input_file_id": file.id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    with pytest.raises(openai.APIStatusError, match=message) as error:
        api.client.post("/batches", body=good | changes, cast_to=object)
    assert error.value.status_code in (400, 404)
    assert set(error.value.body) == {"message", "type", "param", "code"}
    assert not api.batches.list().data


def test_results_are_no_input(api):
    done = api.wait(api.create(lines(1)))
    with pytest.raises(openai.BadRequestError, match="purpose 'batch', not 'batch_output'"):
        api.start(done.output_file_id)


def test_requests_that_cannot_be_read_are_refused_with_openais_errors(api):
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch', not 'fine-tune'"):
        api.files.create(file=("f", b"x"), purpose="fine-tune")
    url = f"{api.url}/v1/files"
    replies = [
        httpx.post(f"{api.url}/v1/batches", content=b"{"),
        httpx.post(url, json={}),
        httpx.post(url, data={"purpose": "batch"}, files={"other": b"x"}),
        httpx.post(url, content=b"x", headers={"content-type": "multipart/form-data"}),
        httpx.post(url, content=b"x", headers={"content-type": "multipart/form-data; boundary=b"}),
    ]
    for reply in replies:
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["message"], reply.text
        assert error["type"] == "invalid_request_error"


def test_an_upload_that_its_client_cuts_off_is_no_error_of_the_server(api, folder, caplog):
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n"
    head += b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
    url = httpx.URL(api.url)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(head)
        time.sleep(0.2)
    assert not api.files.list().data
    time.sleep(0.2)
    until(lambda: not list((folder / "files").iterdir()))
    assert "Exception in ASGI application" not in caplog.text


def test_lists_are_paged(api):
    batches = [api.create(lines(1)) for _ in range(5)]
    page = api.batches.list(limit=2)
    assert [batch.id for batch in page.data] == [batches[4].id, batches[3].id] and page.has_more
    assert [batch.id for batch in api.batches.list(limit=2)] == [b.id for b in batches[::-1]]
    assert api.batches.list(after=batches[1].id).data[0].id == batches[0].id
    for batch in batches:
        api.wait(batch)
    inputs = [batch.input_file_id for batch in batches]
    listed = [file.id for file in api.files.list(purpose="batch", order="asc", limit=2)]
    assert listed == inputs
    assert len(list(api.files.list())) == 10
    for query in ("limit=0", "limit=x", "limit=101", "after=nothing"):
        assert httpx.get(f"{api.url}/v1/batches?{query}").status_code in (400, 404)
    assert httpx.get(f"{api.url}/v1/files?order=up").status_code == 400


def test_a_deleted_file_is_gone(api):
    done = api.wait(api.create(lines(3)))
    for name in (done.input_file_id, done.output_file_id):
        assert api.files.delete(name).deleted
        for call in (api.files.retrieve, api.files.content, api.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(name)
    assert api.batches.retrieve(done.id).status == "completed"


def test_a_key_sees_its_own_only(api):
    done = api.wait(api.create(lines(1)))
    other = Api(api.url, key="another")
    assert not other.batches.list().data and not other.files.list().data
    calls = [
        (other.batches.retrieve, done.id),
        (other.batches.cancel, done.id),
        (other.files.retrieve, done.input_file_id),
        (other.files.content, done.output_file_id),
        (other.files.delete, done.output_file_id),
    ]
    for call, name in calls:
        with pytest.raises(openai.NotFoundError):
            call(name)
    with pytest.raises(openai.NotFoundError):
        other.start(done.input_file_id)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..%2F..%2Fetc%2Fpasswd", "%00", "' OR 1=1 --", "file-"]
)
def test_names_are_only_names(api, name):
    api.upload(lines(1))
    for path in (f"/v1/files/{name}/content", f"/v1/files/{name}", f"/v1/batches/{name}"):
        assert httpx.get(api.url + path).status_code in (404, 405)


@pytest.mark.parametrize("stand_in", [{"high_watermark": 20, "low_watermark": 10}], indirect=True)
def test_no_more_lines_are_in_flight_than_the_high_watermark(api, stand_in):
    stand_in.is_held = True
    batch = api.create(lines(200))
    until(lambda: stand_in.num_in_flight == 20)
    stand_in.is_held = False
    api.wait(batch)
    assert stand_in.most_in_flight == 20


def test_few_lines_with_media_are_sent_at_a_time_and_others_pass_them(folder, clock):
    stand_in = StandIn(BatchesConfig(folder=str(folder), media_in_flight=2), clock=clock)
    run, at_server, most = stand_in.run, set(), 0

    async def counted(request, prompt):
        nonlocal most
        at_server.add(prompt)
        most = max(most, sum("image" in one for one in at_server))
        await run(request, prompt)
        at_server.discard(prompt)

    stand_in.run = counted
    stand_in.is_held = True
    job = []
    for n in range(6):
        parts = [{"type": "text", "text": f"image {n}"}, {"type": "image_url", "image_url": "a"}]
        for text, content in ((f"image {n}", parts), (f"text {n}", f"text {n}")):
            job.append(chat(text, messages=[{"role": "user", "content": content}]))
    with serving(stand_in) as url:
        api = Api(url)
        batch = api.create(job, endpoint="/v1/chat/completions")
        until(lambda: stand_in.num_in_flight == 8)
        window_s, first = 24 * 3600, set(at_server)
        clock.now_s += 10
        stand_in.is_held = False
        assert api.wait(batch).request_counts.completed == 12
    assert most == 2 and sum("text" in one for one in first) == 6
    deadlines = stand_in.deadlines
    assert all(deadlines[one] == window_s for one in first)
    assert all(s <= window_s - 10 for one, s in deadlines.items() if one not in first)


@pytest.mark.parametrize("stand_in", [{"high_watermark": 8, "low_watermark": 4}], indirect=True)
def test_batches_and_tenants_share(api, stand_in):
    stand_in.is_held = True
    first = api.create(lines(100, "first"), metadata={"tenant": "big"})
    until(lambda: stand_in.num_in_flight == 8)
    second = api.create(lines(100, "second"), metadata={"tenant": "big"})
    third = api.create(lines(20, "third"), metadata={"tenant": "small"})
    for batch in (second, third):
        api.wait(batch, "in_progress")
    stand_in.is_held = False
    for batch in (first, second, third):
        api.wait(batch)
    # While all three wait, each tenant has half.
    begins = [name.rstrip("0123456789") for name in stand_in.order[8:48]]
    assert 15 <= begins.count("third") <= 20
    assert abs(begins.count("first") - begins.count("second")) <= 12


def test_lines_with_a_common_prefix_are_sent_together(folder):
    stand_in = StandIn(BatchesConfig(folder=str(folder), high_watermark=4, low_watermark=3))
    documents = [f"document {n} " * 60 for n in range(5)]
    mixed = [line(f"{n}", documents[n % 5] + f"question {n}") for n in range(50)]
    with serving(stand_in) as url:
        api = Api(url)
        api.wait(api.create(mixed))
    order = [prompt.split()[1] for prompt in stand_in.order]
    assert sum(a != b for a, b in itertools.pairwise(order)) == 4


def test_a_batch_that_cannot_be_validated_stops_no_other(api, stand_in, monkeypatch):
    broken = api.upload(lines(1))
    files = stand_in.service.files
    read = files.open

    def open_file(name):
        if name == broken.id:
            raise OSError("the disk cannot read it")
        return read(name)

    monkeypatch.setattr(files, "open", open_file)
    first = api.start(broken.id)
    second = api.create(lines(2))
    assert api.wait(second).status == "completed"
    assert api.batches.retrieve(first.id).status == "validating"
    monkeypatch.undo()
    assert api.wait(first).status == "completed"


def test_lines_for_responses(api):
    url = "/v1/responses"
    made = [line(f"c{n}", url=url, body={"input": f"c{n}"}) for n in range(5)]
    done = api.wait(api.create(made, endpoint=url))
    assert done.status == "completed" and done.request_counts.completed == 5
    assert (done.usage.input_tokens, done.usage.output_tokens) == (15, 10)
    assert done.usage.input_tokens_details.cached_tokens == 5
    assert done.usage.output_tokens_details.reasoning_tokens == 0
    assert done.cosched == {"device_seconds": 2.5}
    body = {"input": "a", "background": True}
    [fault] = api.wait(api.create([line("a", url=url, body=body)], endpoint=url)).errors.data
    assert (fault.code, fault.param) == ("background_unsupported", "body.background")


@of_256
def test_a_small_batch_is_not_expected_before_what_is_at_the_scheduler(api, stand_in, monkeypatch):
    rate = Rate(tokens_per_s=10.0, spread=0.5, tokens_per_byte=0.25)
    monkeypatch.setattr(stand_in.service._feeder._meter, "rate", lambda: rate)
    stand_in.is_held = True
    large = api.create(lines(300))
    until(lambda: stand_in.num_in_flight == 256)
    num_tokens = api.files.retrieve(large.input_file_id).bytes * rate.tokens_per_byte
    small = api.create(lines(1, "small"))
    for batch in (small, api.batches.retrieve(small.id)):
        found = batch.cosched["finish_s"]
        assert found == pytest.approx(256 / 300 * num_tokens / rate.tokens_per_s, rel=0.01)


def take_lines_for_time(stand_in, *, line_s):
    """For the meter an answered line takes so long, and a pause as long as the result adds."""
    pause_s = [0.0]
    stand_in.service._feeder._meter._clock = lambda: (
        line_s * (stand_in.asked.total() - stand_in.num_in_flight) + pause_s[0]
    )
    return pause_s


@pytest.mark.parametrize("stand_in", [{"high_watermark": 20, "low_watermark": 10}], indirect=True)
def test_what_cannot_be_in_time_goes_first_and_its_lines_are_due_soon(api, stand_in):
    stand_in.delay_s = 0.2
    take_lines_for_time(stand_in, line_s=0.05)
    easy = api.create(lines(4000, "easy"), window="30d")
    unknown = api.batches.retrieve(easy.id).cosched
    assert unknown["state"] == "estimating" and unknown["finish_s"] is None
    until(lambda: api.batches.retrieve(easy.id).cosched["state"] == "measured")
    forecast = api.batches.retrieve(easy.id).cosched
    # 20 lines/s, and a month for 4,000.
    assert 60 < forecast["finish_s"] < 400 and not forecast["is_late"]
    assert forecast["slack_s"] > 86400 and forecast["miss_chance"] < 0.01
    hard = api.create(lines(100_000 // 25, "hard"), window="1m")
    assert hard.cosched["is_late"] and hard.cosched["miss_chance"] > 0.9
    api.wait(hard, "in_progress")
    begin = len(stand_in.order) + 20
    until(lambda: len(stand_in.order) > begin + 60)
    assert {name[:4] for name in stand_in.order[begin : begin + 60]} == {"hard"}
    assert all(stand_in.deadlines[name] <= 600 for name in stand_in.order[begin : begin + 60])
    [listed] = [batch for batch in api.batches.list() if batch.id == hard.id]
    assert listed.cosched["is_late"]
    for batch in (easy, hard):
        api.batches.cancel(batch.id)
    assert api.wait(easy).cosched is None


@pytest.mark.parametrize("stand_in", [{"high_watermark": 20, "low_watermark": 10}], indirect=True)
def test_a_pause_leaves_no_forecast_and_does_not_lower_the_measured_rate(api, stand_in):
    stand_in.num_answered = 400
    pause_s = take_lines_for_time(stand_in, line_s=0.05)
    batch = api.create(lines(2000))

    def told():
        return api.batches.retrieve(batch.id).cosched

    feeder = stand_in.service._feeder
    until(lambda: told()["state"] == "measured")
    until(lambda: api.batches.retrieve(batch.id).request_counts.completed == 400)
    stand_in.is_paused = True
    paused = told()
    assert paused == {
        "state": "paused",
        "running": paused["running"],
        "running_done": 0.0,
        "finish_s": None,
        "most_s": None,
        "slack_s": None,
        "is_late": False,
        "miss_chance": None,
    }
    until(lambda: 10 < told()["running"] <= 20)
    until(lambda: feeder._meter._last_s is None)
    before = feeder.rate.tokens_per_s
    pause_s[0] = 600.0
    stand_in.num_answered, stand_in.is_paused = 600, False
    until(lambda: api.batches.retrieve(batch.id).request_counts.completed == 600)
    until(lambda: feeder.rate.tokens_per_s != before)
    assert feeder.rate.tokens_per_s == pytest.approx(before, rel=0.2)
    assert told()["state"] == "measured" and told()["miss_chance"] == 0.0
    api.batches.cancel(batch.id)


def test_a_line_that_names_a_model_that_is_not_served_fails_alone(api, stand_in):
    stand_in.names, stand_in.adapters = ["org/m", "s3://a/b"], ["ada", "bob"]
    names = ["org/m", "default", "ada", "org/m:ada", "default:bob", "s3://a/b", "s3://a/b:ada"]
    good = [with_body(f"g{number}", model=name) for number, name in enumerate(names)]
    wrong = ["gpt-4o", "org/m:eve", "ada:org/m", "org"]
    done = api.wait(api.create([with_body(name, model=name) for name in wrong] + good))
    assert (done.status, done.request_counts.completed) == ("completed", len(good))
    failed = api.records(done.error_file_id)
    assert [(one["line"], one["custom_id"]) for one in failed] == list(enumerate(wrong, 1))
    assert {(error_of(one)["code"], error_of(one)["param"]) for one in failed} == {
        ("model_not_found", "body.model")
    }
    assert (
        "'gpt-4o' is not served here; served: ada, bob, org/m, s3://a/b"
        in (error_of(failed[0])["message"])
    )
    done = api.wait(api.create([line("none named")]))
    assert (done.status, done.request_counts.completed) == ("completed", 1)
    # SGLang answers a bare adapter name with the base model.
    asked = [name for name in stand_in.models_asked if name]
    assert sorted(asked) == sorted("org/m:ada" if name == "ada" else name for name in names)


def test_a_line_with_a_value_beyond_its_bound_fails_alone_and_is_not_sent(api, stand_in):
    wrong = with_body("wrong", top_k=2**32)
    done = api.wait(api.create([line("a"), wrong, line("b")]))
    assert done.status == "completed" and done.request_counts.completed == 2
    [record] = api.records(done.error_file_id)
    assert (record["custom_id"], record["line"]) == ("wrong", 2)
    assert error_of(record)["code"] == "invalid_value" and error_of(record)["param"] == "body.top_k"
    assert error_of(record)["message"].startswith("top_k: 4294967296 is above ")
    assert set(stand_in.asked) == {"a", "b"}


def test_a_line_that_no_json_reader_accepts_fails_alone(api, stand_in):
    text = json.dumps(line("x")).replace('"max_tokens": 2', '"max_tokens": NaN')
    odd = [text, json.dumps(line("y", "\udcff"))]
    done = api.wait(api.create([line("a"), *odd, line("b")]))
    assert (done.status, done.request_counts.completed) == ("completed", 2)
    outcome = api.outcome(done)
    assert (outcome["x"], outcome["y"]) == ("invalid_json_line", "invalid_json_line")


def test_fields_of_gateways_have_no_effect_and_are_named(api):
    file = api.upload(lines(1))
    batch = api.start(file.id, extra_body={"custom_llm_provider": "openai"})
    assert batch.cosched["ignored"] == ["custom_llm_provider"]
    done = api.wait(batch)
    assert done.status == "completed" and done.cosched["ignored"] == ["custom_llm_provider"]


def test_a_seed_without_effect_is_named(api):
    def seeded(custom_id, **more):
        one = line(custom_id)
        return one | {"body": one["body"] | {"seed": 3, **more}}

    done = api.wait(api.create([line("a"), seeded("b"), seeded("c")]))
    assert done.status == "completed" and done.cosched["ignored"] == ["body.seed"]
    greedy = api.wait(api.create([line("a"), seeded("b", temperature=0), seeded("c", top_k=1)]))
    assert greedy.status == "completed" and "ignored" not in (greedy.cosched or {})


def test_a_batch_names_its_model_and_has_an_endpoint_of_the_model(api, stand_in):
    stand_in.offer = Offer(model="m", endpoints=["/v1/completions", "/v1/score"])
    file = api.upload(lines(1))
    assert api.start(file.id).model == "m"
    with pytest.raises(openai.BadRequestError, match="/v1/completions, /v1/score") as error:
        api.start(file.id, endpoint="/chat/completions")
    assert error.value.param == "endpoint"


def test_a_batch_that_ends_before_its_lines_are_checked_says_why_it_has_no_file(api, stand_in):
    async def not_yet(batch):
        await asyncio.sleep(0.05)

    stand_in.service._feeder._validate = not_yet
    batch = api.create(lines(1))
    api.batches.cancel(batch.id)
    done = api.wait(batch)
    assert (done.status, done.error_file_id) == ("cancelled", None)
    assert [fault.code for fault in done.errors.data] == ["batch_cancelled"]


def test_files_of_other_kinds_are_refused_at_the_upload(api):
    with pytest.raises(openai.BadRequestError, match="this is a gzip file") as error:
        api.files.create(file=("in.jsonl.gz", gzip.compress(b"{}")), purpose="batch")
    assert error.value.param == "file" and not api.files.list().data


def test_routes_may_end_with_a_slash(api):
    for path in ("/v1/files/", "/v1/batches/"):
        assert httpx.get(api.url + path).status_code == 200


def test_lines_of_a_model_that_a_restart_does_not_serve_are_not_answered_by_another(folder):
    config = BatchesConfig(folder=str(folder))
    stand_in = StandIn(config)
    stand_in.is_held = True
    with serving(stand_in) as url:
        batch = Api(url).create([with_body(f"c{n}", model="m") for n in range(3)])
        Api(url).wait(batch, "in_progress")
    other = StandIn(config)
    other.names = ["n"]
    with serving(other) as url:
        outcome = Api(url).outcome(Api(url).wait(batch))
    assert outcome == dict.fromkeys(("c0", "c1", "c2"), "model_not_found")
    assert not other.asked


def test_error_lines_name_no_paths_of_the_server(api, stand_in, folder, caplog):
    own = [f"{folder}/files/file-1", f"{sys.prefix}/lib/x/y.py:17", str(Path.home() / ".cache/m")]
    own += ["/project/cpp/grammar.cc:33"]
    kept = ["/v1/chat/completions", "https://example.org/a/b.py", "and/or", "/"]
    stand_in.refusal = "cannot read " + ", ".join([*own, *kept])
    done = api.wait(api.create([line("refuse")]))
    (record,) = api.records(done.error_file_id)
    for text in (error_of(record)["message"], record["response"]["body"]["error"]["message"]):
        assert not [path for path in own if path.partition(":")[0] in text]
        assert text.count("[path]") == 4 and text.endswith(", ".join(kept))
    assert all(path in caplog.text for path in own), "the log has the paths"


def test_a_restart_keeps_the_estimate_and_a_rotated_key_its_batches(folder):
    with serving(StandIn(BatchesConfig(folder=str(folder)))) as url:
        api = Api(url, key="old")
        first = api.create(lines(20))
        assert first.cosched["state"] == "estimating"
        done = api.wait(first)
    config = BatchesConfig(folder=str(folder), owners={"team": ("old", "new")})
    stand_in = StandIn(config)
    with serving(stand_in) as url:
        api = Api(url, key="new")
        assert len(api.outcome(done)) == 20
        assert [batch.id for batch in api.batches.list()] == [done.id]
        assert not Api(url, key="other").batches.list().data
        shown = httpx.get(f"{url}/cosched/batches").json()["data"]
        assert [batch["id"] for batch in shown] == [done.id], "the operator's: of all keys"
        stand_in.is_held = True
        batch = api.create(lines(40), window="1h")
        assert (
            0 < batch.cosched["finish_s"] < batch.cosched["most_s"] < 3600
            and not batch.cosched["is_late"]
        )
        api.batches.cancel(batch.id)
        api.wait(batch)


def test_an_open_server_shows_the_same_batches_to_any_token_and_to_none(folder):
    """Also those that were made with a token while the server had a key."""
    with serving(StandIn(BatchesConfig(folder=str(folder)))) as url:
        old = Api(url, key="token").wait(Api(url, key="token").create(lines(2)))
    with serving(StandIn(BatchesConfig(folder=str(folder), isolate_keys=False))) as url:
        new = Api(url, key="none").wait(Api(url, key="none").create(lines(3)))
        shown = httpx.get(f"{url}/v1/batches").json()["data"]
        assert [batch["id"] for batch in shown] == [new.id, old.id]
        second = httpx.get(f"{url}/v1/batches", params={"after": new.id}).json()["data"]
        assert [batch["id"] for batch in second] == [old.id]
        other = Api(url, key="other")
        assert len(other.outcome(other.batches.retrieve(new.id))) == 3
        assert len(other.outcome(other.batches.retrieve(old.id))) == 2
        names = [file.id for file in other.files.list()]
        assert len(names) == 4 and other.files.list(after=names[0]).data[0].id == names[1]
        assert other.files.delete(old.output_file_id).deleted
        with pytest.raises(openai.ConflictError):  # found, but it has ended
            other.batches.cancel(new.id)


def test_a_restart_says_what_it_resumes(folder):
    config = BatchesConfig(folder=str(folder))
    stand_in = StandIn(config)
    assert stand_in.service.summary() == f"{folder}, no open batches"
    stand_in.is_held = True
    with serving(stand_in) as url:
        for num in (1, 1500):
            Api(url).wait(Api(url).create(lines(num)), "in_progress")
        assert stand_in.service.summary() == f"{folder}, resumed 2 batches with 1,501 lines to go"
        stand_in.is_held = False
    again = StandIn(config)
    told = again.service.summary()
    again.service.close()
    assert told.startswith(f"{folder}, resumed ") and told.endswith(" lines to go")


@pytest.mark.parametrize("stand_in", [{"keep_ended_days": 1e-5}], indirect=True)
def test_ended_batches_are_removed_after_the_configured_time(api, stand_in):
    done = api.wait(api.create(lines(3)))
    time.sleep(2)
    stand_in.service.store.remove_ended(kept_s=1)
    for call, name in ((api.batches.retrieve, done.id), (api.files.content, done.output_file_id)):
        with pytest.raises(openai.NotFoundError):
            call(name)


@of_256
def test_metrics_of_batches(api, stand_in):
    def told():
        reply = httpx.get(f"{api.url}/cosched/metrics")
        families = text_string_to_metric_families(reply.text)
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }

    stand_in.is_held = True
    batch = api.create([*lines(300), line("bad", "refuse")], window="1h")
    until(lambda: stand_in.num_in_flight == 256)
    found = told()
    assert found["cosched:batches", "in_progress"] == 1
    states = {
        state: found["cosched:batch_lines", batch.id, state] for state in ("waiting", "running")
    }
    assert states == {"waiting": 45, "running": 256}
    assert found["cosched:batches_lines", "waiting"] == 45
    assert 3000 < found["cosched:batch_seconds_left", batch.id] <= 3600
    stand_in.is_held = False
    api.wait(batch)
    found = told()
    assert found["cosched:batches_finished_lines_total", "answered"] == 300
    assert found["cosched:batches_finished_lines_total", "failed"] == 1
    assert found["cosched:batches_tokens_total", "input"] == 900
    assert found["cosched:batches", "completed"] == 1
    assert not [key for key in found if batch.id in key], "it has ended"


def test_labels_of_metrics_are_bounded():
    batches = tuple(
        batch_of(id=f"batch_{n}", expires_at=n, total=9, completed=1, failed=1) for n in range(1000)
    )
    none = {"outlooks": {}, "in_flight": {}, "finished": {}, "tokens_per_s": None}
    snapshot = Snapshot(now=0, num_by_status={"in_progress": 1000}, open=batches, **none)
    text = exposition(snapshot).decode()
    assert text.count("\ncosched:batch_seconds_left{") == 50
    assert 'cosched:batches_lines{state="waiting"} 7000.0' in text
    assert all(f"# TYPE {metric.shown_name} " in text for metric in METRICS)
