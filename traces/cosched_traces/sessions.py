"""Sessions: turns in a closed loop, when sessions begin, and generated sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cosched.core.request import RequestClass
from cosched_traces.datasets import DATASETS, quantile_table
from cosched_traces.lengths import Lengths, Quantiles, Uniform
from cosched_traces.seeds import KEYS, key_base, rng_of
from cosched_traces.workload import Segment, TraceRequest, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request of a session. segments: its whole prompt; think_s: after the answer before [s]."""

    segments: tuple[Segment, ...]
    num_output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Turns in order. head_key: of the first segment if other sessions share it; None: nothing is
    shared."""

    name: str
    turns: tuple[Turn, ...]
    head_key: int | None = None

    @property
    def think_s(self) -> float:
        """Sum of the think times between its turns, a lower bound of its length [s]."""
        return sum(turn.think_s for turn in self.turns[1:])

    def again(self, lap: int) -> Session:
        """The same with new contents after the head."""
        shift = key_base("lap", lap)

        def moved(segment: Segment) -> Segment:
            if segment.key == self.head_key:
                return segment
            return segment._replace(key=(segment.key + shift) % KEYS)

        turns = tuple(
            replace(turn, segments=tuple(map(moved, turn.segments))) for turn in self.turns
        )
        return replace(self, name=f"{self.name}/{lap}", turns=turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """An endless supply of sessions. notes: their origin."""

    supply: Iterator[Session]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSessions:
    """Sessions of a file, in its order. notes: what was left out."""

    sessions: tuple[Session, ...]
    notes: tuple[str, ...] = ()

    def supply(self, *, seed: int) -> Iterator[Session]:
        """All in a seeded order, then again with new contents, and so on."""
        lap = 0
        while True:
            for place in rng_of(seed, "sessions", lap).permutation(len(self.sessions)).tolist():
                session = self.sessions[place]
                yield session.again(lap) if lap else session
            lap += 1


def start_at(name: str, sessions: Sessions, times_s: Sequence[float]) -> Workload:
    """A session begins at each of these ascending times."""
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
    """`num_sessions` active sessions at any time: when one ends, the next begins.

    The first ones begin at a turn drawn evenly, as on a server that has run for long, spread over
    `ramp_s`. There are enough sessions for `duration_s`, however fast they are answered.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSet:
    """Generated sessions. The context grows by turn: the prompt before, its answer, and new tokens.

    turns               turns of a session
    first               new tokens of the first turn
    later               new tokens of each later turn, without the answer before
    output              tokens of an answer
    think               seconds from an answer to the next turn
    head_tokens         lengths of the shared heads, of which each session begins with one, drawn
                        evenly. Empty: sessions share nothing
    max_context_tokens  a session ends before a prompt and its answer would exceed this
    """

    turns: Lengths
    first: Lengths
    later: Lengths
    output: Lengths
    think: Quantiles
    max_context_tokens: int
    head_tokens: tuple[int, ...] = ()

    def supply(self, name: str, *, seed: int) -> Iterator[Session]:
        index = 0
        while True:
            yield self._session(name, seed=seed, index=index)
            index += 1

    def _session(self, name: str, *, seed: int, index: int) -> Session:
        rng = rng_of(seed, name, "session", index)
        num_turns = int(self.turns.sample(rng, 1)[0])
        brought = [*self.first.sample(rng, 1).tolist(), *self.later.sample(rng, num_turns).tolist()]
        outputs = self.output.sample(rng, num_turns).tolist()
        think_s = [0.0, *self.think.values(rng, num_turns - 1).tolist()]
        head: tuple[Segment, ...] = ()
        if self.head_tokens:
            kind = int(rng.integers(len(self.head_tokens)))
            head = (Segment(key_base(name, seed, "heads") + kind, self.head_tokens[kind]),)
        own_key = key_base(name, seed, "own") + index
        num_head_tokens = sum(segment.num_tokens for segment in head)
        num_own_tokens = 0
        turns: list[Turn] = []
        for turn in range(num_turns):
            num_own_tokens += brought[turn]
            num_tokens = num_head_tokens + num_own_tokens + outputs[turn]
            if turns and num_tokens > self.max_context_tokens:
                break
            turns.append(
                Turn(
                    segments=(*head, Segment(own_key, num_own_tokens)),
                    num_output_tokens=outputs[turn],
                    think_s=think_s[turn],
                )
            )
            num_own_tokens += outputs[turn]
        return Session(
            name=f"{name}-{index}",
            turns=tuple(turns),
            head_key=head[0].key if head else None,
        )


# Quantiles of 40 sessions of callanjfox/kv-cache-tester (Apache-2.0), sub-agents left out; think
# times of tools and persons together, cut at 60 s. Heads: six of the lengths that occur there.
AGENTS = SessionSet(
    turns=quantile_table(
        "5 6 7 7 8 9 9 12 14 15 18 22 29 32 38 45 47 51 65 67 93 107 110 112 116 120 123 125 125"
    ),
    first=quantile_table(
        "129 158 188 336 441 516 848 2235 2672 2801 3064 3492 3752 3970 4367 4601 4967 5469 5783 "
        "12253 27786 54664 58513 62362 67642 74026 77219 79773 80411"
    ),
    later=quantile_table(
        "1 1 1 1 1 10 21 28 38 57 82 130 181 243 318 388 507 702 1034 1492 2687 5655 6506 8219 "
        "9249 13222 22135 43671 55699"
    ),
    output=quantile_table(
        "4 27 59 76 94 106 116 124 132 143 155 171 188 207 231 268 304 338 397 494 671 1079 1257 "
        "1633 2327 3933 4963 5849 8810"
    ),
    think=quantile_table("0 2 3 3 4 4 4 5 5 5 6 6 7 8 8 10 11 15 19 34 60 60 60 60 60 60 60 60 60"),
    max_context_tokens=120_000,
    head_tokens=(11_249, 12_784, 14_731, 14_805, 15_330, 15_419),
)

# Lengths of a turn as EcoServe counts them in ShareGPT. Turns and think times are assumptions.
CHATS = SessionSet(
    turns=Uniform(2, 10),
    first=DATASETS["sharegpt"].prompt_lengths,
    later=DATASETS["sharegpt"].prompt_lengths,
    output=DATASETS["sharegpt"].output_lengths,
    think=Quantiles(probabilities=(0, 1), points=(10, 60)),
    max_context_tokens=16_384,
)
