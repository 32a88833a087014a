"""A program with LiteLLM and instructor, which validate replies; its first argument is a server.
Prints what it found, as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub for prices

import instructor
import litellm
import openai
from instructor.batch import BatchProcessor
from instructor.batch.models import BatchSuccess
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "a"}]


class Flag(BaseModel):
    flag: Literal["on", "off"]


FLAG = {"regex": r'\{"flag": "(on|off)"\}', "max_tokens": 40}
"""The random model writes what the schema asks for."""


def with_litellm(base_url):
    server = {"api_base": f"{base_url}/v1", "api_key": "none"}
    asked = {"model": "openai/default", "messages": MESSAGES, "max_tokens": 3, **server}
    reply = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True))
    server["custom_llm_provider"] = "openai"
    body = {"model": "default", "messages": MESSAGES, **FLAG}
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n in range(3)
    ]
    content = ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())
    file = litellm.create_file(file=content, purpose="batch", **server)
    batch = litellm.create_batch(
        completion_window="24h",
        endpoint="/v1/chat/completions",
        input_file_id=file.id,
        extra_body={"custom_llm_provider": "openai"},
        **server,
    )
    while batch.status not in ("completed", "failed"):
        time.sleep(0.05)
        batch = litellm.retrieve_batch(batch_id=batch.id, **server)
    text = litellm.file_content(file_id=batch.output_file_id, **server).content.decode()
    found = {"tokens": reply.usage.completion_tokens, "chunks": len(chunks), "batch": batch.status}
    return found, text


def with_instructor(base_url, results):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{base_url}/v1", api_key="none"), mode=instructor.Mode.MD_JSON
    )
    limits = {"max_tokens": FLAG["max_tokens"], "extra_body": {"regex": FLAG["regex"]}}
    flag = client.chat.completions.create(
        model="default", messages=MESSAGES, response_model=Flag, max_retries=1, **limits
    )
    processor = BatchProcessor("openai/default", Flag)
    parsed = processor.parse_results(results)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        processor.create_batch_from_messages([MESSAGES], file_path=str(path))
        line = json.loads(path.read_text())
    fine = sum(isinstance(one, BatchSuccess) for one in parsed)
    return {"flag": flag.flag, "parsed": fine, "url": line["url"]}


def main(base_url):
    found, results = with_litellm(base_url)
    found |= with_instructor(base_url, results)
    found |= {name: version(name) for name in ("litellm", "instructor", "openai")}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
