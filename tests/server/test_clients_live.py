"""Clients that validate what they get, on a server: the newest `openai`, LiteLLM and instructor.

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


def run(program, packages, server):
    """What it printed last."""
    command = [sys.executable, str(HERE / program), server.url]
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
