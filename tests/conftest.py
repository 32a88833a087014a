"""Fixtures shared by all tests. What a test may run on, the cheapest first:

* `tests.factories`: requests and views by hand, for policies, pool and ledger
* `tests.simulated`: small simulated runs, and their plans
* `tests.batch.stand_in`: the API of batches over an engine that answers as the test says
* `tests.fake_server`: an HTTP server that misbehaves, for clients
* `make_engine` (tests/engine/conftest.py): SGLang's scheduler with a tiny model in this process
* `tests.soak`: random traffic of all kinds on such a scheduler, with checks in each iteration
* `forks`, `servers`: processes that have imported SGLang, and servers that tests share
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

# Before torch is there. Each operation waits for the slowest of its threads, and the workers have a
# core each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where servers keep batches: not in the home of who runs the tests.
_data_home = tempfile.TemporaryDirectory(prefix="cosched-data-")
os.environ["XDG_DATA_HOME"] = _data_home.name
gc.disable()  # until all is imported: a fifth of the time would go into looking for garbage there

from cosched.batch.jsonl.server import OwnServer  # noqa: E402
from cosched.config import ENV_VAR  # noqa: E402
from cosched.lab.demo_model import ensure_demo_model  # noqa: E402
from tests.forks import Forks  # noqa: E402
from tests.serving import SHARED_FLAGS, Server, Servers  # noqa: E402

# How long an example takes says nothing on a machine that others use too. The examples are the same
# in each run: what fails, fails for a change.
settings.register_profile("cosched", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("cosched")


# The files of tests with servers or forks. One worker runs them all, so that they can share these.
WITH_SERVERS = (
    "tests/server/",
    "tests/lab/benchmark/test_live_client.py",
    "tests/lab/test_trial.py",
    "tests/commands/test_launch_server.py",
    "tests/patches/test_seam.py",
    "tests/engine/test_lockstep.py",
    "tests/engine/test_ranks.py",
)


def pytest_collection_modifyitems(config, items):
    gc.freeze()  # modules stay: no collection looks through them
    gc.enable()
    for item in items:
        if "servers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.server)
        if is_marked(item, "server") and not item.nodeid.startswith(WITH_SERVERS):
            raise pytest.UsageError(f"add the file of {item.nodeid} to WITH_SERVERS")
    # A server takes long to start: what needs none comes first, or at the same time where there are
    # several workers. Last comes what ends servers that others use.
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(WITH_SERVERS))
    else:
        items.sort(key=lambda item: is_marked(item, "server"))
    items.sort(key=lambda item: is_marked(item, "ends_server"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    # Only then: importing torch takes longer than many a test run.
    if gpu_items:
        from cosched.bootstrap import has_cuda

        if not has_cuda():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


def pytest_runtest_setup(item):
    """With several workers, that with the servers takes longest: the others leave it the cores."""
    if hasattr(item.config, "workerinput") and not item.nodeid.startswith(WITH_SERVERS):
        os.nice(max(0, 5 - os.nice(0)))


def is_marked(item, name):
    return item.get_closest_marker(name) is not None


@pytest.hookimpl(optionalhook=True)  # there is none without xdist
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ServersTogether(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "servers" if nodeid.startswith(WITH_SERVERS) else super()._split_scope(nodeid)

    return ServersTogether(config, log)


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """Each engine and each simulation collects garbage; what was there before is none."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test leaves in the environment (a server's configuration, say) is gone after it."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Directory of the tiny model, float32. Made once per machine, in the user's cache."""
    return ensure_demo_model(size="tiny", dtype="float32")


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """`forks.run(code, *arguments)`: in a process of its own that has SGLang imported, not more."""
    running = Forks(tmp_path_factory.mktemp("forks"), cleared=(ENV_VAR, "SGLANG_PLUGINS"))
    yield running
    running.close()


@pytest.fixture
def forked_own_server(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that a command in this process starts for itself is a fork."""

    def start(server: OwnServer) -> None:
        _, _, module, *arguments = server._command
        log = Path(server._log_path)
        server._process = forks.start_module(module, *arguments, log=log, env=os.environ)

    monkeypatch.setattr(OwnServer, "_start", start)


@pytest.fixture(scope="session")
def servers(
    tiny_model: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """`servers.get(*flags)` -> a server of the tiny model that all tests with these flags share."""
    running = Servers(tiny_model, forks, tmp_path_factory.mktemp("servers"))
    yield running
    running.close()


@pytest.fixture
def server(servers: Servers) -> Server:
    """One server for all tests that need nothing special of it: policy sarathi, tiny model."""
    return servers.get(*SHARED_FLAGS)
