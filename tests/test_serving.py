"""The helper that starts servers: what it does when a server does not start."""

from __future__ import annotations

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
