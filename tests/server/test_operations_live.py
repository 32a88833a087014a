"""The operator's side of a real server: its end, its limits, its metrics."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.batch.prometheus import Kind
from cosched.engine.features.exporter import METRICS
from cosched.limits.claims import digest_of
from cosched.server.access import Level, rule_of
from tests.batch.api import until
from tests.request_lines import completion as line
from tests.serving import (
    GUARDED_ADMIN_KEY,
    GUARDED_FLAGS,
    GUARDED_POOL,
    SHARED_DRAIN_S,
    SHARED_FLAGS,
)

pytestmark = pytest.mark.server

FLEX = {"service_tier": "flex"}
WITHIN_S = SHARED_DRAIN_S + 120  # plus the end of the processes


def completion(url, prompt, *, tokens=4, **more):
    body = {"model": "default", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body | more, timeout=120)


def stream(url, started, *, tokens):
    """The usage of a streamed chat; sets `started` once some of it has come."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage, reasons = None, set()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if number == 10:
                started.set()
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                reasons |= {choice["finish_reason"] for choice in event.get("choices", ())}
    return usage, reasons - {None}


@pytest.mark.ends_server
def test_sigterm_lets_chats_finish_within_the_bound_and_a_batch_go(
    servers, guarded, forks, tmp_path
):
    """A supervisor that signals the whole group must not take the schedulers from the chats."""
    lines = [line(f"r{i}", max_tokens=100, ignore_eos=True) for i in range(60)]
    batch, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    batch.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = ["cosched.run_batch", "-i", str(batch), "-o", str(out), "--via", "lines"]
    job += ["--concurrency", str(GUARDED_POOL), "--base-url"]
    with servers.take(*SHARED_FLAGS) as server, ThreadPoolExecutor() as pool:
        logged = len(server.log())
        running = forks.start_module(*job, server.url, log=tmp_path / "job.log")
        try:
            while running_offline(server.url) == 0:
                assert running.poll() is None
                time.sleep(0.1)
            both_started = [threading.Event(), threading.Event()]
            short = pool.submit(stream, server.url, both_started[0], tokens=60)
            endless = pool.submit(stream, server.url, both_started[1], tokens=9_000)
            whole = pool.submit(completion, server.url, "hello", tokens=9_000)
            assert all(started.wait(60) for started in both_started)
            os.killpg(server.process.pid, signal.SIGTERM)
            until(lambda: completion(server.url, "new").status_code == 503)
            refused = completion(server.url, "new")
            assert refused.status_code == 503 and refused.headers["retry-after"].isdecimal()
            assert httpx.get(f"{server.url}/health", timeout=120).status_code == 503
            usage, reasons = short.result()
            assert usage["completion_tokens"] == 60 and reasons == {"length"}
            assert whole.result().status_code == 503
            assert "length" not in endless.result()[1]
            assert server.process.wait(WITHIN_S) == 0
            assert running.poll() is None, "the job waits for the server to come back"
        finally:
            if running.poll() is None:
                os.kill(running.pid, signal.SIGTERM)
            running.wait(30)
        log = server.log()[logged:]
        assert f"online ones may take {SHARED_DRAIN_S} s, offline requests are aborted" in log
        assert "Traceback" not in log
    assert len(out.read_text().splitlines()) < 60
    assert forks.run_module(*job, guarded.url).returncode == 0
    assert len(out.read_text().splitlines()) == 60
    assert (tmp_path / "out.jsonl.errors.jsonl").read_text() == ""


@pytest.mark.ends_server
def test_a_second_signal_ends_it_at_once(servers):
    # One that drains for longer than this test takes.
    with servers.take(*GUARDED_FLAGS) as server, ThreadPoolExecutor() as pool:
        started, logged = threading.Event(), len(server.log())
        chat = pool.submit(stream, server.url, started, tokens=15_000)
        assert started.wait(60)
        os.kill(server.process.pid, signal.SIGINT)
        until(lambda: "online ones may take" in server.log()[logged:])
        assert server.process.poll() is None
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            chat.result()


def running_offline(url):
    state = httpx.get(f"{url}/cosched", timeout=120).json()
    return sum(replica["num_running_offline"] for replica in state["replicas"])


@pytest.fixture
def guarded(servers):
    """With metrics, an admin key, claims and a small pool."""
    return servers.get(*GUARDED_FLAGS)


def order(server, key=GUARDED_ADMIN_KEY, **body):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/cosched/offline", json=body, headers=headers, timeout=120)


def show(server):
    headers = {"authorization": f"Bearer {GUARDED_ADMIN_KEY}"}
    return httpx.get(f"{server.url}/cosched", headers=headers, timeout=120).json()


def metric(server, name, **labels):
    """The sum of the samples of a metric that have these labels; None: there is none."""
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{server.url}/metrics", timeout=120).text
    values = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(values) if values else None


def test_only_the_admin_may_look_and_order(guarded):
    assert order(guarded, key=None, paused=True).status_code == 401
    assert order(guarded, key="wrong", paused=True).status_code == 401
    assert httpx.get(f"{guarded.url}/cosched").status_code == 401
    assert order(guarded, paused=False).status_code == 200
    wrong = order(guarded, max_running=-1)
    assert wrong.status_code == 400 and "max_running must be 0 or more" in wrong.text
    unknown = order(guarded, pausd=True)
    assert unknown.status_code == 400 and "pausd" in unknown.text


def test_no_route_shows_secrets_or_what_other_keys_did(guarded):
    """Every route of a live server, stock ones too, without a key and with a tenant's; those of
    operators that only show something with theirs too."""
    tenant = {"headers": {"authorization": "Bearer tenant"}, "timeout": 30}
    admin = {"headers": {"authorization": f"Bearer {GUARDED_ADMIN_KEY}"}, "timeout": 30}
    owner = digest_of("tenant").removeprefix("sha256:")[:8]
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{guarded.url}/v1/completions", json=body, **tenant).status_code == 200
    while owner not in httpx.get(f"{guarded.url}/metrics", **admin).text:  # once a second
        time.sleep(0.1)
    paths = httpx.get(f"{guarded.url}/openapi.json", timeout=120).json()["paths"]
    asked = [(path, method) for path, methods in paths.items() for method in methods]
    asked = [one for one in asked if not one[0].startswith("/health")] + [("/metrics", "get")]
    assert len(asked) > 90
    with httpx.Client(base_url=guarded.url) as client:
        for path, method in asked:
            url, content = path.replace("{", "").replace("}", ""), b"" if method == "get" else b"{}"
            is_admins = rule_of(path).level is Level.ADMIN
            for options in ({"timeout": 30}, tenant):
                answer = client.request(method, url, content=content, **options)
                assert (answer.status_code == 401) == is_admins, (path, answer.text)
                assert GUARDED_ADMIN_KEY not in answer.text, path
                assert owner not in answer.text, path
            if paths.get(path, {}).keys() <= {"get"}:
                answer = client.get(url, **admin)
                assert answer.status_code != 401 and GUARDED_ADMIN_KEY not in answer.text, path
        [state] = client.get("/server_info", **admin).json()["internal_states"]
    assert owner in state["cosched"]["device_s"]["online"]
    assert GUARDED_ADMIN_KEY not in guarded.log()


def test_a_session_is_one_of_the_key_that_opened_it(guarded):
    def ask(path, key, **body):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{guarded.url}{path}", json=body, headers=headers, timeout=120)

    def go_on(key, **more):
        """The prompt so far, by its log probabilities."""
        params = {"max_new_tokens": 1}
        session = {"id": name, **more}
        answer = ask("/generate", key, text="words", sampling_params=params, return_logprob=True,
                     logprob_start_len=0, session_params=session)  # fmt: skip
        return answer.json()["meta_info"] if answer.status_code == 200 else answer.json()

    name = ask("/open_session", "tenant", capacity_of_str_len=1000).json()
    first = go_on("tenant")["id"]
    unknown = f"session id {name} does not exist"
    for other in ("other", GUARDED_ADMIN_KEY):
        assert unknown in go_on(other, rid=first)["error"]["message"]
        ask("/close_session", other, session_id=name)
    assert len(go_on("tenant", rid=first)["input_token_logprobs"]) > 1
    assert ask("/open_session", "other", capacity_of_str_len=9, session_id=name).json() == name
    for key in ("tenant", "other"):
        assert ask("/close_session", key, session_id=name).status_code == 200
    assert unknown in go_on("tenant")["error"]["message"]


def test_a_paused_pool_waits_and_a_full_one_answers_429(guarded):
    assert order(guarded, paused=True).json()["replicas"][0]["offline_limits"]["paused"]
    with ThreadPoolExecutor(GUARDED_POOL) as pool:
        waiting = [
            pool.submit(completion, guarded.url, f"o{i}", **FLEX) for i in range(GUARDED_POOL)
        ]
        while show(guarded)["replicas"][0]["num_waiting_offline"] < GUARDED_POOL:
            time.sleep(0.05)
        for more in ({}, {"stream": True}):
            refused = completion(guarded.url, "one too many", **FLEX, **more)
            assert refused.status_code == 429, refused.text
            assert refused.headers["retry-after"].isdecimal()
        assert completion(guarded.url, "chat").status_code == 200
        assert httpx.get(f"{guarded.url}/health_generate", timeout=120).status_code == 200
        flush = {"headers": {"authorization": f"Bearer {GUARDED_ADMIN_KEY}"}, "timeout": 30}
        assert httpx.post(f"{guarded.url}/flush_cache", **flush).status_code == 200
        weights = {"model_path": httpx.get(f"{guarded.url}/model_info").json()["model_path"]}
        updated = httpx.post(f"{guarded.url}/update_weights_from_disk", json=weights, **flush)
        assert updated.json()["success"], "an operation waits for the pool"
        assert completion(guarded.url, "chat").status_code == 200
        [model] = httpx.get(f"{guarded.url}/v1/models").json()["data"]
        assert model["id"] == "demo", "its name is that of its folder"
        assert not any(future.done() for future in waiting)
        assert order(guarded).status_code == 200
        assert [future.result().status_code for future in waiting] == [200] * GUARDED_POOL


NOT_HERE = {
    "kv_host_tokens",
    "kv_demoted_tokens",
    "kv_transferred_tokens",
    "kv_waited_tokens",
    "tolerance_room_ratio",
    "saturation",
    "shared_prefix_iterations",
    "shared_prefix_decodes",
}
"""This server has no host memory, promises nothing beside its targets, has served too few chats to
tell how busy they keep it, and has no GPU to share prefixes on."""


def test_prometheus_has_every_metric_and_counts_both_classes(guarded):
    order(guarded)
    labels = {"online": {"request_class": "online"}, "offline": {"request_class": "offline"}}
    before = {name: metric(guarded, "cosched:e2e_seconds_count", **labels[name]) for name in labels}
    for i in range(3):
        assert completion(guarded.url, f"chat {i}", tokens=8).status_code == 200
        assert completion(guarded.url, f"job {i}", tokens=8, **FLEX).status_code == 200
    for name, own in labels.items():  # levels are refreshed once a second
        wanted = "cosched:e2e_seconds_count", (before[name] or 0) + 3
        until(lambda own=own, of=wanted: metric(guarded, of[0], **own) == of[1])
        assert metric(guarded, "cosched:ttft_seconds_count", **own) >= 3
        assert metric(guarded, "cosched:tpot_seconds_count", **own) >= 3
        assert metric(guarded, "cosched:output_tokens_total", **own) >= 24
    judged = metric(guarded, "cosched:slo_met_total", target="all")
    assert judged + metric(guarded, "cosched:slo_missed_total", target="all") >= 3
    text = httpx.get(f"{guarded.url}/metrics", timeout=120).text
    for each in METRICS:
        if each.name in NOT_HERE or each.name.startswith("tier_"):  # no tiers are configured
            continue
        suffix = "_count" if each.kind is Kind.HISTOGRAM else ""
        assert f"\n{each.shown_name}{suffix}{{" in text, each.shown_name
    assert len([line for line in text.splitlines() if line.startswith("cosched:")]) < 400


def test_the_log_says_what_runs_at_the_start_and_when_ready(guarded):
    lines = [line for line in guarded.log().splitlines() if "policy cosched; targets TTFT" in line]
    assert len(lines) == 2
    after = guarded.log().split("ready to roll!", 1)[1]
    assert f"cosched: ready on {guarded.url}" in after
    assert "while a batch runs, chat decodes at up to 50 ms a token (target 50 ms" in after
    assert f"cosched: try offline: curl {guarded.url}/v1/chat/completions" in after
    assert "the demo model has random weights: its replies are gibberish" in after


def test_limits_per_key(guarded):
    def client_of(key, *, retries=0):
        return openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=retries)

    def ask(client, **kwargs):
        messages = [{"role": "user", "content": "Name a number."}]
        return client.chat.completions.create(model="m", messages=messages, **kwargs)

    tenant, barred, other = client_of("tenant"), client_of("barred"), client_of("other")
    stream = ask(tenant, max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
    assert next(iter(stream)).service_tier == "default"
    with pytest.raises(openai.RateLimitError) as caught:
        ask(tenant, max_tokens=1)
    assert caught.value.response.headers["retry-after"] == "1"
    assert "may have 1 online sequences in flight; it has 1" in str(caught.value)
    with pytest.raises(openai.RateLimitError):
        ask(barred, max_tokens=1, service_tier="flex")
    # Another key, another class and a sign that is ignored.
    assert ask(other, max_tokens=1, extra_body={"priority": -5}).service_tier == "default"
    assert ask(tenant, max_tokens=1, service_tier="flex").service_tier == "flex"
    # Whoever hangs up has nothing under way any more.
    stream.close()
    assert ask(client_of("tenant", retries=20), max_tokens=1).service_tier == "default"
