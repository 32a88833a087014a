"""A program with the newest `openai` client; its argument is a server. Replies, chunks, events
and results of batches are validated by the client's types. Prints what it found, as JSON."""

from __future__ import annotations

import json
import sys
import time

import openai
from openai.types import Batch, Completion, FileObject
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

URLS = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
BODIES = {
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "n": 2, "logprobs": True},
        {
            **{"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "n": None},
            **{"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": None},
        },
    ],
    "/v1/completions": [{"prompt": "a", "max_tokens": 3, "echo": None, "logprobs": 1}],
    "/v1/responses": [{"input": "a", "max_output_tokens": 1, "tools": None}],
}


def validated(kind, reply):
    """The JSON of a raw reply, valid as this type."""
    content = reply.http_response.json() if hasattr(reply, "http_response") else reply
    TypeAdapter(kind).validate_python(content)
    return content


def run_batch(client, url, bodies):
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": url, "body": {"model": "default", **body}}
        for n, body in enumerate(bodies)
    ]
    lines.append({**lines[0], "custom_id": "bad", "body": {**lines[0]["body"], "top_p": 7}})
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    validated(FileObject, client.files.with_raw_response.retrieve(file.id))
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    while batch.status not in ("completed", "failed"):
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    found = validated(Batch, client.batches.with_raw_response.retrieve(batch.id))
    records = list(map(json.loads, client.files.content(batch.output_file_id).text.splitlines()))
    for record in records:
        validated(URLS[url], record["response"]["body"])
    (bad,) = map(json.loads, client.files.content(batch.error_file_id).iter_lines())
    return {
        "model": found["model"],
        "valid": len(records),
        "error": [bad["error"], bad["response"]["body"]["error"]["message"]],
    }


def main(base_url):
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    result = {"version": openai.__version__, "valid": 0, "batches": {}}
    for url, kind in URLS.items():
        for body in BODIES[url]:
            path, body = url.removeprefix("/v1"), {"model": "default", **body}
            validated(kind, client.post(path, body=body, cast_to=object))
            result["valid"] += 1
        result["batches"][url] = run_batch(client, url, BODIES[url])
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    with client.chat.completions.with_streaming_response.create(
        model="default", stream=True, stream_options={"include_usage": True}, **chat
    ) as reply:
        result["chunks"] = count_valid(ChatCompletionChunk, reply)
    with client.responses.with_streaming_response.create(
        model="default", stream=True, input="a", max_output_tokens=3
    ) as reply:
        result["events"] = count_valid(ResponseStreamEvent, reply)
    print(json.dumps(result))


def count_valid(kind, reply):
    lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    for line in lines:
        validated(kind, json.loads(line.removeprefix("data: ")))
    return len(lines)


if __name__ == "__main__":
    main(sys.argv[1])
