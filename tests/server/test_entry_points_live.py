"""Each way to start a server on the CPU install starts one that answers.

``python -m cosched serve`` is how `tests.serving.Servers` starts the server that the tests share.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cosched.config import ENV_VAR
from tests.serving import SEARCH_PATH, start_server

pytestmark = pytest.mark.server

BIN = Path(sys.executable).parent  # scripts of the environment
CPU_FLAGS = ("--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle")
CHAT = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hello!"}]}


def check_answers(server):
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
    assert reply.status_code == 200, reply.text
    info = httpx.get(f"{server.url}/get_server_info", timeout=30).json()
    assert info["internal_states"][0]["cosched"]["policy"] == "sarathi"
    assert "Ignore import error" not in server.log()
    assert "UserWarning" not in server.log()


def test_the_cosched_script_without_the_pth_file(tiny_model, tmp_path):
    """An environment that scripts/setup has not made has no file that prepares every process."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path = [one for one in sys.meta_path\n"
        "                 if getattr(one, '__name__', '') != '_BeforeSglang']\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{SEARCH_PATH}"}
    command = [str(BIN / "cosched"), "serve", "--cosched-policy", "sarathi"]
    with start_server(tiny_model, command=command, env=env) as server:
        check_answers(server)


def check_bench_serving(server):
    """SGLang's benchmark client, in the same environment."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai"),
            *("--base-url", server.url, "--model", str(server.model_path)),
            *("--dataset-name", "random-ids", "--num-prompts", "2"),
            *("--random-input-len", "8", "--random-output-len", "4"),
        ],
        env={**os.environ, "PYTHONPATH": SEARCH_PATH},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"Successful requests: +2\b", ended.stdout), ended.stdout


def test_sglangs_own_commands_with_the_plugin(tiny_model, tmp_path, monkeypatch):
    env = {ENV_VAR: '{"policy": "sarathi"}', "SGLANG_PLUGINS": "cosched"}
    command = [str(BIN / "sglang"), "serve"]
    with start_server(tiny_model, *CPU_FLAGS, command=command, env=env) as server:
        check_answers(server)
        monkeypatch.chdir(tmp_path)  # where it writes its results
        check_bench_serving(server)
