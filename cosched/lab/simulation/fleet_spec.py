"""Replicas of a simulated fleet: when each is there, and which chats it gets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cosched.errors import ConfigError
from cosched_traces.workload import TraceRequest

_ABSENCE = re.compile(r"(\d+)@(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?")
_FORM = "REPLICA@FROM-TO or REPLICA@FROM, such as 1@60-180"


class Absence(NamedTuple):
    """A replica, numbered from 0, is not there from `start_s` to `end_s` [s]."""

    replica: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Replicas that share the online requests, in turn, and a store of batches.

    replicas  number of replicas. Each is such a machine with a server of its own
    absent    when replicas are not there: REPLICA@FROM-TO, or REPLICA@FROM to the end, separated by
              spaces; numbers from 0, times in seconds. Without --notice a replica is killed. One
              that comes back is new, with nothing cached
    notice_s  before it goes, a replica gets no requests and gives back its lines [s]
    """

    replicas: int = 1
    absent: str = ""
    notice_s: float = 0.0

    def absences(self) -> list[Absence]:
        """ConfigError where the text is wrong."""
        found = []
        for word in self.absent.split():
            match = _ABSENCE.fullmatch(word)
            if match is None:
                raise ConfigError(f"--absent: {word!r} is not {_FORM}")
            replica, start_s, end_s = match.groups()
            absence = Absence(int(replica), float(start_s), float(end_s or math.inf))
            if absence.replica >= self.replicas:
                raise ConfigError(f"--absent: {word!r}: replicas are 0 to {self.replicas - 1}")
            if absence.end_s <= absence.start_s:
                raise ConfigError(f"--absent: {word!r} ends before it begins")
            found.append(absence)
        return sorted(found)

    def lives(self) -> list[Life]:
        """In the order of replicas and of time."""
        return [life for replica in range(self.replicas) for life in self._lives_of(replica)]

    def _lives_of(self, replica: int) -> Iterator[Life]:
        start_s, count = 0.0, 0
        mine = [absence for absence in self.absences() if absence.replica == replica]
        for absence in [*mine, Absence(replica, math.inf, math.inf)]:
            if absence.start_s > start_s:
                name = f"replica-{replica}" + (f"-{count}" if count else "")
                closed_s = max(absence.start_s - self.notice_s, start_s)
                yield Life(name=name, start_s=start_s, closed_s=closed_s, end_s=absence.start_s)
                count += 1
            start_s = max(start_s, absence.end_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A replica from its start to its end.

    closed_s  from then on it gets no more requests [s]
    """

    name: str
    start_s: float
    closed_s: float = field(default=math.inf)
    end_s: float = field(default=math.inf)

    def is_open(self, now_s: float) -> bool:
        return self.start_s <= now_s < self.closed_s


def dispatched(
    requests: Sequence[TraceRequest], lives: Sequence[Life]
) -> dict[str, list[TraceRequest]]:
    """The requests of each life, in turn of those that are open. A session stays where its first
    turn was. ConfigError if none is open."""
    found: dict[str, list[TraceRequest]] = {life.name: [] for life in lives}
    homes: dict[str, str] = {}
    turn = 0
    for request in requests:
        home = homes.get(request.session) if request.session else None
        if home is None:
            there = [life for life in lives if life.is_open(request.arrival_s)]
            if not there:
                raise ConfigError(f"--absent: no replica takes requests at {request.arrival_s:g} s")
            home = there[turn % len(there)].name
            turn += 1
            if request.session:
                homes[request.session] = home
        found[home].append(request)
    return found
