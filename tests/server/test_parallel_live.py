"""Several ranks on a CPU serve both classes correctly.

500 requests over host memory and a storage of files, against stock SGLang:
``COSCHED_STORAGE_REQUESTS=500 pytest tests/server/test_parallel_live.py -k storage``.
"""

import json
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.server.shutdown import EXIT_CODE
from tests.batch.api import Api
from tests.engine.tiny_models import HYBRID, MIXTURE, SIZES, WINDOWS
from tests.request_lines import completion, error_of, line
from tests.server.poisoned import FAILS, LEAKS
from tests.serving import start_server

pytestmark = pytest.mark.server

LONG = [f"{n} says hello there " * (30 + 4 * n) for n in range(9)]
LIMITS = ("--max-running-requests", "4", "--chunked-prefill-size", "64")


def with_random_weights(config, tiny_model, folder):
    """Make a model of this configuration, with the tokenizer of the tiny model."""
    for path in tiny_model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocabulary}))


def generate(server, text, *, is_offline, **fields):
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    body = {"text": text, "sampling_params": params, "priority": -1 if is_offline else 0}
    # Two ranks on cores that others want too wait for each other in every layer.
    return httpx.post(f"{server.url}/generate", json=body | fields, timeout=300)


def check_same_tokens(server, texts, *, times):
    """Each prompt gets the same tokens in either class."""

    def ask(index):
        which = index % len(texts)
        reply = generate(server, texts[which], is_offline=index % 2)
        assert reply.status_code == 200, reply.text
        return which, tuple(reply.json()["output_ids"])

    with ThreadPoolExecutor(16) as threads:
        answers = set(threads.map(ask, range(times * len(texts))))
    assert len(answers) == len(texts) and all(len(ids) == 12 for _, ids in answers)


def check_both_classes(server):
    check_same_tokens(server, ["hello there " * n for n in range(5, 12)], times=2)
    counted = server.states()
    assert sum(c["offline_prefill_tokens"] for c in counted) > 0
    assert sum(c["online_prefill_tokens"] for c in counted) > 0
    assert all(c["num_waiting_offline"] == 0 for c in counted)


def test_two_replicas_serve_both_classes(tiny_model, forks):
    with start_server(tiny_model, "--dp-size", "2", *LIMITS, forks=forks) as server:
        check_both_classes(server)


@pytest.mark.long
def test_both_classes_decode_with_drafts(tiny_model, forks):
    flags = ["--speculative-algorithm", "EAGLE", "--speculative-num-draft-tokens", "4"]
    flags += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
    flags += ["--speculative-draft-model-path", str(tiny_model)]
    with start_server(tiny_model, *flags, *LIMITS, forks=forks) as server:
        check_both_classes(server)
        assert server.states()[0]["tokens_per_decode"] >= 1


STATE_SLOTS = ("--max-mamba-cache-size", "20", "--mamba-radix-cache-strategy")


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (HYBRID, (*STATE_SLOTS, "extra_buffer", "--tp", "2")),
        (SIZES | WINDOWS, ("--swa-full-tokens-ratio", "0.3")),
    ],
    ids=["state slots, two ranks", "windows"],
)
def test_both_classes_have_a_memory_beside_the_kv(tiny_model, tmp_path, forks, model, flags):
    with_random_weights(model, tiny_model, tmp_path)
    flags = ("--load-format", "dummy", "--max-total-tokens", "1200", *flags, *LIMITS)
    with start_server(tmp_path, *flags, forks=forks) as server:
        check_both_classes(server)
        check_same_tokens(server, LONG, times=2)
        kv = server.states()[0]["kv"]
        assert kv["evicted_online"] + kv["evicted_offline"] > 1000
        assert server.states()[0]["num_engine_refusals"] == 0


NUM_STORED = int(os.environ.get("COSCHED_STORAGE_REQUESTS", "0"))


@pytest.mark.skipif(not NUM_STORED, reason="by hand: a minute for 500 requests")
def test_two_ranks_over_a_storage_give_the_tokens_of_stock(tiny_model, tmp_path, forks):
    choose = random.Random(7)
    heads = [[choose.randrange(10, 2000) for _ in range(n)] for n in (32, 64, 96, 128)]
    asked = []
    for n in range(NUM_STORED):
        tail = [choose.randrange(10, 2000) for _ in range(choose.randrange(5, 60))]
        head = heads[n % 4] if choose.random() < 0.6 else []
        asked.append((head + tail, choose.randrange(4, 40), bool(n % 3)))

    def outputs(*flags):
        flags = ("--tp", "2", "--page-size", "16", *flags)
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
        with start_server(tiny_model, *flags, env=env, forks=forks) as one:

            def ask(request):
                ids, num_tokens, is_offline = request
                params = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
                reply = generate(
                    one, None, is_offline=is_offline, input_ids=ids, sampling_params=params
                )
                return reply.json()["output_ids"]

            with ThreadPoolExecutor(24) as threads:
                return list(threads.map(ask, asked)), one.states()[0]

    stock, _ = outputs("--cosched-policy", "sglang", "--max-total-tokens", "4000")
    flags = ["--hicache-storage-backend", "file", "--hicache-mem-layout", "page_first"]
    flags += ["--enable-hierarchical-cache", "--hicache-write-policy", "write_through"]
    flags += ["--hicache-storage-prefetch-policy", "wait_complete", "--max-total-tokens", "640"]
    ours, state = outputs(*flags, *LIMITS[2:], "--max-running-requests", "8")
    assert ours == stock
    assert state["num_preemptions"] > NUM_STORED / 20 and state["num_safe_plans"] == 0


def test_ranks_that_step_together_serve_both_classes_and_a_batch(tiny_model, forks, tmp_path):
    with_random_weights(SIZES | MIXTURE, tiny_model, tmp_path)
    flags = ("--tp", "2", "--dp", "2", "--enable-dp-attention", "--load-format", "dummy")
    flags += ("--enable-metrics", "--cosched-batches", str(tmp_path / "batches"))
    with start_server(tmp_path, *flags, *LIMITS, forks=forks) as server:
        check_both_classes(server)
        assert [state["num_plans"] > 0 for state in server.states()] == [True, True]
        url, api = f"{server.url}/cosched/offline", Api(server.url)
        assert httpx.post(url, json={"paused": True}, timeout=120).status_code == 200
        lines = [completion(f"c{n}") for n in range(6)]
        batch = api.create(lines, endpoint="/v1/completions", window="6h")
        assert generate(server, "hello", is_offline=False).status_code == 200
        assert not any(state["num_running_offline"] for state in server.states())
        assert httpx.post(url, json={"paused": False}, timeout=120).status_code == 200
        assert api.wait(batch).request_counts.completed == len(lines)
        metrics = httpx.get(f"{server.url}/metrics", timeout=120).text
        samples = [s for f in text_string_to_metric_families(metrics) for s in f.samples]
        planned = [s.labels["dp_rank"] for s in samples if s.name == "cosched:preemptions_total"]
        assert sorted(planned) == ["0", "1"]


@pytest.mark.long
def test_every_http_process_reads_the_class(tiny_model, forks):
    """Two processes share the port; both must have the hooks, the routes and their admin key."""
    flags = ("--tokenizer-worker-num", "2", "--admin-api-key", "SECRET")
    with start_server(tiny_model, *flags, *LIMITS, forks=forks) as server:

        def chat(number):
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"hello {number}"}]}
            tier = "flex" if number % 2 else "default"
            body |= {"max_tokens": 2, "service_tier": tier}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
            assert reply.json()["service_tier"] == tier
            return reply.headers["x-cosched-class"]

        with ThreadPoolExecutor(8) as threads:
            assert [*threads.map(chat, range(24))] == ["online", "offline"] * 12
        assert httpx.get(f"{server.url}/cosched").status_code == 401
        key = {"authorization": "Bearer SECRET"}
        shown = httpx.get(f"{server.url}/cosched", headers=key, timeout=120).json()
        assert shown["replicas"][0]["offline_prefill_tokens"] > 0
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(120) == 0


@pytest.fixture(scope="module")
def two_ranks(tiny_model, forks):
    """With memory for a few prompts, and hygen: its plans depend on measured times, which the ranks
    must agree on. The engine fails on some requests."""
    flags = ("--tp", "2", "--cosched-policy", "hygen", "--enable-metrics")
    flags += (*LIMITS, "--max-total-tokens", "1200", "--cosched-drain-s", "5")
    module = "tests.server.poisoned"
    with start_server(tiny_model, *flags, module=module, forks=forks) as server:
        yield server


def test_two_ranks_serve_both_classes_and_evict_the_same(two_ranks):
    check_both_classes(two_ranks)
    check_metrics(two_ranks.url, two_ranks.states()[0])
    check_same_tokens(two_ranks, LONG, times=2)
    kv = two_ranks.states()[0]["kv"]
    assert kv["evicted_online"] + kv["evicted_offline"] > 1000


@pytest.mark.long
def test_two_ranks_keep_the_same_contexts_in_host_memory(tiny_model, forks):
    flags = ("--tp", "2", "--enable-hierarchical-cache", "--max-total-tokens", "1200")
    with start_server(tiny_model, *flags, *LIMITS, forks=forks) as server:
        check_same_tokens(server, LONG, times=3)
        kv = server.states()[0]["kv"]
        assert kv["host"]["demoted"] > 1000 and kv["host"]["to_device"] > 0, kv


def test_a_failing_request_is_refused_and_a_leak_drains_the_server(two_ranks):
    def send(rid, number):
        text = f"{number} hello there " * (3 + 2 * number)
        return generate(two_ranks, text, is_offline=number % 2, rid=rid)

    def send_all(name, *others):
        asked = [*((f"{name}-{number}", number) for number in range(6)), *others]
        with ThreadPoolExecutor(len(asked)) as threads:
            replies = list(threads.map(send, *zip(*asked, strict=True)))
        return [reply.json()["output_ids"] for reply in replies[:6]], replies[6:]

    expected, _ = send_all("alone")
    tokens, [reply] = send_all("beside", (f"{FAILS}1", 3))
    assert tokens == expected
    assert reply.status_code == 400 and "ZeroDivisionError" in reply.text
    failures = two_ranks.states()[0]["failures"]
    failures.pop("slow_plan", None)  # on a busy machine
    assert failures == {"batch": 1}
    assert send("after", 0).status_code == 200
    send(f"{LEAKS}1", 1)
    assert two_ranks.process.wait(120) == EXIT_CODE, two_ranks.log()[-4000:]
    assert "KV memory is not consistent" in two_ranks.log()


def check_metrics(url, state):
    """What Prometheus scrapes from a server that has answered everything."""
    text = httpx.get(f"{url}/metrics", timeout=120).text
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("cosched:")
    ]
    assert {sample.labels["tp_rank"] for sample in samples} == {"0"}
    values = {}
    for sample in samples:
        own = {k: sample.labels[k] for k in ("request_class", "le") if k in sample.labels}
        values[(sample.name, *own.values())] = sample.value
    for kind in ("waiting", "running"):
        for request_class in ("online", "offline"):
            assert values[(f"cosched:{kind}_requests", request_class)] == 0
    assert values[("cosched:planning_seconds_count",)] >= state["num_plans"]
    assert values[("cosched:planning_seconds_bucket", "+Inf")] > 0
    assert values[("cosched:preemptions_total",)] == state["num_preemptions"]
    predicted = values[("cosched:iteration_predicted_seconds_total",)]
    measured = values[("cosched:iteration_measured_seconds_total",)]
    assert predicted > 0 and measured > 0
    assert values[("cosched:prediction_error_ratio_count",)] > 0
    assert values[("cosched:pool_requests",)] == values[("cosched:pool_tokens",)] == 0
    assert values[("cosched:pool_oldest_age_seconds",)] == 0
    assert 0 <= values[("cosched:pool_expected_hit_ratio",)] <= 1
    assert 0 <= values[("cosched:pool_sharing_ratio",)] <= 1


def test_an_embedding_model_serves_both_classes_and_batches_beside_sglangs_key(
    tiny_model, forks, tmp_path
):
    claims = {"keys": {"secret": {"floors": {"ttft_ms": 800}}}}
    flags = ("--is-embedding", "--cosched-claims", json.dumps(claims), "--api-key", "secret")
    flags += ("--cosched-batches", str(tmp_path / "batches"))
    with start_server(tiny_model, *flags, forks=forks) as server:

        def embed(index, key="secret"):
            body = {"model": "tiny", "input": "some words " * (index + 1), "priority": -(index % 2)}
            headers = {"authorization": f"Bearer {key}", "x-slo-ttft-ms": "600"}
            url = f"{server.url}/v1/embeddings"
            return httpx.post(url, json=body, headers=headers, timeout=120)

        with ThreadPoolExecutor(8) as threads:
            replies = list(threads.map(embed, range(16)))
        assert {reply.status_code for reply in replies} == {200}
        assert len({len(reply.json()["data"][0]["embedding"]) for reply in replies}) == 1
        classes = [reply.headers["x-cosched-class"] for reply in replies]
        assert classes == ["online", "offline"] * 8
        # The key is known to the claims too.
        assert {r.headers["x-cosched-targets"] for r in replies} == {"ttft_slo_ms=800"}
        refused = embed(0, key="wrong")
        assert refused.status_code == 401
        assert "x-cosched-class" not in refused.headers
        assert httpx.get(f"{server.url}/health", timeout=120).status_code == 200
        api = Api(server.url, key="secret")
        url = "/v1/embeddings"
        lines = [line(f"c{n}", url, model="default", input=f"text {n}") for n in range(8)]
        lines.append(line("two", url, model="default", input=["one", "other"]))
        done = api.wait(api.create(lines, endpoint=url, window="6h"))
        assert done.request_counts.completed == 9, api.records(done.error_file_id)
        assert done.usage.input_tokens and not done.usage.output_tokens
        records = api.records(done.output_file_id)
        found = {record["custom_id"]: record["response"]["body"]["data"] for record in records}
        assert len(found["two"]) == 2 and len(found["c0"][0]["embedding"]) > 1
        url = "/v1/rerank"
        texts = {"query": "which one?", "documents": ["the first", "the second"]}
        lines = [line("ranked", url, **texts), line("named", url, model="gpt-4o", **texts)]
        done = api.wait(api.create(lines, endpoint=url, window="6h"))
        [record], [failed] = map(api.records, (done.output_file_id, done.error_file_id))
        ranked = record["response"]["body"]
        assert sorted(one["document"] for one in ranked) == sorted(texts["documents"])
        assert done.usage.input_tokens and error_of(failed)["code"] == "model_not_found"
