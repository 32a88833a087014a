"""A program with the newest `anthropic` client; its arguments are a server and an API key. Prints
what it found, as JSON."""

from __future__ import annotations

import json
import sys
import time

import anthropic
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from pydantic import TypeAdapter


def params(content, **changes):
    messages = [{"role": "user", "content": content}]
    return {"model": "default", "max_tokens": 3, "messages": messages} | changes


def main(base_url, key):
    client = anthropic.Anthropic(base_url=base_url, api_key=key, max_retries=0)
    batches = client.messages.batches
    chat = client.messages.create(**params("a"))
    batch = batches.create(
        requests=[
            {"custom_id": "good", "params": params("a", system="Be brief.")},
            {"custom_id": "bad", "params": params("a", top_p=7)},
            {"custom_id": "unknown", "params": params("a", model="another")},
        ]
    )
    while batches.retrieve(batch.id).processing_status != "ended":
        time.sleep(0.05)
    ended = batches.with_raw_response.retrieve(batch.id)
    TypeAdapter(MessageBatch).validate_python(ended.http_response.json(), strict=False)
    results = list(batches.results(batch.id))
    for one in results:
        TypeAdapter(MessageBatchIndividualResponse).validate_python(one.model_dump())
    long = [{"custom_id": f"c{n}", "params": params("a", max_tokens=4000)} for n in range(40)]
    canceled = batches.create(requests=long)
    batches.cancel(canceled.id)
    while batches.retrieve(canceled.id).processing_status != "ended":
        time.sleep(0.05)
    listed = [one.id for one in batches.list(limit=1)]
    num_canceled = sum(one.result.type == "canceled" for one in batches.results(canceled.id))
    for name in (batch.id, canceled.id):
        batches.delete(name)
    try:
        batches.retrieve(batch.id)
        missing = None
    except anthropic.NotFoundError as error:
        missing = error.body["error"]["type"]
    print(
        json.dumps(
            {
                "version": anthropic.__version__,
                "chat": chat.usage.output_tokens,
                "counts": ended.parse().request_counts.model_dump(),
                "results": {one.custom_id: one.result.model_dump() for one in results},
                "is_listed": listed[:2] == [canceled.id, batch.id],
                "num_canceled": num_canceled,
                "missing": missing,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
