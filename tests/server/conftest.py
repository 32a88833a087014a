"""What cosched tells of a running server's scheduler."""

from __future__ import annotations

import httpx
import pytest


def state_of(server):
    info = httpx.get(f"{server.url}/get_server_info", timeout=30).json()
    return info["internal_states"][0]["cosched"]


def prefilled(server):
    """Tokens, by class."""
    state = state_of(server)
    return {name: state[f"{name}_prefill_tokens"] for name in ("online", "offline")}


def is_idle(server):
    state = state_of(server)
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
