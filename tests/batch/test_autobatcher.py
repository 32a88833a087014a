"""`autobatcher`'s client, as it is: it collects calls of the `openai` client into batches."""

from __future__ import annotations

import asyncio

import pytest

autobatcher = pytest.importorskip("autobatcher", reason="its client is not installed")


def run(api, work, **settings):
    async def call():
        client = autobatcher.BatchOpenAI(
            base_url=f"{api.url}/v1",
            api_key="key",
            completion_window="24h",
            batch_window_seconds=0.2,
            poll_interval_seconds=0.05,
            **settings,
        )
        try:
            return await asyncio.wait_for(work(client), timeout=240)
        finally:
            await client.close()

    return asyncio.run(call())


def chat(client, text):
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}], max_tokens=4
    )


def test_chats_become_one_batch(api):
    async def work(client):
        return await asyncio.gather(*(chat(client, f"c{n}") for n in range(40)))

    answers = run(api, work, batch_metadata={"project": "p"})
    assert [answer.choices[0].message.content for answer in answers] == [
        f"to c{n}" for n in range(40)
    ]
    [batch] = api.batches.list().data
    assert batch.request_counts.total == 40 and batch.metadata == {"project": "p"}
    assert batch.endpoint == "/v1/chat/completions"


def test_a_line_that_is_refused_fails_its_call_only(api):
    async def work(client):
        calls = (chat(client, "good"), chat(client, "refuse"))
        return await asyncio.gather(*calls, return_exceptions=True)

    good, refused = run(api, work)
    assert good.choices[0].message.content == "to good"
    assert isinstance(refused, Exception) and "No result for request" in str(refused)


def test_embeddings_and_responses(api):
    async def work(client):
        return await asyncio.gather(
            client.embeddings.create(model="m", input="four"),
            client.responses.create(model="m", input="x"),
        )

    embedding, response = run(api, work)
    assert embedding.data[0].embedding == [4.0]
    assert response.status == "completed" and response.usage.output_tokens == 2
