"""Each way to start a server on the CPU install starts one that answers.

``scripts/serve`` is ``python -m cosched.launch_server``, and so is the script ``cosched`` to the
processes that it spawns.
"""

from __future__ import annotations

import re
import subprocess
import sys

import httpx
import pytest

from cosched.config import ENV_VAR
from tests.serving import start_server

pytestmark = pytest.mark.server

CHAT = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hello!"}]}


def check_answers(server):
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=120)
    assert reply.status_code == 200, reply.text
    assert server.states()[0]["policy"] == "sarathi"
    assert "Ignore import error" not in server.log()
    assert "UserWarning" not in server.log()


def test_the_cosched_script_without_the_pth_file(server):
    """An environment that scripts/setup has not made has no file that prepares every process."""
    check_answers(server)


def test_sglangs_own_commands_with_the_plugin(tiny_model, forks, tmp_path):
    env = {ENV_VAR: '{"policy": "sarathi"}', "SGLANG_PLUGINS": "cosched"}
    with start_server(tiny_model, module="tests.plain_sglang", env=env, forks=forks) as server:
        check_answers(server)
        check_bench_serving(server, forks, tmp_path)


def test_the_pth_file_prepares_every_process():
    """Also those that SGLang's own commands start: they import SGLang before any plugin."""
    code = "import sglang, sys; assert 'cosched.bootstrap' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def check_bench_serving(server, forks, folder):
    """SGLang's benchmark client."""
    ended = forks.run_module(
        *("sglang.bench_serving", "--backend", "sglang-oai", "--base-url", server.url),
        *("--model", str(server.model_path), "--dataset-name", "random-ids", "--num-prompts", "2"),
        *("--random-input-len", "8", "--random-output-len", "4"),
        *("--output-file", str(folder / "results.jsonl")),
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"Successful requests: +2\b", ended.stdout), ended.stdout
