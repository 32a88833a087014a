"""Servers whose HTTP side cosched cannot see are refused, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import ENV_VAR
from cosched_patches import http


@pytest.fixture
def refuse(monkeypatch, capsys):
    monkeypatch.setattr(http, "resolving_view", lambda server_args: server_args)
    monkeypatch.delenv(ENV_VAR, raising=False)

    def message(workers):
        """None: the server may start."""
        try:
            return http.check_server(
                SimpleNamespace(tokenizer_worker_num=workers), launch_callback=None
            )
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
