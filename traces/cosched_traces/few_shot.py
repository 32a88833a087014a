"""Few-shot chat prompts as text, for demonstrations on a live server.

Groups share their prefix, an instruction with worked examples, as a system message; each request
adds one question of its own. Everything comes from templates in this package and a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosched_traces.few_shot_exercises import CITIES, EXERCISES, NAMES, WORDS, Example, Exercise
from cosched_traces.offline_sets import Order
from cosched_traces.seeds import rng_of

__all__ = ["ChatArrival", "FewShotText", "Message", "few_shot_text"]

Message = dict[str, str]

CHAT_TURNS = (
    "Explain in a few sentences why {word} could be a good name for a small library.",
    "Write a short message that invites {name} to a walk in {city} on Saturday.",
    "What would you pack for three days in {city}? Give a list with reasons.",
    "Tell a story of five sentences with {name}, a lost key and the word {word}.",
    "Give {name} three pieces of advice for a first talk in front of many people.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatArrival:
    """An online request as text: when to send it, and what."""

    arrival_s: float
    messages: tuple[Message, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShotText:
    """Lines of an OpenAI batch file, and chat to send meanwhile."""

    lines: tuple[dict[str, Any], ...]
    chat: tuple[ChatArrival, ...]


def few_shot_text(
    *,
    model: str,
    seed: int,
    num_groups: int = 8,
    requests_per_group: int = 25,
    num_shots: int = 5,
    max_tokens: int = 32,
    order: Order = Order.SHUFFLED,
    chat_arrivals_s: Sequence[float] = (),
    chat_max_tokens: int = 128,
) -> FewShotText:
    """Batch lines with custom_ids ``few-shot-<n>`` for ``/v1/chat/completions``, greedy, and one
    chat request for each of `chat_arrivals_s` (see `arrivals.arrival_times`).

    Groups take the exercises in turn; where there are more groups, later ones have other examples.
    Examples of a head and questions may coincide by chance, as in real sets.
    """
    lines: list[dict[str, Any]] = []
    for group in range(num_groups):
        exercise = EXERCISES[group % len(EXERCISES)]
        rng = rng_of(seed, "few-shot", group)
        head = _head(exercise, [exercise.example(rng) for _ in range(num_shots)])
        for _ in range(requests_per_group):
            question = {"role": "user", "content": f"Q: {exercise.example(rng).question}\nA:"}
            lines.append(
                {
                    "custom_id": f"few-shot-{len(lines)}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": {
                        "model": model,
                        "messages": [head, question],
                        "max_tokens": max_tokens,
                        "temperature": 0,
                    },
                }
            )
    if order is Order.SHUFFLED:
        places = rng_of(seed, "few-shot", "order").permutation(len(lines)).tolist()
        lines = [lines[place] for place in places]
    rng = rng_of(seed, "few-shot", "chat")
    chat = tuple(
        ChatArrival(arrival_s=time, messages=(_chat_turn(rng),), max_tokens=chat_max_tokens)
        for time in chat_arrivals_s
    )
    return FewShotText(lines=tuple(lines), chat=chat)


def _head(exercise: Exercise, examples: Sequence[Example]) -> Message:
    shots = "\n\n".join(f"Q: {shot.question}\nA: {shot.answer}" for shot in examples)
    return {"role": "system", "content": f"{exercise.instruction}\n\n{shots}"}


def _chat_turn(rng: np.random.Generator) -> Message:
    template = CHAT_TURNS[int(rng.integers(len(CHAT_TURNS)))]
    filled = template.format(
        name=NAMES[int(rng.integers(len(NAMES)))],
        city=CITIES[int(rng.integers(len(CITIES)))],
        word=WORDS[int(rng.integers(len(WORDS)))],
    )
    return {"role": "user", "content": filled}
