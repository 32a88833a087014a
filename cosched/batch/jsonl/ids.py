"""Two sets that stay small with half a million lines: of custom_ids, and of line numbers.

Measured with 500,000 random ids of 36 characters: a Python `set` of strings takes 65 MB, `IdSet`
17 MB and 2 to 4 µs an id, an sqlite table 3 MB but 22 µs an id and a file more.
"""

from __future__ import annotations

from hashlib import blake2b

_ID_BYTES = 16
_FREE = bytes(_ID_BYTES)


class IdSet:
    """A set of strings that can only grow, up to a size known in advance.

    It keeps 16-byte digests in one open-addressed table. Two different ids out of a million share
    a digest with a probability of 1e-27: far less likely than a memory fault.
    """

    def __init__(self, *, max_ids: int) -> None:
        slots = 1 << max(4, (max_ids * 3 // 2).bit_length())  # at most two thirds full
        self._mask = slots - 1
        self._table = bytearray(slots * _ID_BYTES)
        self._max_ids = max_ids
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def add(self, text: str) -> bool:
        """Add `text`; whether it is new."""
        digest = blake2b(text.encode(), digest_size=_ID_BYTES).digest()
        table, mask = self._table, self._mask
        slot = int.from_bytes(digest[:8], "little") & mask
        while (held := table[slot * _ID_BYTES : (slot + 1) * _ID_BYTES]) != _FREE:
            if held == digest:
                return False
            slot = (slot + 1) & mask
        assert self._len < self._max_ids, f"{self._max_ids=}"
        table[slot * _ID_BYTES : (slot + 1) * _ID_BYTES] = digest
        self._len += 1
        return True


class LineSet:
    """A set of line numbers in [1, num_lines]: one bit each."""

    def __init__(self, *, num_lines: int) -> None:
        self._bits = bytearray(num_lines // 8 + 1)
        self._num_lines = num_lines

    def __contains__(self, number: int) -> bool:
        return bool(self._bits[number >> 3] & (1 << (number & 7)))

    def add(self, number: int) -> None:
        assert 1 <= number <= self._num_lines, f"{number=} {self._num_lines=}"
        self._bits[number >> 3] |= 1 << (number & 7)
