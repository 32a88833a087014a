"""`autobatcher`'s client, as it is: it collects calls of the `openai` client into batches."""

from __future__ import annotations

import asyncio

import pytest

autobatcher = pytest.importorskip("autobatcher", reason="its client is not installed")


def run(api, work, **settings):
    """What `work` makes of a client, and the events that the client tells."""
    events = []

    async def call():
        client = autobatcher.BatchOpenAI(
            base_url=f"{api.url}/v1",
            api_key="key",
            completion_window="24h",
            batch_window_seconds=0.2,
            poll_interval_seconds=0.05,
            batch_event_handler=events.append,
            **settings,
        )
        try:
            return await asyncio.wait_for(work(client), timeout=60)
        finally:
            await client.close()

    return asyncio.run(call()), [event["event"] for event in events]


def chat(client, text):
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}], max_tokens=4
    )


def test_chats_become_one_batch(api):
    async def work(client):
        return await asyncio.gather(*(chat(client, f"c{n}") for n in range(40)))

    answers, events = run(api, work, batch_metadata={"project": "p"})
    assert [answer.choices[0].message.content for answer in answers] == [
        f"to c{n}" for n in range(40)
    ]
    [batch] = api.batches.list().data
    assert batch.request_counts.total == 40 and batch.metadata == {"project": "p"}
    assert batch.endpoint == "/v1/chat/completions"
    assert events[0] == "batch_submitted" and "batch_completed" in events


def test_a_batch_is_submitted_when_it_is_full(api):
    async def work(client):
        return await asyncio.gather(*(chat(client, f"c{n}") for n in range(25)))

    answers, _ = run(api, work, batch_size=10)
    assert len({answer.choices[0].message.content for answer in answers}) == 25
    counts = [batch.request_counts.total for batch in api.batches.list().data]
    assert sorted(counts) == [5, 10, 10]


def test_a_line_that_is_refused_fails_its_call_only(api):
    async def work(client):
        calls = (chat(client, "good"), chat(client, "refuse"))
        return await asyncio.gather(*calls, return_exceptions=True)

    (good, refused), _ = run(api, work)
    assert good.choices[0].message.content == "to good"
    assert isinstance(refused, Exception) and "No result for request" in str(refused)


def test_embeddings_and_responses(api):
    async def work(client):
        return await asyncio.gather(
            client.embeddings.create(model="m", input="four"),
            client.responses.create(model="m", input="x"),
        )

    (embedding, response), _ = run(api, work)
    assert embedding.data[0].embedding == [4.0]
    assert response.status == "completed" and response.usage.output_tokens == 2


def test_what_is_left_open_is_cancelled_when_that_is_asked_for(api, stand_in):
    stand_in.delay_s = 30.0

    async def work(client):
        calls = [asyncio.create_task(chat(client, text)) for text in "ab"]
        while not (await client.batches.list()).data:
            await asyncio.sleep(0.05)
        await client.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    errors, events = run(api, work, cancel_active_batches_on_close=True)
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert "batch_cancelled_upstream" in events
    [batch] = api.batches.list().data
    assert api.wait(batch).status == "cancelled"
