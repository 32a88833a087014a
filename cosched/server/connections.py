"""Ends connections that are open and send nothing: each takes a file descriptor and memory, and
uvicorn waits for a request, or the rest of one, without a limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

IDLE_S = 60.0
"""Without a request, or within one whose body does not end. An upload has limits of its own."""
MOST_IDLE = 1000
"""Above which those that are idle for the longest are ended at once."""
_WITH_OWN_LIMITS = "/v1/files"


class SilentConnections:
    """Looks at the connections of one uvicorn server, again and again."""

    def __init__(self) -> None:
        self._idle_since_s: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    def end(self, connections: Iterable[Any], now_s: float) -> int:
        """End those that are silent for too long; how many."""
        idle = [one for one in list(connections) if _is_idle(one)]
        known = self._idle_since_s
        since_s = {one: known.get(one, now_s) for one in idle}
        self._idle_since_s = WeakKeyDictionary(since_s)
        idle.sort(key=since_s.__getitem__)
        num_over = max(len(idle) - MOST_IDLE, 0)
        ended = idle[:num_over]
        ended += [one for one in idle[num_over:] if now_s - since_s[one] > IDLE_S]
        for one in ended:
            one.transport.close()
        return len(ended)


def _is_idle(connection: Any) -> bool:
    """Whether it waits for its client. A web socket is left alone."""
    if not hasattr(connection, "cycle") or connection.transport is None:
        return False
    cycle = connection.cycle
    if cycle is None or cycle.response_complete:
        return True
    return bool(cycle.more_body) and not cycle.scope["path"].startswith(_WITH_OWN_LIMITS)
