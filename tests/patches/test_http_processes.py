"""Servers with HTTP processes that load no hooks are refused in one sentence."""

from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import ENV_VAR
from cosched_patches import http


@pytest.mark.parametrize(
    ("workers", "has_rust_server", "refusal"),
    [
        (1, "0", None),
        (4, "0", "--tokenizer-worker-num 4 cannot go with cosched: "),
        (1, "1", "SGLANG_RUST_SERVER cannot go with cosched: "),
    ],
)
def test_only_one_python_process_may_serve(monkeypatch, capsys, workers, has_rust_server, refusal):
    monkeypatch.setattr(http, "resolving_view", lambda server_args: server_args)
    monkeypatch.delenv(ENV_VAR, raising=False)
    monkeypatch.setenv("SGLANG_RUST_SERVER", has_rust_server)
    server_args = SimpleNamespace(tokenizer_worker_num=workers)
    if refusal is None:
        http.check_server(server_args, launch_callback=None)
        return
    with pytest.raises(SystemExit, match="2"):
        http.check_server(server_args, launch_callback=None)
    assert capsys.readouterr().err.startswith(f"cosched: {refusal}")
