"""What a running server's scheduler has done."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from platformdirs import user_cache_path

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
CLIENTS = ("anthropic", "gateways", "openai")
INSTALL_S = 60
"""No test waits longer for packages."""


def prefilled(server):
    """Tokens, by class."""
    [state] = server.states()
    return {name: state[f"{name}_prefill_tokens"] for name in ("online", "offline")}


def is_idle(server):
    [state] = server.states()
    return not any(state[f"num_{kind}_offline"] for kind in ("waiting", "running"))


@pytest.fixture
def seen(server):
    """`seen()` -> classes of which the scheduler has prefilled anything since the last call."""
    last = prefilled(server)

    def since_last():
        nonlocal last
        before, last = last, prefilled(server)
        return {name for name in last if last[name] > before[name]}

    return since_last


def pip_install(requirements, folder):
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(folder), "-r", str(requirements)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="session", autouse=True)
def client_packages(request):
    """`client_packages(name)` -> a folder with the packages of ``requirements/clients-NAME.txt``;
    skips where they cannot be had. They are installed once per machine, beside other tests."""
    wanted = any("/test_clients_live.py" in item.nodeid for item in request.session.items)
    folders, running = {}, {}
    for name in CLIENTS:
        requirements = REQUIREMENTS / f"clients-{name}.txt"
        digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
        folders[name] = user_cache_path("cosched") / f"clients-{name}-{digest}"
        if wanted and not folders[name].exists():
            temporary = folders[name].with_name(f".{folders[name].name}")
            shutil.rmtree(temporary, ignore_errors=True)
            running[name] = pip_install(requirements, temporary), temporary

    def ready(name):
        if name in running:
            process, temporary = running.pop(name)
            try:
                told, _ = process.communicate(timeout=INSTALL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                pytest.skip(f"the packages took more than {INSTALL_S} s to install")
            if process.returncode:
                pytest.skip(f"the packages cannot be installed: {told[-300:]}")
            temporary.rename(folders[name])
        return folders[name]

    yield ready
    for process, _ in running.values():
        process.kill()
        process.wait()
