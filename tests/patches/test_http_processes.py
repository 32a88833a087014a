"""A server that cannot be planned ends before it starts a process."""

import os
from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import ENV_VAR, Config
from cosched.errors import ConfigError
from cosched_patches import http


def test_a_refused_server_ends_in_one_sentence(monkeypatch, capsys):
    def refuse(*_):
        raise ConfigError("no")

    monkeypatch.setenv(ENV_VAR, Config().to_json())
    monkeypatch.setattr(http, "check_arguments", refuse)
    with pytest.raises(SystemExit, match="2"):
        http.check_server(object(), launch_callback=None)
    assert capsys.readouterr().err == "cosched: no\n"


def test_further_processes_must_have_the_hooks(monkeypatch, capsys):
    """Without them offline requests would be taken for online ones."""
    monkeypatch.setenv(ENV_VAR, Config().to_json())
    monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "mine:app")
    monkeypatch.setattr(http, "check_arguments", lambda *_: None)
    http.check_server(SimpleNamespace(tokenizer_worker_num=1))
    with pytest.raises(SystemExit, match="2"):
        http.check_server(SimpleNamespace(tokenizer_worker_num=2))
    assert "SGLANG_HTTP_SERVER_APP_PATH=mine:app cannot go with" in capsys.readouterr().err
    monkeypatch.delenv("SGLANG_HTTP_SERVER_APP_PATH")
    http.check_server(SimpleNamespace(tokenizer_worker_num=2))
    assert os.environ["SGLANG_HTTP_SERVER_APP_PATH"] == "cosched_patches.http_worker:app"
