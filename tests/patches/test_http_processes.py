"""Servers whose HTTP side cosched cannot see are refused, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import ENV_VAR
from cosched_patches.http_processes import SEAM


@pytest.fixture
def refuse(monkeypatch, capsys):
    import sglang.srt.arg_groups.overrides as overrides

    monkeypatch.setattr(overrides, "resolving_view", lambda server_args: server_args)
    monkeypatch.delenv(ENV_VAR, raising=False)
    hook = SEAM.hook()

    def message(workers):
        """None: the server may start."""
        try:
            return hook(SimpleNamespace(tokenizer_worker_num=workers), launch_callback=None)
        except SystemExit as end:
            assert end.code == 2
            return capsys.readouterr().err

    return message


def test_one_process_may_start(refuse):
    assert refuse(1) is None


def test_http_workers(refuse):
    assert refuse(4).startswith("cosched: --tokenizer-worker-num 4 cannot go with cosched: ")


def test_rust_front_end(refuse, monkeypatch):
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    assert refuse(1).startswith("cosched: SGLANG_RUST_SERVER cannot go with cosched: ")
