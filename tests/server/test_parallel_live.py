"""Several ranks on a CPU serve both classes correctly."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.batch.api import Api
from tests.request_lines import line
from tests.serving import start_server

pytestmark = pytest.mark.server


def ask(server, index, *, num_texts, text, num_tokens, timeout_s):
    """Greedy tokens of one of so many prompts, by its number: online and offline in turn."""
    body = {
        "text": text(index % num_texts),
        "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True},
        "priority": -1 if index % 2 else 0,
    }
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=timeout_s)
    assert reply.status_code == 200, reply.text
    return index % num_texts, tuple(reply.json()["output_ids"])


LIMITS = ("--max-running-requests", "4", "--chunked-prefill-size", "64")


def states_of(server):
    """Of each replica."""
    info = httpx.get(f"{server.url}/get_server_info", timeout=30).json()
    return [state["cosched"] for state in info["internal_states"]]


def check_both_classes(server):
    asked = partial(
        ask,
        server,
        num_texts=7,
        text=lambda n: "hello there " * (5 + n),
        num_tokens=12,
        timeout_s=120,
    )
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(asked, range(28)))
    assert all(len(ids) == 12 for _, ids in answers)
    assert len(set(answers)) == 7, "the same prompt gets the same tokens in either class"
    counted = states_of(server)
    assert sum(c["offline_prefill_tokens"] for c in counted) > 0
    assert sum(c["online_prefill_tokens"] for c in counted) > 0
    assert all(c["num_waiting_offline"] == 0 for c in counted)


def test_two_replicas_serve_both_classes(tiny_model, forks):
    with start_server(tiny_model, "--dp-size", "2", *LIMITS, forks=forks) as server:
        check_both_classes(server)


def test_two_ranks_serve_both_classes_and_evict_the_same(tiny_model, forks):
    """The plans of hygen depend on measured times, which the ranks must agree on."""
    flags = ("--tp", "2", "--cosched-policy", "hygen", "--enable-metrics")
    memory = ("--max-total-tokens", "1200")
    with start_server(tiny_model, *flags, *LIMITS, *memory, forks=forks) as server:
        check_both_classes(server)
        check_metrics(server.url, states_of(server)[0])
        check_eviction(server)


def check_eviction(server):
    """Memory for a few of the prompts: all are asked again and again, by both classes."""
    asked = partial(
        ask,
        server,
        num_texts=9,
        text=lambda n: f"{n} says hello there " * (30 + 4 * n),
        num_tokens=8,
        # Two ranks on cores that others want too wait for each other in every layer.
        timeout_s=300,
    )
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(asked, range(27)))
    assert len(set(answers)) == 9, "the same prompt gets the same tokens"
    kv = states_of(server)[0]["kv"]
    assert kv["is_watched"]
    assert kv["evicted_online"] + kv["evicted_offline"] > 1000


def check_metrics(url, state):
    """What Prometheus scrapes from a server that has answered everything."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
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
            return httpx.post(url, json=body, headers=headers, timeout=60)

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
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
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
