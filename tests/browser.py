"""A browser for tests: Chromium without a window, told what to do over its DevTools pipe."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")

# Chromium reads commands from descriptor 3 and writes to 4, each message with a zero byte behind.
_PIPE = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--hide-scrollbars",
)


def find_browser() -> str | None:
    """Where it is; None: there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One tab. What it complains of is in `complaints`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.complaints: list[str] = []
        self._process = process
        self._ids = itertools.count(1)
        self._left = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Of the DevTools protocol. Raises `AssertionError` where Chromium refuses."""
        message = {"id": next(self._ids), "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        deadline_s = time.monotonic() + 240
        while (answer := self._receive(deadline_s)).get("id") != message["id"]:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def value(self, expression: str) -> Any:
        """Of JavaScript in the page; awaited where it is a promise."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, (expression, done)
        return done["result"].get("value")

    def wait_for(self, expression: str, *, timeout_s: float = 120) -> None:
        """Until it is true in the page."""
        deadline_s = time.monotonic() + timeout_s
        while not self.value(expression):
            assert time.monotonic() < deadline_s, (expression, self.complaints)
            time.sleep(0.02)

    def show(self, url: str, *, width: int, height: int, is_dark: bool = False) -> None:
        """Go there, in a window of so many pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def before_scripts(self, script: str) -> None:
        """Run ``script`` in each page that is shown from now on, ahead of the page's own."""
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def picture(self, path: Path) -> None:
        """All of the page, as PNG, also what one would have to scroll to."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        while b"\0" not in self._left:
            ready, _, _ = select.select([source], [], [], max(deadline_s - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            more = os.read(source, 1 << 20)
            assert more, "the browser has ended"
            self._left += more
        message, _, self._left = self._left.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))


@contextlib.contextmanager
def browsing(program: str, folder: Path) -> Iterator[Browser]:
    """It keeps what it has to keep in ``folder``."""
    command = [program, *_FLAGS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        ["/bin/sh", "-c", _PIPE, "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Browser(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=120)
