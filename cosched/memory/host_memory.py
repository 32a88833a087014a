"""Host memory (HiCache): copies of KV, which are loaded when a request needs them.

What is loaded takes KV memory (`Match.to_load`) and time; it stays in host memory.
"""

from __future__ import annotations

from cosched.core.memories import Memory


class HostMemory(Memory):
    """num_free: KV tokens."""

    name = "host"

    def __init__(self, num_free: int) -> None:
        self._num_free = num_free

    def can_copy(self, num_tokens: int) -> bool:
        return num_tokens <= self._num_free
