"""The server of a job: one that already runs, or one that the job starts and stops."""

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
from cosched.batch.jsonl.errors import (
    JobFileError,
    ServerGoneError,
    ServerRefusedError,
    first_error,
)
from cosched.errors import ConfigError

_HOST = "127.0.0.1"
_POLL_S = 0.2
_STOP_S = 30.0
_START_TIMEOUT_S = 1800.0
"""Large models load slowly; a server that fails to start exits earlier by itself."""
_TAIL_BYTES = 4096
_PR_SET_PDEATHSIG = 1
_RESERVED_FLAGS = ("--model-path", "--model", "--host", "--port")


def check_flags(flags: Sequence[str]) -> None:
    """ConfigError if SGLang flags contain one that run_batch sets itself."""
    for flag in flags:
        name = flag.split("=", 1)[0]
        if name in _RESERVED_FLAGS:
            raise ConfigError(
                f"{name} after -- is set by run_batch itself; use its own --model-path and --port"
            )


_PORTS = range(10_000, 22_000, 20)
"""Linux gives client connections ports from 32768 on; SGLang takes others from 22000 on, and with
DP attention those at 233 to 246 beyond the server's: none of them is here."""
_reserved: dict[int, int] = {}
"""Ports that this process has given, and file descriptors that keep other processes from it."""


def free_port() -> int:
    """A port without a listener, which nothing else takes while a server loads its model: neither
    client connections nor SGLang nor another call of this function, here or in another process."""
    ports = random.sample(_PORTS, len(_PORTS))
    for port in [*(one for one in ports if one not in _reserved), *_reserved]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_HOST, port))
            if port not in _reserved:
                _reserved[port] = _reservation(port)
            return port
    raise ConfigError(
        f"no port is free among {_PORTS.start}, {_PORTS.start + _PORTS.step}, ..., {_PORTS[-1]}; "
        "name one with --port"
    )


def _reservation(port: int) -> int:
    """The file descriptor of a name, which the system frees with the process. OSError: another
    process has it."""
    with socket.socket(socket.AF_UNIX) as found:
        if sys.platform == "linux":
            found.bind(f"\0cosched-port-{port}")
        return found.detach()


def server_command(*, model_path: str, port: int, flags: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "cosched.launch_server", "--model-path", model_path]
    # The job is the only client, and sends its lines one by one.
    command += ["--cosched-batches", "off"]
    return [*command, "--host", _HOST, "--port", str(port), *flags]


def own_base_url(port: int) -> str:
    return f"http://{_HOST}:{port}"


@contextlib.asynccontextmanager
async def serving(
    *, model_path: str, flags: Sequence[str], log_path: Path, port: int | None = None
) -> AsyncIterator[str]:
    """Start a server for the block, on a free port by default; its base URL. ServerGoneError or
    ServerRefusedError if it does not become ready, or dies during the block."""
    port = port or free_port()
    client = Client(base_url=own_base_url(port), concurrency=1, rules=RetryRules(max_wait_s=30.0))
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
        raise first_error(errors) from errors
    finally:
        await asyncio.to_thread(server.stop)


class RunningServer:
    """A server that the job neither starts nor stops."""

    def __init__(
        self,
        *,
        client: Client,
        max_wait_s: float,
        absent_wait_s: float,
        require_offline: bool,
        warn: Callable[[str], None],
    ) -> None:
        """require_offline: refuse a server that does not know offline requests, instead of a
        warning."""
        self._client = client
        self._max_wait_s = max(max_wait_s, absent_wait_s)
        self._absent_wait_s = absent_wait_s
        self._require_offline = require_offline
        self._warn = warn

    async def ready(self) -> None:
        await self._client.wait_ready(
            max_wait_s=self._max_wait_s, absent_wait_s=self._absent_wait_s
        )
        if await self._client.serves_classes():
            return
        fault = (
            f"{self._client.base_url} does not know offline requests (stock SGLang, cosched's "
            "policy 'sglang', or another program): it treats these as online requests"
        )
        if self._require_offline:
            raise ServerRefusedError(f"{fault} (--require-offline)")
        self._warn(
            f"WARNING: {fault}, and its users wait behind them. A small --concurrency reduces the "
            "wait; --require-offline refuses such a server"
        )

    async def watch(self) -> None:
        """Returns at once: if the server is away, requests fail."""

    def stop(self) -> None:
        """It keeps running for its other clients."""


class OwnServer:
    """A child process with its own process group, so that Ctrl-C does not reach it."""

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
            raise ServerRefusedError(str(error)) from None  # the next start would fail too

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
        """ServerGoneError, with the end of the server's log, if it has exited."""
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
        with contextlib.suppress(ProcessLookupError):  # remaining child processes
            os.killpg(group, signal.SIGKILL)
        self._process.wait()

    def _log_tail(self) -> str:
        with open(self._log_path, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip() or "(empty)"
