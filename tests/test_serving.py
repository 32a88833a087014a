"""The helper that starts servers: what it does when a server does not start."""

from __future__ import annotations

import os

import pytest

from tests.serving import ServerError, start_server


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path):
    # The module `this` prints a poem and exits.
    with (
        pytest.raises(ServerError, match="exited with 0") as caught,
        start_server(tmp_path, module="this"),
    ):
        pass
    assert "Namespaces are one honking great idea" in str(caught.value)


def test_a_server_that_never_answers_is_stopped(tmp_path):
    script = tmp_path / "deaf_server.py"
    pid_file = tmp_path / "pid"
    script.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    with (
        pytest.raises(ServerError, match="did not answer within 2 s"),
        start_server(
            tmp_path,
            module="deaf_server",
            env={"PYTHONPATH": str(tmp_path)},
            ready_timeout_s=2,
        ),
    ):
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
