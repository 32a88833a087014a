"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

from cosched.config import ENV_VAR
from cosched.demo_model import ensure_demo_model
from tests.forks import Forks
from tests.serving import SHARED_FLAGS, Server, Servers

# How long an example takes says nothing on a machine that others use too.
settings.register_profile("cosched", deadline=None)
settings.load_profile("cosched")

ORDER = ("ends_server", "server")


def pytest_collection_modifyitems(items):
    for item in items:
        if "servers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.server)
    # A server takes long to start and shares the cores: first what needs none, last what ends those
    # that others use.
    items.sort(key=lambda item: [item.get_closest_marker(m) is not None for m in ORDER])
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    # Only then: importing torch takes longer than many a test run.
    if gpu_items:
        from cosched.bootstrap import has_cuda

        if not has_cuda():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


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


@pytest.fixture(scope="session")
def servers(tiny_model: Path) -> Iterator[Servers]:
    """`servers.get(*flags)` -> a server of the tiny model that all tests with these flags share."""
    running = Servers(tiny_model)
    yield running
    running.close()


@pytest.fixture
def server(servers: Servers) -> Server:
    """One server for all tests that need nothing special of it: policy sarathi, tiny model."""
    return servers.get(*SHARED_FLAGS)
