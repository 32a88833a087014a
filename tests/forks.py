"""Many processes in which nothing has happened but SGLang's import, for the price of one.

Importing SGLang takes longer than what a test does then, and its plugin state cannot be rolled
back. So one process imports it, and runs each program in a fork of itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.serving import ROOT, SEARCH_PATH

_PROGRAM = """
import gc, json, os, sys
import cosched.bootstrap
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler

gc.freeze()  # otherwise each child looks through all of it when it ends
for line in sys.stdin:
    task = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, path in enumerate(task["files"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(task["env"])
    sys.argv[1:] = task["arguments"]
    exec(compile(task["code"], "<test>", "exec"), {"__name__": "__main__"})
    raise SystemExit
"""


class Forks:
    """Runs programs; call :meth:`close` at the end."""

    def __init__(self, folder: Path, *, cleared: tuple[str, ...]) -> None:
        """``folder``: for what they print. ``cleared``: variables that are empty unless given."""
        self._folder = folder
        self._count = 0
        self._parent = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM],
            env=os.environ | dict.fromkeys(cleared, "") | {"PYTHONPATH": SEARCH_PATH},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, code: str, *arguments: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """What the program did, as from :func:`subprocess.run`."""
        self._count += 1
        files = [self._folder / f"{self._count}.{name}" for name in ("out", "err")]
        task = {
            "code": textwrap.dedent(code),
            "arguments": arguments,
            "env": env or {},
            "files": [str(path) for path in files],
        }
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(task) + "\n")
        self._parent.stdin.flush()
        status = int(self._parent.stdout.readline())
        stdout, stderr = (path.read_text() for path in files)
        return subprocess.CompletedProcess(arguments, status, stdout, stderr)

    def run_module(
        self, module: str, *arguments: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As ``python -m module``."""
        code = f"import runpy, sys; sys.argv[0] = {module!r}\n"
        code += f"runpy.run_module({module!r}, run_name='__main__')"
        return self.run(code, *arguments, env=env)

    def close(self) -> None:
        self._parent.communicate(timeout=60)
