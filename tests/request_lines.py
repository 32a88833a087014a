"""Lines of a job as clients write them, short enough for the tiny model."""

from __future__ import annotations


def line(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id, **body):
    messages = [{"role": "user", "content": f"hello {custom_id}"}]
    defaults = {"model": "default", "messages": messages, "max_tokens": 4, "temperature": 0}
    return line(custom_id, "/v1/chat/completions", **(defaults | body))


def completion(custom_id, **body):
    defaults = {"model": "default", "prompt": f"hello {custom_id}", "max_tokens": 4}
    return line(custom_id, "/v1/completions", **(defaults | body))


def error_of(record):
    """Of a line of an error file: that of its response, or its own."""
    assert (record["response"] is None) != (record["error"] is None), record
    return record["error"] or record["response"]["body"]["error"]
