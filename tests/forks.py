"""Many processes in which nothing has happened but SGLang's import, for the price of one.

Importing SGLang takes longer than what a test does then, and its plugin state cannot be rolled
back. So one process imports it, and runs each program in a fork of itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.serving import ROOT, SEARCH_PATH

_PROGRAM = """
import contextlib, gc, json, os, sys
gc.disable()  # a fifth of the time of these imports
import cosched.bootstrap
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler
import logging

logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
import sglang.srt.models.registry  # each scheduler imports all models
import sqlalchemy
from cosched_patches.internals import INTERNALS, check_internals

check_internals(INTERNALS)  # keeps what it reads in SGLang's code
import cosched.lab.local_engine, cosched.serve, cosched_patches.seams  # no effects, some seconds
gc.collect()
gc.freeze()  # otherwise each child looks through all of it when it ends
gc.enable()
for line in sys.stdin:
    if os.fork():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        continue
    task = json.loads(line)
    if child := os.fork():
        with open(task["told"], "w") as told:
            print(child, file=told, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=told)
        os._exit(0)
    if task["own_group"]:
        os.setsid()
    for number, path in enumerate(task["files"]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(task["env"])
    sys.argv[1:] = task["arguments"]
    exec(compile(task["code"], "<test>", "exec"), {"__name__": "__main__"})
    raise SystemExit
"""

# Runs a module as `python -m`. The processes that it starts are forks too: SGLang would spawn them
# and simulations have a fork server, each with an import of its own.
_MODULE = """
import multiprocessing, runpy, sys

multiprocessing.set_start_method("fork", force=True)
multiprocessing.set_start_method = lambda *arguments, **kwargs: None
fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method=None: fork
sys.argv[0] = {module!r}
runpy.run_module({module!r}, run_name="__main__")
"""


def _is_readable(file: int, timeout_s: float | None) -> bool:
    """Whatever its number: `select.select` takes none above 1,023, and a test process with many
    engines behind it has more files open."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class Fork:
    """A process that :class:`Forks` started, with what is used here of ``subprocess.Popen``."""

    def __init__(self, args: Sequence[str], told: Path, parent: subprocess.Popen[str]) -> None:
        self.args = args
        self.returncode: int | None = None
        file = os.open(told, os.O_RDONLY | os.O_NONBLOCK)
        while not _is_readable(file, 1.0):
            assert parent.poll() is None, "SGLang cannot be imported"
        os.set_blocking(file, True)
        self._told = open(file)
        self.pid = int(self._told.readline())

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, as ``Popen.wait``."""
        if self.returncode is None:
            if not _is_readable(self._told, timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode


class Forks:
    """Runs programs, from when one is asked for; call :meth:`close` at the end."""

    def __init__(self, folder: Path, *, cleared: tuple[str, ...]) -> None:
        """``folder``: for what they print. ``cleared``: variables that are empty unless given."""
        self._folder = folder
        self._env = os.environ | dict.fromkeys(cleared, "") | {"PYTHONPATH": SEARCH_PATH}
        self._count = 0
        self._parent: subprocess.Popen[str] | None = None

    def run(
        self, code: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """What the program did, as from :func:`subprocess.run`."""
        files = [self._folder / f"{self._count}.{name}" for name in ("out", "err")]
        status = self._start(code, arguments, env=env, files=files).wait()
        stdout, stderr = (path.read_text() for path in files)
        return subprocess.CompletedProcess(arguments, status, stdout, stderr)

    def run_module(
        self,
        module: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> subprocess.CompletedProcess[str]:
        """As ``python -m module`` in `folder`."""
        code = f"import os; os.chdir({str(folder)!r}){_MODULE.format(module=module)}"
        return self.run(code, *arguments, env=env)

    def start_module(
        self, module: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None
    ) -> Fork:
        """As ``python -m module`` in a process group of its own, which prints into ``log``."""
        code = _MODULE.format(module=module)
        return self._start(code, arguments, env=env, files=[log, log], own_group=True)

    def _start(
        self,
        code: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None,
        files: Sequence[Path],
        own_group: bool = False,
    ) -> Fork:
        self._count += 1
        told = self._folder / f"{self._count}.told"
        os.mkfifo(told)
        task = {
            "code": textwrap.dedent(code),
            "arguments": arguments,
            "env": dict(env or {}),
            "files": [os.devnull, *map(str, files)],
            "own_group": own_group,
            "told": str(told),
        }
        if self._parent is None:
            self._parent = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _PROGRAM],
                env=self._env,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                text=True,
            )
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(task) + "\n")
        self._parent.stdin.flush()
        return Fork(arguments, told, self._parent)

    def close(self) -> None:
        if self._parent is not None:
            self._parent.communicate(timeout=60)
