"""The server of a job: one that runs already, or one that the job starts and stops itself."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from cosched.batch.jsonl.client import Client, RetryRules
from cosched.batch.jsonl.errors import JobFileError, ServerGoneError, ServerRefusedError
from cosched.errors import ConfigError, CoschedError

_HOST = "127.0.0.1"
_POLL_S = 0.2
_STOP_S = 30.0
_START_TIMEOUT_S = 1800.0
"""Large models load for long; a server that fails to start ends earlier by itself."""
_TAIL_BYTES = 4096
_PR_SET_PDEATHSIG = 1
_OURS = ("--model-path", "--model", "--host", "--port")


def check_flags(flags: Sequence[str]) -> None:
    """Raise ConfigError when SGLang flags contain one that run_batch sets itself."""
    for flag in flags:
        name = flag.split("=", 1)[0]
        if name in _OURS:
            raise ConfigError(
                f"{name} after -- is set by run_batch itself; use its own --model-path and --port"
            )


def free_port() -> int:
    """One that nobody listens at, and that no connection gets by chance while a server loads its
    model: below those that Linux gives to clients."""
    ports = list(range(10_000, 32_768))
    random.shuffle(ports)
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            return port
    raise ConfigError("no port is free between 10000 and 32767; name one with --port")


def server_command(*, model_path: str, port: int, flags: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "cosched.launch_server", "--model-path", model_path]
    # The job is its only client, and sends lines itself.
    command += ["--cosched-batches", "off"]
    return [*command, "--host", _HOST, "--port", str(port), *flags]


def own_base_url(port: int) -> str:
    return f"http://{_HOST}:{port}"


@contextlib.asynccontextmanager
async def serving(
    *, model_path: str, flags: Sequence[str], log_path: Path, port: int | None = None
) -> AsyncIterator[str]:
    """A server of one's own within the block, on a free port unless one is given; its base URL.

    Raises ServerGoneError or ServerRefusedError when it does not become ready, and in the midst of
    the block when it dies.
    """
    port = port or free_port()
    client = Client(
        base_url=own_base_url(port),
        concurrency=1,
        rules=RetryRules(max_wait_s=30.0),
        rng=random.Random(0),
        clock=time.monotonic,
    )
    server = OwnServer(
        client=client,
        command=server_command(model_path=model_path, port=port, flags=flags),
        log_path=str(log_path),
        start_timeout_s=_START_TIMEOUT_S,
    )
    try:
        async with client:
            await server.ready()
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(server.watch())
                yield client.base_url
                watch.cancel()
    except BaseExceptionGroup as errors:
        raise _cause(errors) from errors
    finally:
        await asyncio.to_thread(server.stop)


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error a user can act on: when a server goes, all that waits for it fails at once."""
    found = group.subgroup(CoschedError)
    error: BaseException = found or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class RunningServer:
    """A server that somebody else looks after."""

    def __init__(
        self,
        *,
        client: Client,
        max_wait_s: float,
        absent_wait_s: float,
        require_offline: bool = False,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """absent_wait_s  how long to wait where nobody listens yet
        require_offline  refuse a server that does not know offline requests, which else `warn` is
                         told of"""
        self._client = client
        self._max_wait_s = max(max_wait_s, absent_wait_s)
        self._absent_wait_s = absent_wait_s
        self._require_offline = require_offline
        self._warn = warn

    async def ready(self) -> None:
        await self._client.wait_ready(
            max_wait_s=self._max_wait_s, check=lambda: None, absent_wait_s=self._absent_wait_s
        )
        if await self._client.serves_classes():
            return
        fault = (
            f"{self._client.base_url} does not know offline requests (stock SGLang, cosched's "
            "policy 'sglang', or another program): it takes these for chat"
        )
        if self._require_offline:
            raise ServerRefusedError(f"{fault} (--require-offline)")
        self._warn(
            f"WARNING: {fault}, and its users wait behind them. A small --concurrency spares them; "
            "--require-offline refuses such a server"
        )

    async def watch(self) -> None:
        """Returns at once: its absence shows in requests that fail."""

    def stop(self) -> None:
        """It goes on for others."""


class OwnServer:
    """A child process in a process group of its own, so that Ctrl-C does not reach it."""

    def __init__(
        self, *, client: Client, command: Sequence[str], log_path: str, start_timeout_s: float
    ) -> None:
        self._client = client
        self._command = command
        self._start_timeout_s = start_timeout_s
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    async def ready(self) -> None:
        self._start()
        try:
            await self._client.wait_ready(max_wait_s=self._start_timeout_s, check=self._check_alive)
        except ServerGoneError as error:
            if self._process is None or self._process.poll() is None:
                raise
            raise ServerRefusedError(str(error)) from None  # it will not start the next time either

    async def watch(self) -> None:
        while True:
            self._check_alive()
            await asyncio.sleep(_POLL_S)

    def _start(self) -> None:
        prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

        def die_with_parent() -> None:
            # Without it `kill -9` on the job would leave a server that holds the GPU.
            if prctl is not None:
                prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        try:
            with open(self._log_path, "wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        except OSError as error:
            raise JobFileError(f"cannot start the server: {error}") from error

    def _check_alive(self) -> None:
        """Raise ServerGoneError, with the end of the server's log, when it has exited."""
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            raise ServerGoneError(
                f"the server exited with code {code}; the end of its log ({self._log_path}):\n"
                f"{self._log_tail()}"
            )

    def stop(self) -> None:
        """Stop the whole process group. Blocks until it is gone."""
        if self._process is None:
            return
        group = self._process.pid
        if self._process.poll() is None:
            os.killpg(group, signal.SIGTERM)
            deadline_s = time.monotonic() + _STOP_S
            while self._process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):  # what is left of its children
            os.killpg(group, signal.SIGKILL)
        self._process.wait()

    def _log_tail(self) -> str:
        with open(self._log_path, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip() or "(empty)"
