"""Servers whose HTTP side cosched cannot see are refused, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.errors import ConfigError
from cosched_patches.http_processes import SEAM


@pytest.fixture
def refuse(monkeypatch):
    import sglang.srt.arg_groups.overrides as overrides

    monkeypatch.setattr(overrides, "resolving_view", lambda server_args: server_args)
    hook = SEAM.hook()
    return lambda workers: hook(SimpleNamespace(tokenizer_worker_num=workers), launch_callback=None)


def test_one_process_may_start(refuse):
    assert refuse(1) is None


def test_http_workers(refuse):
    with pytest.raises(ConfigError, match=r"^--tokenizer-worker-num 4 cannot go with cosched: "):
        refuse(4)


def test_rust_front_end(refuse, monkeypatch):
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ConfigError, match=r"^SGLANG_RUST_SERVER cannot go with cosched: "):
        refuse(1)
