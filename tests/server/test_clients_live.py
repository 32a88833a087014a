"""Clients that validate what they get, on a server: the newest `openai` and `anthropic`, LiteLLM,
instructor.

Their packages do not fit SGLang's pins, so they are in folders of their own in the user's cache,
installed at the first run, while other tests run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
URLS = {"/v1/chat/completions": 2, "/v1/completions": 1, "/v1/responses": 1}


def run(program, packages, server, *arguments):
    """What it printed last."""
    command = [sys.executable, str(HERE / program), server.url, *arguments]
    environment = {"PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin", "HOME": str(packages)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_reply_is_valid_for_the_newest_openai_client(server, client_packages):
    found = run("client_openai.py", client_packages("openai"), server)
    assert found["version"] > "3"
    assert found["valid"] == sum(URLS.values()) and found["chunks"] > 3 and found["events"] > 5
    for url, number in URLS.items():
        batch = found["batches"][url]
        assert batch["valid"] == number and batch["model"]
        assert batch["error"] == [None, "top_p: 7 is above 1"]


def test_litellm_and_instructor_are_answered(server, client_packages):
    found = run("client_gateways.py", client_packages("gateways"), server)
    assert found["batch"] == "completed" and found["tokens"] == 3 and found["chunks"] > 3
    assert found["flag"] in ("on", "off") and found["parsed"] == 3


def test_the_message_batches_of_the_newest_anthropic_client(server, client_packages):
    found = run("client_anthropic.py", client_packages("anthropic"), server, "key")
    assert found["version"] > "2" and found["chat"] == 3
    none = {"processing": 0, "canceled": 0, "expired": 0}
    assert found["counts"] == none | {"succeeded": 1, "errored": 2}
    usage = found["results"]["good"]["message"]["usage"]
    assert usage["output_tokens"] == 3 and usage["device_seconds"] > 0
    errors = {name: found["results"][name]["error"]["error"] for name in ("bad", "unknown")}
    assert errors["bad"] == {"type": "invalid_request_error", "message": "top_p: 7 is above 1"}
    assert errors["unknown"]["type"] == "not_found_error"
    assert found["is_listed"] and found["num_canceled"] and found["missing"] == "not_found_error"
