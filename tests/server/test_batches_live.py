"""Files and Batches on a real server, with the `openai` client; chats are answered beside them."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from cosched.run_batch import main as run_batch
from tests.batch.api import Api, until
from tests.batch.kills import RealServer, run
from tests.request_lines import chat, completion, error_of, line
from tests.serving import start_server

KEY, ADMIN_KEY = "secret", "operator"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
SCORE = "/v1/score"


@pytest.fixture(scope="module")
def server(tiny_model, forks, tmp_path_factory):
    """With keys for clients and for operators; clients send no offline work of their own."""
    folder = tmp_path_factory.mktemp("batches")
    claims = '{"ignore": ["service_tier", "priority"], "keys": {"*": {"max_offline": 1}}}'
    flags = ("--cosched-policy", "sarathi", "--cosched-batches", str(folder))
    flags += ("--api-key", KEY, "--admin-api-key", ADMIN_KEY)
    flags += ("--cosched-claims", claims, "--enable-response-store", "--served-model-name", "demo")
    with start_server(tiny_model, *flags, forks=forks) as server:
        yield server


@pytest.fixture
def api(server):
    return Api(server.url, key=KEY)


def state_of(server):
    return server.states(KEY)[0]


def test_chats_are_answered_while_a_batch_is(api, server):
    before = state_of(server)
    batch = api.create([chat(f"c{n}", max_tokens=40) for n in range(150)], endpoint=CHAT)
    api.wait(batch, "in_progress")
    reply = api.client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "hi"}], max_tokens=4
    )
    assert reply.usage.completion_tokens == 4
    assert api.batches.retrieve(batch.id).status == "in_progress"
    done = api.wait(batch)
    assert done.status == "completed" and done.request_counts.completed == 150
    records = api.records(done.output_file_id)
    assert [record["custom_id"] for record in records] == [f"c{n}" for n in range(150)]
    assert {record["response"]["body"]["service_tier"] for record in records} == {"flex"}
    assert done.usage.output_tokens == 6000
    # Only the chat was online, whatever signs the operator ignores.
    after = state_of(server)
    online = after["online_prefill_tokens"] - before["online_prefill_tokens"]
    offline = after["offline_prefill_tokens"] - before["offline_prefill_tokens"]
    assert 0 < online < 50 < offline


OWN = {"cosched": {"ttft_slo_ms": 1e-9, "tpot_slo_ms": 1e-9, "deadline_s": 1e-9}}
SIGNS = (
    {"priority": 2**31 - 1},
    {"priority": 5, "custom_params": OWN},
    {"service_tier": "auto", "custom_params": OWN},
    {"custom_params": {"cosched": {}, "cosched_class": "online", "own": True}},
    {"state": {"own": True}, "scope": {"state": {"own": True}}},
)


def test_lines_are_offline_whatever_they_say(api, server):
    before = state_of(server)["online_prefill_tokens"]
    lines = [chat(f"c{number}", **signs) for number, signs in enumerate(SIGNS)]
    lines.append(chat("header") | {"headers": {"x-smg-priority": "system"}})
    done = api.wait(api.create(lines, endpoint=CHAT))
    records = api.records(done.output_file_id)
    assert records and {r["response"]["body"]["service_tier"] for r in records} == {"flex"}
    assert state_of(server)["online_prefill_tokens"] == before


def test_what_is_sent_twice_with_a_key_is_done_once(api):
    once = {"extra_headers": {"Idempotency-Key": "nightly"}}
    files = [api.upload([chat("a")], **once).id for _ in range(2)]
    done = api.wait(api.start(files[0], endpoint=CHAT, **once))
    again = api.start(files[1], endpoint=CHAT, **once)
    assert files[0] == files[1] and (again.id, again.status) == (done.id, "completed")
    with pytest.raises(openai.UnprocessableEntityError, match="'nightly'"):
        api.upload([chat("b")], **once)


def test_keys_come_in_anthropics_header_too(server):
    params = {"model": "default", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    batch = {"requests": [{"custom_id": "a", "params": params}]}
    for path, body in (("/v1/messages", params), ("/v1/messages/batches", batch)):
        for key, status in ((KEY, 200), ("wrong", 401)):
            headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
            reply = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
            assert reply.status_code == status, reply.text
            if status == 401:
                assert reply.json()["error"]["type"] == "authentication_error", reply.text


@pytest.mark.parametrize(("priority", "granted"), [("5", "offline"), ("-5", "online")])
def test_the_priority_of_a_gateway_before_vllm(api, priority, granted):
    reply = api.client.chat.completions.with_raw_response.create(
        model="default",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=2,
        extra_headers={"X-Vllm-Priority": priority},
    )
    assert reply.headers["x-cosched-class"] == granted


def test_lines_that_the_server_refuses_are_errors(api):
    lines = [
        chat("good"),
        chat("hot", temperature=-1),
        chat("long", messages=[{"role": "user", "content": "word " * 30_000}]),
        chat("late", custom_params={"cosched": {"deadline_s": "soon"}}),
    ]
    done = api.wait(api.create(lines, endpoint=CHAT))
    assert done.status == "completed" and done.request_counts.failed == 3
    assert [r["custom_id"] for r in api.records(done.output_file_id)] == ["good"]
    failed = {r["custom_id"]: r for r in api.records(done.error_file_id)}
    assert failed.keys() == {"hot", "long", "late"}
    for name in ("long", "late"):
        assert failed[name]["response"]["status_code"] == 400 and error_of(failed[name])["message"]
    assert not failed["hot"]["response"]["request_id"]  # beyond a bound: it was not sent
    assert error_of(failed["hot"])["code"] == "invalid_value"
    assert "temperature" in error_of(failed["hot"])["message"]
    assert "deadline_s" in error_of(failed["late"])["message"]


def test_cancel_frees_the_engine(api, server):
    lines = [completion(f"c{n}", max_tokens=400, ignore_eos=True) for n in range(150)]
    batch = api.create(lines, endpoint="/v1/completions")
    until(lambda: state_of(server)["num_running_offline"])
    api.batches.cancel(batch.id)
    ended = api.wait(batch)
    assert ended.status == "cancelled" and ended.request_counts.failed > 0
    assert len(api.records(ended.error_file_id)) == ended.request_counts.failed
    until(lambda: not any(state_of(server)[f"num_{at}_offline"] for at in ("waiting", "running")))


def operator(server, method, path, **body):
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "accept": "application/json"}
    options = {"json": body} if method == "POST" else {}
    reply = httpx.request(method, server.url + path, headers=headers, timeout=120, **options)
    assert reply.is_success, reply.text
    return reply


def replica(server):
    return operator(server, "GET", "/cosched").json()["replicas"][0]


def test_a_pause_by_the_operator_is_the_forecast_and_cancelled_lines_are_not_failures(api, server):
    before = replica(server)
    operator(server, "POST", "/cosched/offline", paused=True)
    try:
        batch = api.create([chat(f"c{n}") for n in range(30)], endpoint=CHAT)
        until(lambda: replica(server)["num_waiting_offline"] == 30)
        told = api.batches.retrieve(batch.id).model_extra["cosched"]
        assert (told["state"], told["finish_s"], told["miss_chance"]) == ("paused", None, None)
        assert told["running"] == 30, "at the scheduler"
        api.batches.cancel(batch.id)
        assert api.wait(batch).status == "cancelled"
        until(lambda: replica(server)["num_waiting_offline"] == 0)
    finally:
        operator(server, "POST", "/cosched/offline")
    after = replica(server)
    for name in ("num_aborted_offline", "num_cancelled_offline"):
        assert after[name] - before[name] == 30


def test_a_wrong_model_fails_its_line(api):
    lines = [chat("good", model="demo"), chat("bad", model="gpt-4o"), chat("also good")]
    done = api.wait(api.create(lines, endpoint=CHAT))
    assert (done.status, done.request_counts.completed) == ("completed", 2)
    [failed] = api.records(done.error_file_id)
    assert (failed["line"], error_of(failed)["code"]) == (2, "model_not_found")


def test_scores_are_answered(api, server):
    before = state_of(server)["online_prefill_tokens"]
    lines = [
        line(f"c{n}", SCORE, query="hello ", items=["one", "two"][: n + 1], label_token_ids=[5, 9])
        for n in range(2)
    ]
    lines.append(line("far", SCORE, query="a", items=["b"], label_token_ids=[2**30]))
    done = api.wait(api.create(lines, endpoint=SCORE, window="6h"))
    records = api.records(done.output_file_id)
    scores = {r["custom_id"]: r["response"]["body"]["scores"] for r in records}
    assert {name: [len(row) for row in rows] for name, rows in scores.items()} == {
        "c0": [2],
        "c1": [2, 2],
    }
    [failed] = api.records(done.error_file_id)
    assert failed["response"]["status_code"] == 400 and error_of(failed)["message"]
    assert done.usage.input_tokens and state_of(server)["online_prefill_tokens"] == before


OF_CLIENTS = (
    ("GET", "/v1/files"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/file-1"),
    ("GET", "/v1/files/file-1/content"),
    ("DELETE", "/v1/files/file-1"),
    ("GET", "/v1/batches"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches/batch_1"),
    ("POST", "/v1/batches/batch_1/cancel"),
)
OF_OPERATORS = (
    ("GET", "/cosched"),
    ("GET", "/cosched/batches"),
    ("GET", "/cosched/history"),
    ("GET", "/cosched/metrics"),
    ("POST", "/cosched/offline"),
)


def test_each_route_is_behind_its_key(server):
    routes = {
        (method, path): key
        for paths, key in ((OF_CLIENTS, KEY), (OF_OPERATORS, ADMIN_KEY))
        for method, path in paths
    }
    for (method, path), own in routes.items():
        for key in (None, "wrong", KEY, ADMIN_KEY):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            reply = httpx.request(method, server.url + path, headers=headers, timeout=120)
            assert (reply.status_code == 401) == (key != own), (method, path, key, reply.text)


def test_the_page_is_open_and_what_it_asks_for_is_not(api, server):
    url = f"{server.url}/cosched"
    page = httpx.get(url, headers={"accept": "text/html,*/*;q=0.8"})
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(url).status_code == 401
    assert replica(server)["times_s"].keys() == {
        "online_ttft",
        "online_missed_ttft",
        "online_tpot",
        "offline_ttft",
        "offline_tpot",
    }
    assert "cosched:batches{" in operator(server, "GET", "/cosched/metrics").text


def test_lines_for_responses_are_answered(api):
    # This endpoint alone takes no other name of the model.
    body = {"model": api.client.models.list().data[0].id, "input": "hello", "max_output_tokens": 4}
    lines = [line(f"c{n}", RESPONSES, **body) for n in range(3)]
    done = api.wait(api.create(lines, endpoint=RESPONSES, window="30m"))
    assert done.request_counts.completed == 3, api.records(done.error_file_id)
    assert done.usage.output_tokens >= 3 and done.usage.input_tokens
    [first, *_] = api.records(done.output_file_id)
    assert first["response"]["body"]["service_tier"] == "flex"


def test_run_batch_leaves_the_work_to_the_batches_and_fetches_it(api, server, tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [chat(f"c{n}") if n % 2 else completion(f"c{n}") for n in range(40)]
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    files = ["-i", str(source), "-o", str(out), "--base-url", server.url, "--api-key", KEY]
    assert run_batch([*files, "--detach", "--window", "30m"]) == 0
    assert run_batch(files) == 0
    assert {json.loads(text)["custom_id"] for text in out.read_text().splitlines()} == {
        f"c{n}" for n in range(40)
    }
    assert sorted(batch.endpoint for batch in api.batches.list(limit=2).data) == [
        CHAT,
        "/v1/completions",
    ]
    assert run_batch(["status", "-o", str(out), "--api-key", KEY]) == 0
    assert '"is_fetched":true' in capsys.readouterr().out


def test_names_that_are_not_there(api):
    for call in (api.batches.retrieve, api.batches.cancel, api.files.retrieve, api.files.content):
        with pytest.raises(openai.NotFoundError):
            call("batch_1")


def test_kills_lose_and_repeat_nothing(forks, tmp_path):
    server = RealServer(tmp_path / "batches", forks)
    try:
        seen = run([server], kills=1, seed=5)
    finally:
        server.close()
    assert seen["lines"]


@pytest.mark.parametrize("window", ["24h", None], ids=["batch", "background"])
def test_autobatchers_client_is_answered(api, window):
    """As batches; and in its own way, which is responses in the background."""
    autobatcher = pytest.importorskip("autobatcher", reason="its client is not installed")

    async def ask():
        client = autobatcher.BatchOpenAI(
            base_url=f"{api.url}/v1",
            api_key=KEY,
            completion_window=window,
            batch_window_seconds=0.5,
            poll_interval_seconds=0.2,
        )
        try:
            return await asyncio.wait_for(_ask_all(client), timeout=120)
        finally:
            await client.close()

    num_before = len(api.batches.list(limit=100).data)
    *answers, response = asyncio.run(ask())
    assert all(1 <= answer.usage.completion_tokens <= 4 for answer in answers)
    assert response.status in ("completed", "incomplete")
    assert 1 <= response.usage.output_tokens <= 4
    num_made = len(api.batches.list(limit=100).data) - num_before
    assert num_made == (2 if window else 0)


async def _ask_all(client):
    model = (await client.models.list()).data[0].id
    chats = [
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"hello {n}"}],
            max_tokens=4,
            extra_body={"ignore_eos": True},
        )
        for n in range(20)
    ]
    response = client.responses.create(
        model=model, input="hi", max_output_tokens=4, extra_body={"ignore_eos": True}
    )
    return await asyncio.gather(*chats, response)
