"""Start a server in a process of its own, wait until it answers, and stop all of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from cosched.batch.jsonl.server import free_port

if TYPE_CHECKING:
    from tests.forks import Fork, Forks

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = (ROOT, ROOT / "kernels", ROOT / "patches", ROOT / "traces")

# What other processes import from: this checkout, and what this one was given beside it (another
# version of SGLang, by `scripts/test --sglang`).
SEARCH_PATH = os.pathsep.join(filter(None, (*map(str, SOURCE_ROOTS), os.environ.get("PYTHONPATH"))))

# Small enough for any machine; float32, because outputs are compared token by token, and SGLang
# would take float16 for a float32 model.
TEST_FLAGS = ("--dtype", "float32", "--max-total-tokens", "20000", "--mem-fraction-static", "0.2")

# Forks start sooner without a request of SGLang's own before they are ready, and with fewer rows of
# KV indices to fill.
FORK_FLAGS = ("--skip-server-warmup", "--max-running-requests", "128")

# Of the server that all tests share which need nothing special of theirs.
SHARED_DRAIN_S = 6
SHARED_FLAGS = (
    *("--cosched-policy", "sarathi", "--cosched-drain-s", str(SHARED_DRAIN_S)),
    "--enable-cache-report",
)

# Of another one, of the default policy: with metrics, an admin key, claims and a small pool of
# offline requests. The name and the key are those of README.md and docs/operate.md.
GUARDED_POOL = 20
GUARDED_ADMIN_KEY = "SECRET"
GUARDED_CLAIMS = {
    "ignore": ["priority"],
    "keys": {"tenant": {"max_online": 1}, "barred": {"max_offline": 0}},
    "floor_ratio": 0,
}
GUARDED_FLAGS = (
    *("--enable-metrics", "--admin-api-key", GUARDED_ADMIN_KEY, "--served-model-name", "demo"),
    *("--cosched-claims", json.dumps(GUARDED_CLAIMS)),
    *("--cosched-max-offline-waiting", str(GUARDED_POOL)),
)

# As a `sitecustomize` it makes an environment like one without requirements/cosched-cpu.pth, which
# scripts/setup has not made.
_WITHOUT_PTH = """
import sys
sys.meta_path = [one for one in sys.meta_path if getattr(one, "__name__", "") != "_BeforeSglang"]
"""


class ServerError(AssertionError):
    """The server did not become ready; the message ends with the tail of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server."""

    url: str
    port: int
    process: subprocess.Popen[bytes] | Fork
    log_path: Path
    model_path: Path

    def states(self, key: str = "none") -> list[dict[str, Any]]:
        """What cosched tells of the scheduler of each replica."""
        headers = {"authorization": f"Bearer {key}"}
        info = httpx.get(f"{self.url}/get_server_info", headers=headers, timeout=60).json()
        return [state.get("cosched") for state in info["internal_states"]]

    def log(self) -> str:
        """All that the server has printed so far."""
        return self.log_path.read_text(errors="replace")


@contextlib.contextmanager
def start_server(
    model_path: Path,
    *flags: str,
    module: str = "cosched.launch_server",
    command: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    ready_timeout_s: float = 400.0,
    forks: Forks | None = None,
) -> Iterator[Server]:
    """Run ``python -m module``, or `command`, on 127.0.0.1 until the block ends; yield it once it
    generates.

    ``flags`` come after :data:`TEST_FLAGS`, so they win; ``env`` is added to this process's. With
    ``forks`` the server's processes are forks, which import nothing again. At the end the whole
    process group is killed. Raises :class:`ServerError` when the process ends, or does not answer
    within ``ready_timeout_s``: far more than it takes where nothing else runs.
    """
    port = free_port() if port is None else port
    arguments = ["--model-path", str(model_path), "--host", "127.0.0.1", "--port", str(port)]
    is_fork = forks is not None and command is None
    arguments += [*TEST_FLAGS, *(FORK_FLAGS if is_fork else ()), *flags]
    with tempfile.TemporaryDirectory(prefix="cosched-server-") as folder:
        env = {"XDG_DATA_HOME": folder, **(env or {})}  # where it keeps batches by default
        log_path = Path(folder) / "server.log"
        if is_fork:
            process: subprocess.Popen[bytes] | Fork = forks.start_module(
                module, *arguments, log=log_path, env=env
            )
        else:
            command = command or [sys.executable, "-m", module]
            process = _start([*command, *arguments], log_path, env=env)
        server = Server(
            url=f"http://127.0.0.1:{port}",
            port=port,
            process=process,
            log_path=log_path,
            model_path=model_path,
        )
        try:
            _wait_until_ready(server, process, timeout_s=ready_timeout_s)
            yield server
        finally:
            _stop(process)


def _start(
    command: Sequence[str], log_path: Path, *, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """In a process group of its own, to be killed as one."""
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": SEARCH_PATH, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Servers:
    """Servers of one model, each started when first asked for and then shared.

    At most ``most`` run at a time: of more, the one that was asked for least recently is stopped.
    That with :data:`SHARED_FLAGS` is started by the script ``cosched``, in an environment without
    the .pth file; the others are forks.
    """

    def __init__(self, model_path: Path, forks: Forks, folder: Path, *, most: int = 2) -> None:
        """``folder``: for a file that servers read."""
        self.model_path = model_path
        self.most = most
        self._forks = forks
        (folder / "sitecustomize.py").write_text(_WITHOUT_PTH)
        self._without_pth = {"PYTHONPATH": f"{folder}:{SEARCH_PATH}"}
        self._running: dict[tuple[str, ...], tuple[Server, contextlib.ExitStack]] = {}

    def get(self, *flags: str) -> Server:
        """The server with these flags, to be left as it was found."""
        entry = self._running.pop(flags, None)
        if entry is None:
            while len(self._running) >= self.most:
                self._stop(next(iter(self._running)))
            stack = contextlib.ExitStack()
            if flags == SHARED_FLAGS:
                command = [str(Path(sys.executable).with_name("cosched")), "serve"]
                options = {"command": command, "env": self._without_pth}
            else:
                options = {"forks": self._forks}
            server = start_server(self.model_path, *flags, **options)
            entry = stack.enter_context(server), stack
        self._running[flags] = entry  # the most recent one is the last
        return entry[0]

    @contextlib.contextmanager
    def take(self, *flags: str) -> Iterator[Server]:
        """A server for this block alone, which may end it; without flags, any that runs."""
        flags = flags or next(reversed(self._running), SHARED_FLAGS)
        self.get(*flags)
        server, stack = self._running.pop(flags)
        with stack:
            yield server

    def close(self) -> None:
        """Stop all."""
        for flags in list(self._running):
            self._stop(flags)

    def _stop(self, flags: tuple[str, ...]) -> None:
        _, stack = self._running.pop(flags)
        stack.close()


def _wait_until_ready(
    server: Server, process: subprocess.Popen[bytes] | Fork, *, timeout_s: float
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            reason = f"exited with {process.returncode}"
        elif time.monotonic() > deadline_s:
            reason = f"did not answer within {timeout_s:g} s"
        else:
            with contextlib.suppress(httpx.TransportError):
                # The first token pays for what SGLang sets up lazily; no test should.
                if httpx.get(f"{server.url}/health_generate", timeout=30).status_code == 200:
                    return
            time.sleep(0.2)
            continue
        tail = "\n".join(server.log().splitlines()[-40:])
        raise ServerError(f"the server {reason}: {process.args!r}\n--- end of its log ---\n{tail}")


def _stop(process: subprocess.Popen[bytes] | Fork) -> None:
    """Kill the process and all it started: a shutdown takes seconds, and has tests of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=120)
