"""Sessions: turns in a closed loop, and when sessions begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cosched.core.request import RequestClass
from cosched_traces.seeds import KEYS, key_base, rng_of
from cosched_traces.workload import Segment, TraceRequest, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a session. segments: its whole prompt; think_s: from the answer before [s]."""

    segments: tuple[Segment, ...]
    num_output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Turns in their order. head_key: of the segment that other sessions begin with too; None: they
    share nothing."""

    name: str
    turns: tuple[Turn, ...]
    head_key: int | None = None

    @property
    def think_s(self) -> float:
        """All think times between its turns; it lasts longer than that [s]."""
        return sum(turn.think_s for turn in self.turns[1:])

    def again(self, lap: int) -> Session:
        """The same with contents of its own behind the head."""
        shift = key_base("lap", lap)

        def moved(segment: Segment) -> Segment:
            if segment.key == self.head_key:
                return segment
            return Segment((segment.key + shift) % KEYS, segment.num_tokens)

        turns = tuple(
            replace(turn, segments=tuple(map(moved, turn.segments))) for turn in self.turns
        )
        return replace(self, name=f"{self.name}/{lap}", turns=turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Sessions without end. notes: where they came from."""

    supply: Iterator[Session]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSessions:
    """Sessions of a file, in its order. notes: what was left out of it."""

    sessions: tuple[Session, ...]
    notes: tuple[str, ...] = ()

    def supply(self, *, seed: int) -> Iterator[Session]:
        """Each of them in an order by the seed, then again with other contents, and so on."""
        lap = 0
        while True:
            for place in rng_of(seed, "sessions", lap).permutation(len(self.sessions)).tolist():
                session = self.sessions[place]
                yield session.again(lap) if lap else session
            lap += 1


def start_at(name: str, sessions: Sessions, times_s: Sequence[float]) -> Workload:
    """A session begins at each of the times (ascending), however many are under way."""
    requests: list[TraceRequest] = []
    for time_s, session in zip(times_s, sessions.supply, strict=False):
        requests += _requests(session, arrival_s=time_s)
    note = f"{len(times_s)} sessions begin"
    return Workload(name=name, requests=tuple(requests), notes=(*sessions.notes, note))


def keep_under_way(
    name: str,
    sessions: Sessions,
    *,
    num_sessions: int,
    duration_s: float,
    seed: int,
    ramp_s: float = 60.0,
) -> Workload:
    """So many sessions under way at any time: when one ends, the next begins in its place.

    The first ones are met at a turn drawn evenly, as a server that has run for long would have
    them, and come evenly spread over `ramp_s`. Each place has sessions for `duration_s` at least,
    however fast they are answered.
    """
    rng = rng_of(seed, "under way")
    requests: list[TraceRequest] = []
    for place in range(num_sessions):
        session = next(sessions.supply)
        skipped = int(rng.integers(len(session.turns)))
        session = replace(session, turns=session.turns[skipped:])
        arrival_s = ramp_s * place / num_sessions
        mine = _requests(session, arrival_s=arrival_s)
        lasts_s = arrival_s + session.think_s
        while lasts_s < duration_s:
            session = next(sessions.supply)
            mine += _requests(session, arrival_s=arrival_s, after=mine[-1].rid)
            lasts_s += max(session.turns[0].think_s + session.think_s, 1.0)
        requests += mine
    note = f"{num_sessions} sessions under way at a time, {seed=}"
    return Workload(name=name, requests=tuple(requests), notes=(*sessions.notes, note))


def _requests(
    session: Session, *, arrival_s: float, after: str | None = None
) -> list[TraceRequest]:
    requests = []
    for index, turn in enumerate(session.turns):
        request = TraceRequest(
            rid=f"{session.name}.{index}",
            request_class=RequestClass.ONLINE,
            arrival_s=arrival_s,
            num_output_tokens=turn.num_output_tokens,
            segments=turn.segments,
            after=after,
            think_s=turn.think_s if after is not None else 0.0,
            session=session.name,
        )
        requests.append(request)
        after = request.rid
    return requests
