"""Looking for clients that have hung up must not fill the HTTP process.

SGLang wakes each waiting request every 4 s to ask whether its client is still there. With 20,000
requests waiting that is 5,000 times a second, and as many tasks: new chats wait for seconds and
more before they reach the scheduler. The interval grows here with the number of requests.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers import tokenizer_manager

__all__ = ["pace_checks"]

_MOST_PER_S = 500
"""Checks in all. Each takes about 0.2 ms, so these take a tenth of a core."""

_LEAST_S: float = tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT


def pace_checks(manager: Any) -> None:
    """Set the time between two checks of a request, by how many requests `manager` has. Those that
    wait already follow after their next check."""
    interval_s = len(manager.rid_to_state) / _MOST_PER_S
    tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT = max(_LEAST_S, interval_s)
