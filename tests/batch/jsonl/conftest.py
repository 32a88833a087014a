"""A server that may misbehave, and a job for it."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cosched.run_batch import main
from tests.fake_server import FakeServer


class Batch:
    """A folder with an input file, and ways to run run_batch on it."""

    def __init__(self, folder: Path, server: FakeServer, out: str = "out.jsonl") -> None:
        self.folder = folder
        self.server = server
        self.input = folder / "in.jsonl"
        self.out = folder / out
        self.errors = folder / f"{out}.errors.jsonl"

    def write(self, lines: list[Any]) -> None:
        """bytes and str as they are, anything else as JSON."""
        with open(self.input, "wb") as file:
            for line in lines:
                raw = line if isinstance(line, str | bytes) else json.dumps(line)
                file.write((raw.encode() if isinstance(raw, str) else raw) + b"\n")

    def arguments(self, *options: str) -> list[str]:
        files = ["-i", str(self.input), "-o", str(self.out)]
        return [*files, "--base-url", self.server.base_url, *options]

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "cosched.run_batch", *self.arguments(*options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, process: subprocess.Popen[str], code: int = 0) -> dict[str, Any]:
        """Wait for its end; the JSON of the last line (empty when there is none)."""
        stdout, stderr = process.communicate(timeout=240)
        return self._report(process.returncode, code, stdout, stderr)

    def run(self, *options: str, code: int = 0) -> dict[str, Any]:
        """As `start` and `end`, in this process."""
        handler = signal.getsignal(signal.SIGTERM)
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                ended = main(self.arguments(*options))
            except SystemExit as end:
                ended = end.code
        signal.signal(signal.SIGTERM, handler)
        return self._report(ended, code, stdout.getvalue(), stderr.getvalue())

    def _report(self, ended: Any, code: int, stdout: str, stderr: str) -> dict[str, Any]:
        self.stdout, self.stderr = stdout, stderr
        assert ended == code, f"exit code {ended}\n{stdout}\n{stderr}"
        lines = stdout.splitlines()
        return json.loads(lines[-1]) if lines else {}

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_bytes().splitlines()]

    def failures(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.errors.read_bytes().splitlines()]

    def answered(self) -> list[str]:
        """custom_id of each answer, sorted."""
        return sorted(record["custom_id"] for record in self.answers())


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """Running; `stop` it where a test wants it to come later."""
    with FakeServer() as server:
        yield server


@pytest.fixture
def batch(tmp_path: Path, fake: FakeServer) -> Batch:
    return Batch(tmp_path, fake)
