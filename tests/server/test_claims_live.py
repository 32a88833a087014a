"""Claims of API keys on a running server, beside SGLang's own key."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.serving import start_server

CLAIMS = {
    "ignore": ["priority"],
    "keys": {"tenant": {"max_online": 1}, "*": {"max_offline": 0}},
}


def client_of(server, key):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def ask(client, **kwargs):
    messages = [{"role": "user", "content": "Name a number."}]
    return client.chat.completions.create(model="m", messages=messages, **kwargs)


@pytest.mark.server
def test_limits_per_key(tiny_model):
    with start_server(tiny_model, "--cosched-claims", json.dumps(CLAIMS)) as server:
        tenant, other = client_of(server, "tenant"), client_of(server, "other")
        stream = ask(tenant, max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
        assert next(iter(stream)).service_tier == "default"
        with pytest.raises(openai.RateLimitError) as caught:
            ask(tenant, max_tokens=1)
        assert caught.value.response.headers["retry-after"] == "1"
        assert "may have 1 online sequences under way; it has 1" in str(caught.value)
        with pytest.raises(openai.RateLimitError):
            ask(other, max_tokens=1, service_tier="flex")
        # Another key, another class and a sign that is ignored.
        assert ask(other, max_tokens=1, extra_body={"priority": -5}).service_tier == "default"
        assert ask(tenant, max_tokens=1, service_tier="flex").service_tier == "flex"
        # Whoever hangs up has nothing under way any more.
        stream.close()
        retrying = openai.OpenAI(base_url=f"{server.url}/v1", api_key="tenant", max_retries=20)
        assert ask(retrying, max_tokens=1).service_tier == "default"


@pytest.mark.server
def test_beside_the_key_of_sglang(tiny_model):
    claims = json.dumps({"keys": {"secret": {"class": "offline"}}})
    flags = ("--cosched-claims", claims, "--api-key", "secret")
    with start_server(tiny_model, *flags) as server:
        with client_of(server, "secret") as client, ThreadPoolExecutor(4) as threads:
            replies = list(threads.map(lambda _: ask(client, max_tokens=1), range(4)))
        assert {reply.service_tier for reply in replies} == {"flex"}
        with pytest.raises(openai.AuthenticationError) as caught:
            ask(client_of(server, "wrong"), max_tokens=1)
        assert "x-cosched-class" not in caught.value.response.headers
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
