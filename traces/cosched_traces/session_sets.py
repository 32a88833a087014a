"""Sessions, made: of a coding agent and of chat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cosched_traces.datasets import DATASETS, EDGES, quantile_table
from cosched_traces.lengths import Lengths, Uniform
from cosched_traces.seeds import key_base, rng_of
from cosched_traces.sessions import Session, Turn
from cosched_traces.workload import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkTimes:
    """An inverse cumulative distribution through the points ``(probability, seconds)``, straight
    between them; the first probability is 0 and the last 1."""

    probabilities: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.probabilities) == len(self.seconds) >= 2
        assert (self.probabilities[0], self.probabilities[-1]) == (0, 1)
        assert list(self.probabilities) == sorted(self.probabilities)
        assert list(self.seconds) == sorted(self.seconds) and self.seconds[0] >= 0

    def sample(self, rng: np.random.Generator, size: int) -> list[float]:
        drawn: list[float] = np.interp(rng.random(size), self.probabilities, self.seconds).tolist()
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSet:
    """Sessions whose context grows turn by turn: the prompt before, the answer to it, and what the
    turn brings.

    turns               turns of a session
    first               tokens that the first turn brings
    later               tokens that each later turn brings beside the answer before
    output              tokens of an answer
    think               seconds from an answer to the next turn
    head_tokens         lengths of the heads there are; each session begins with one of them, drawn
                        evenly. Empty: sessions share nothing
    max_context_tokens  a session ends before a prompt and its answer would exceed this
    """

    turns: Lengths
    first: Lengths
    later: Lengths
    output: Lengths
    think: ThinkTimes
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
        think_s = [0.0, *self.think.sample(rng, num_turns - 1)]
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
    think=ThinkTimes(
        probabilities=EDGES,
        seconds=(
            *(0, 2, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 7, 8, 8, 10, 11, 15, 19, 34),
            *(60,) * 9,
        ),
    ),
    max_context_tokens=120_000,
    head_tokens=(11_249, 12_784, 14_731, 14_805, 15_330, 15_419),
)

# Lengths of a turn as EcoServe counts them in ShareGPT. Turns and think times are assumptions.
CHATS = SessionSet(
    turns=Uniform(2, 10),
    first=DATASETS["sharegpt"].prompt_lengths,
    later=DATASETS["sharegpt"].prompt_lengths,
    output=DATASETS["sharegpt"].output_lengths,
    think=ThinkTimes(probabilities=(0, 1), seconds=(10, 60)),
    max_context_tokens=16_384,
)
