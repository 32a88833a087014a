"""The requests of the demo: chat that arrives by chance, and a job of few-shot prompts.

All of it follows from a seed and this package's text, so two people compare the same requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cosched.demo_corpus import demo_corpus
from cosched.errors import ConfigError

__all__ = [
    "ChatRequest",
    "OfflinePrompt",
    "WorkloadSpec",
    "chat_prompts",
    "make_chat_trace",
    "make_offline_job",
]

_T = TypeVar("_T")

_Shot = tuple[str, str]  # a question and its answer

_WORDS = """
anchor basket candle drawer engine feather garden hammer island jacket kettle ladder magnet needle
orange pencil quilt ribbon saddle tunnel umbrella violin window yogurt zipper barrel copier donkey
fabric glove helmet lantern mirror napkin pillow rocket shovel tractor vase walnut
""".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Size and shape of the demo's load.

    rate_per_s    mean online arrivals per second outside the bursts
    bursts        parts [a, b) of the window, as fractions of it, in which arrivals come
                  `burst_factor` times as often
    prompt_chars  a chat prompt has about so many characters, equally often in between; the demo
                  model's tokenizer makes a token of 3.7 of them
    """

    seconds: float = 40.0
    rate_per_s: float = 2.0
    bursts: tuple[tuple[float, float], ...] = ((0.25, 0.35), (0.65, 0.75))
    burst_factor: float = 3.0
    prompt_chars: tuple[int, int] = (500, 1500)
    output_tokens: tuple[int, int] = (16, 64)
    num_offline: int = 800
    num_heads: int = 8
    num_shots: int = 8
    offline_output_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value in (("--seconds", self.seconds), ("--rate", self.rate_per_s)):
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{option} must be a number above 0, not {value:g}")
        if self.num_offline < 0:
            raise ConfigError(f"--offline-prompts must be at least 0, not {self.num_offline}")

    def rate_at(self, fraction: float) -> float:
        """Arrivals per second at that fraction of the window."""
        in_burst = any(begin <= fraction < end for begin, end in self.bursts)
        return self.rate_per_s * (self.burst_factor if in_burst else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """An online request: when it arrives (seconds into the window) and what it asks for."""

    arrival_s: float
    prompt: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePrompt:
    """An offline request: worked examples that many share, then a question of its own."""

    prompt: str
    num_output_tokens: int


def make_chat_trace(spec: WorkloadSpec) -> tuple[ChatRequest, ...]:
    """Online requests in the order of arrival: a Poisson process whose rate rises in the bursts."""
    draw = _Draw(f"chat {spec.seed}")
    prompts = chat_prompts(spec, seed=spec.seed)
    return tuple(
        ChatRequest(
            arrival_s=arrival_s,
            prompt=next(prompts),
            num_output_tokens=draw.between(*spec.output_tokens),
        )
        for arrival_s in _arrivals(spec)
    )


def make_offline_job(spec: WorkloadSpec) -> tuple[OfflinePrompt, ...]:
    """The job's prompts, in an order that ignores which of them share a prefix."""
    draw = _Draw(f"offline {spec.seed}")
    kinds: tuple[Callable[[_Draw], _Shot], ...] = (_sorting, _counting, _adding, _reading)
    groups = []
    for index in range(spec.num_heads):
        kind = kinds[index % len(kinds)]
        shots = (kind(draw) for _ in range(spec.num_shots))
        head = "".join(f"Q: {question}\nA: {answer}\n\n" for question, answer in shots)
        groups.append((f"Answer as in the examples.\n\n{head}", kind))
    job = []
    for _ in range(spec.num_offline):
        head, kind = draw.pick(groups)
        question, _ = kind(draw)
        prompt = f"{head}Q: {question}\nA:"
        job.append(OfflinePrompt(prompt=prompt, num_output_tokens=spec.offline_output_tokens))
    return tuple(job)


def _sorting(draw: _Draw) -> _Shot:
    words = draw.words(8)
    return f"Sort these words: {', '.join(words)}.", ", ".join(sorted(words))


def _counting(draw: _Draw) -> _Shot:
    counts = [(draw.between(2, 12), word) for word in draw.words(6)]
    things = ", ".join(f"{count} {word}s" for count, word in counts)
    total = sum(count for count, _ in counts)
    return f"On the table lie {things}. How many things are that?", f"{total} things"


def _adding(draw: _Draw) -> _Shot:
    numbers = [draw.between(10, 999) for _ in range(5)]
    return f"What is {' + '.join(map(str, numbers))}?", str(sum(numbers))


def _reading(draw: _Draw) -> _Shot:
    owners = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
    words = draw.words(len(owners))
    facts = " ".join(
        f"{owner} bought the {word}." for owner, word in zip(owners, words, strict=True)
    )
    index = draw.between(0, len(owners) - 1)
    return f"{facts} Who bought the {words[index]}?", owners[index]


def chat_prompts(spec: WorkloadSpec, *, seed: int) -> Iterator[str]:
    """Chat prompts without end, no two alike."""
    draw = _Draw(f"prompts {seed}")
    tasks = (
        "Rewrite the following text so that a child can follow it.",
        "Summarise this in two sentences.",
        "What is unclear in the text below? Ask me three questions about it.",
        "Translate into plain English, and keep the names:",
        "Which of these statements contradict each other?",
    )
    text = _paragraphs(seed)
    while True:
        num_chars = draw.between(*spec.prompt_chars)
        prompt = draw.pick(tasks)
        while len(prompt) < num_chars:
            prompt += "\n\n" + next(text)
        yield prompt[:num_chars]


def _arrivals(spec: WorkloadSpec) -> Iterator[float]:
    """Thinning: candidates at the highest rate, each kept with the odds of the rate at its time."""
    draw = _Draw(f"arrivals {spec.seed}")
    highest = spec.rate_per_s * max(1.0, spec.burst_factor)
    time_s = 0.0
    while True:
        time_s -= math.log(1.0 - draw.unit()) / highest
        if time_s >= spec.seconds:
            return
        if draw.unit() * highest < spec.rate_at(time_s / spec.seconds):
            yield time_s


def _paragraphs(seed: int) -> Iterator[str]:
    # Piece by piece: the corpus is made at once up to the size asked for.
    part = 0
    while True:
        yield from demo_corpus(num_chars=50_000, seed=1_000_000 + 1_000 * seed + part)
        part += 1


class _Draw:
    """Random choices from one named seed."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)

    def unit(self) -> float:
        # The one method whose sequence Python promises to keep between versions.
        return self._random.random()

    def between(self, low: int, high: int) -> int:
        """An integer of [low, high], both included."""
        return low + int(self.unit() * (high - low + 1))

    def pick(self, choices: Sequence[_T]) -> _T:
        return choices[self.between(0, len(choices) - 1)]

    def words(self, count: int) -> list[str]:
        left = list(_WORDS)
        return [left.pop(self.between(0, len(left) - 1)) for _ in range(count)]
