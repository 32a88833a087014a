"""What a running server's scheduler has done."""

from __future__ import annotations

import pytest


def prefilled(server):
    """Tokens, by class."""
    [state] = server.states()
    return {name: state[f"{name}_prefill_tokens"] for name in ("online", "offline")}


def is_idle(server):
    [state] = server.states()
    return not any(state[f"num_{kind}_offline"] for kind in ("waiting", "running"))


@pytest.fixture
def seen(server):
    """`seen()` -> classes of which the scheduler has prefilled anything since the last call."""
    last = prefilled(server)

    def since_last():
        nonlocal last
        before, last = last, prefilled(server)
        return {name for name in last if last[name] > before[name]}

    return since_last
