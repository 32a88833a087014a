"""The lines that a server has taken and whose results are not written yet."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    task: asyncio.Task[None]
    num_bytes: int


class LinesInFlight:
    """Of one server. They are cancelled in the event loop; any thread may read."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[int, _Sent]] = defaultdict(dict)
        """Batch -> number of its line, in the order in which they were sent."""

    def __len__(self) -> int:
        return sum(map(len, list(self._lines.values())))

    @property
    def num_bytes(self) -> int:
        return sum(map(sum, self.sizes().values()))

    def by_batch(self) -> dict[str, int]:
        """Number of lines."""
        return {name: len(some) for name, some in list(self._lines.items())}

    def sizes(self) -> dict[str, list[int]]:
        """Batch -> bytes of each line."""
        lines = list(self._lines.items())
        return {name: [one.num_bytes for one in list(some.values())] for name, some in lines}

    def add(self, batch: str, number: int, task: asyncio.Task[None], *, num_bytes: int) -> None:
        self._lines[batch][number] = _Sent(task=task, num_bytes=num_bytes)

    def remove(self, batch: str, number: int) -> None:
        self._lines[batch].pop(number, None)

    def forget(self, batches: Iterable[str]) -> None:
        for name in batches:
            self._lines.pop(name, None)

    def tasks(self, batches: Iterable[str] | None = None) -> list[asyncio.Task[None]]:
        """Of these batches, or of all."""
        names = list(self._lines) if batches is None else batches
        return [one.task for name in names for one in self._lines.get(name, {}).values()]

    async def cancel(self, batches: Iterable[str]) -> None:
        tasks = self.tasks(batches)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel_last(self, num: int) -> dict[str, Sequence[int]]:
        """Cancel the lines that were sent last, of each batch as many of its own, and remove them.
        Returns batch -> their numbers, without lines that had just ended."""
        ranked = sorted(
            (
                (place / len(some), name, number, one.task)
                for name, some in self._lines.items()
                for place, (number, one) in enumerate(some.items())
            ),
            key=lambda it: it[0],
        )
        last = [it[1:] for it in ranked[max(len(ranked) - num, 0) :]]
        for *_, task in last:
            task.cancel()
        await asyncio.gather(*(task for *_, task in last), return_exceptions=True)
        given: dict[str, list[int]] = defaultdict(list)
        for name, number, task in last:
            if task.cancelled():
                self.remove(name, number)
                given[name].append(number)
        return dict(given)
