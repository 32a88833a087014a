"""A server that cannot be planned ends before it starts a process."""

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
