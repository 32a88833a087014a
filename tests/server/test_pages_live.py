"""Every command of the README and of the pages for operators runs as written.

In a shell as a new user has it: after ``scripts/setup``, in the activated environment. Port 30000
is replaced by that of the server, and curl fails on HTTP errors (by its settings). What
needs SGLang and no server runs in a fork that has imported it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.serving import GUARDED_FLAGS, ROOT, SEARCH_PATH

pytestmark = pytest.mark.server

PAGES = (
    "README.md",
    "docs/operate.md",
    "docs/add_to_server.md",
    "docs/batch_cost.md",
    "docs/first_batch.md",
)
VENV = ROOT / ".venv"
IS_OWN = not VENV.is_symlink()
"""The environment is this checkout's: scripts/setup has nothing to do, and its paths lead here."""

# Command as written -> why it is not run.
EXCEPTED = {
    "scripts/serve": "its end is tested below; tests.serving.Servers starts servers",
    "source .venv/bin/activate": "each command runs after it",
    "scripts/test": "runs this test",
    'pip install -e ".[gpu]"': "installs 11 GB for a GPU",
    **dict.fromkeys(
        ("pip install --dry-run .", "pip install ."), "scripts/setup installs this checkout"
    ),
    "cosched trial": "takes minutes, and files of the reader; tests/lab/test_trial.py runs it",
    "cosched serve --model-path meta-llama/Llama-3.1-8B-Instruct": "needs a GPU and the model",
    **dict.fromkeys(
        ("install -d", "sqlite3", "cp -a", "pg_dump", "mv FOLDER", "pg_restore"),
        "copies a store of batches that is not there",
    ),
    "cosched serve --model-path MODEL --enable-metrics --admin-api-key SECRET": (
        "these are flags of the server; test_entry_points_live.py runs the command"
    ),
    "cosched serve --model-path MODEL --enable-trace": "tests/server/test_tracing_live.py runs it",
    """COSCHED_CONFIG='{"policy": "cosched"}' sglang serve --model-path MODEL""": (
        "test_entry_points_live.py runs it"
    ),
}

# What takes minutes, or asks port 30000 by default: the text that is replaced, and by what.
CHANGED = {
    "cosched batch -i in.jsonl": (
        "in.jsonl",
        "in.jsonl --base-url http://localhost:30000",
    ),
    "cosched config --model-path meta-llama": ("meta-llama/Llama-3.1-8B-Instruct", "MODEL"),
    "cosched simulate": ("--duration 600", "--duration 4"),
    "cosched bench run --settings s0,s1": ("--duration 200", "--duration 1"),
    "cosched bench suite yardstick": (
        "yardstick --scenarios 'h100-8b/i,h100-8b/iii' --data-dir DIR",
        "quick --scenarios questions --settings s0,cosched",
    ),
}

IN_FORK = ("cosched simulate", "cosched bench", "cosched config")

# With exit code 4 while the server is not done.
MAY_WAIT = ("cosched batch status", "cosched batch fetch", "cosched batch cancel")


def commands_in(text):
    """Of the blocks of bash, without comments; a command may go over several lines."""
    for block in re.findall(r"```bash\n(.*?)```", text, flags=re.S):
        command = ""
        for line in block.splitlines():
            line = re.sub(r"(^|\s+)#.*$", "", line)
            command = f"{command}\n{line}" if command else line
            if command.endswith("\\") or command.count("'") % 2:
                continue
            if command.strip():
                yield command
            command = ""
        assert not command


WRITTEN = [command for page in PAGES for command in commands_in((ROOT / page).read_text())]


def is_excepted(command):
    return any(command == one or command.startswith(f"{one} ") for one in EXCEPTED)


RUN = [command for command in WRITTEN if not is_excepted(command)]


@pytest.fixture
def server(servers):
    return servers.get(*GUARDED_FLAGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands run: with a file of requests, and curl's settings."""
    folder = tmp_path_factory.mktemp("user")
    messages = [{"role": "user", "content": "Hello!"}]
    body = {"model": "demo", "max_tokens": 4, "messages": messages}
    url = "/v1/chat/completions"
    lines = [{"custom_id": f"q{n}", "method": "POST", "url": url, "body": body} for n in range(20)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time = 120\n")
    return folder


def run(command, folder, *, stdin=None):
    env = {
        "HOME": os.environ["HOME"],
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "CURL_HOME": str(folder),
    }
    if not IS_OWN:
        env["PYTHONPATH"] = SEARCH_PATH
    script = f"source {VENV}/bin/activate && cd {folder} && {command}"
    return subprocess.run(
        ["bash", "-c", script], env=env, input=stdin, capture_output=True, text=True, timeout=300
    )


def test_every_exception_and_every_change_is_of_a_command_that_is_there():
    for start in [*EXCEPTED, *CHANGED]:
        assert any(command.startswith(start) for command in WRITTEN), start
    assert len(RUN) >= 8


@pytest.mark.parametrize("command", RUN, ids=lambda command: command.split(" -")[0][:60])
def test_a_command_runs_as_written(command, server, folder, forks):
    for start, (old, new) in CHANGED.items():
        if command.startswith(start):
            assert old in command
            command = command.replace(old, new)
    command = command.replace(":30000", f":{server.port}")
    command = command.replace("MODEL", str(server.model_path))
    if command.startswith(IN_FORK):
        ended = forks.run_module(*shlex.split(command.replace("\\\n", "")), folder=folder)
    else:
        ended = run(command, folder)
    expected = {0, 4} if command.startswith(MAY_WAIT) else {0}
    assert ended.returncode in expected, f"{ended.stdout}\n{ended.stderr}\n{server.log()[-4000:]}"
    assert ended.stdout.strip()


def run_python(page, server, folder):
    """All Python blocks of a page, as one program; what it prints."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    program = "".join(blocks)
    assert ":30000/" in program
    done = run("python -", folder, stdin=program.replace(":30000/", f":{server.port}/"))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_readmes_batch_runs_as_written(server, folder):
    """On a server that was given no flag for batches."""
    records = [json.loads(line) for line in run_python("README.md", server, folder) if line]
    assert [record["custom_id"] for record in records] == [f"q{n}" for n in range(100)]
    assert {record["response"]["status_code"] for record in records} == {200}
    [folder] = re.findall(r"batches: (.*), no open batches", server.log())
    assert folder.endswith(f"/cosched/batches/demo-{server.port}")
    assert Path(folder, "batches.sqlite").exists()


def test_the_first_batch_runs_as_written_with_openais_client(server, folder):
    num_lines = len((folder / "in.jsonl").read_text().splitlines())
    *_, last = run_python("docs/first_batch.md", server, folder)
    assert last == f"completed {num_lines} answers"


@pytest.mark.skipif(not IS_OWN, reason="scripts/setup would install this checkout elsewhere")
def test_scripts_serve_refuses_a_wrong_flag_in_one_sentence_and_names_the_environment(folder):
    ended = run(f"{ROOT}/scripts/serve --prot 1", folder)
    assert ended.returncode == 2
    first, last = ended.stderr.splitlines()[0], ended.stderr.splitlines()[-1]
    assert first.endswith(f"source {ROOT}/.venv/bin/activate")
    assert last.startswith("cosched: unknown flag --prot; did you mean --port?")
