"""An engine in this process leaves no files behind, on disk or in memory."""

import os
import tempfile
from pathlib import Path

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from tests.engine.conftest import prompt


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def shared_memory():
    """Files of SGLang in /dev/shm that this process has open."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(os.readlink(link))
        except FileNotFoundError:  # that of this listing
            continue
    return [target for target in targets if target.startswith("/dev/shm/sgl")]


def test_an_engine_leaves_nothing(make_engine, folder):
    engine = make_engine()
    engine.submit("r", prompt(1, 50), max_new_tokens=3)
    engine.run_until_idle()
    assert len(engine.replies["r"].output_ids) == 3
    engine.close()
    assert list(folder.iterdir()) == [] and shared_memory() == []
