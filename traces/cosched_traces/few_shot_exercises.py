"""Small exercises with answers that can be computed: what few-shot prompts are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = ["CITIES", "EXERCISES", "NAMES", "WORDS", "Example", "Exercise"]

Draw = np.random.Generator

NAMES = """Ada Ben Clara David Elif Femi Grace Hugo Ines Jonas Kavya Liam Mina Noor Otto
Petra""".split()
THINGS = "apples books coins maps pencils postcards shells stamps tickets tiles".split()
WORDS = """amber basin cedar delta ember fjord grove harbor inlet jasper kelp lantern meadow nectar
orchard pebble quarry river saddle timber umber valley willow yarrow zephyr""".split()
CITIES = "Bergen Cusco Dakar Galway Hanoi Izmir Kyoto Lisbon Oaxaca Perth Quito Turin".split()
PRAISE = ["arrived early and works better than described", "was worth every coin", "made my week"]
BLAME = ["broke on the second day", "never arrived", "looked nothing like the picture"]
GOODS = "kettle lamp notebook raincoat speaker suitcase umbrella watch".split()
UNITS = (
    ("kilometres", "metres", 1000),
    ("hours", "minutes", 60),
    ("kilograms", "grams", 1000),
    ("days", "hours", 24),
    ("metres", "centimetres", 100),
    ("minutes", "seconds", 60),
)


class Example(NamedTuple):
    question: str
    answer: str


class Exercise(NamedTuple):
    """An instruction and a source of examples for it."""

    instruction: str
    example: Callable[[Draw], Example]


def _pick(rng: Draw, words: list[str], count: int = 1) -> list[str]:
    return [words[i] for i in rng.choice(len(words), size=count, replace=False).tolist()]


def _shopping(rng: Draw) -> Example:
    (name, other), (thing,) = _pick(rng, NAMES, 2), _pick(rng, THINGS)
    start, bought, given = (int(n) for n in rng.integers(3, 60, size=3))
    given = min(given, start + bought)
    question = (
        f"{name} has {start} {thing}, buys {bought} more and gives {given} of them to {other}. "
        f"How many {thing} does {name} have now?"
    )
    return Example(question, f"{start} + {bought} - {given} = {start + bought - given}.")


def _sorting(rng: Draw) -> Example:
    words = _pick(rng, WORDS, 5)
    return Example(", ".join(words), ", ".join(sorted(words)))


def _converting(rng: Draw) -> Example:
    large, small, factor = UNITS[int(rng.integers(len(UNITS)))]
    count = int(rng.integers(2, 90))
    return Example(f"How many {small} are {count} {large}?", f"{count * factor} {small}.")


def _judging(rng: Draw) -> Example:
    good = bool(rng.integers(2))
    (item,), (what,) = _pick(rng, GOODS), _pick(rng, PRAISE if good else BLAME)
    return Example(f"The {item} I ordered {what}.", "positive" if good else "negative")


def _extracting(rng: Draw) -> Example:
    (name,), (origin, goal) = _pick(rng, NAMES), _pick(rng, CITIES, 2)
    hour, minute = int(rng.integers(5, 23)), int(rng.integers(60))
    question = f"{name} leaves {origin} at {hour:02d}:{minute:02d} and travels to {goal}."
    return Example(
        question, f'{{"who": "{name}", "to": "{goal}", "at": "{hour:02d}:{minute:02d}"}}'
    )


def _comparing(rng: Draw) -> Example:
    (first, second), values = _pick(rng, NAMES, 2), rng.choice(80, size=2, replace=False) + 8
    question = f"{first} is {values[0]} years old and {second} is {values[1]}. Who is older?"
    return Example(question, first if values[0] > values[1] else second)


def _counting(rng: Draw) -> Example:
    (word,) = _pick(rng, WORDS)
    letter = word[int(rng.integers(len(word)))]
    return Example(f"How often is the letter {letter} in {word}?", str(word.count(letter)))


def _continuing(rng: Draw) -> Example:
    start, step = int(rng.integers(1, 40)), int(rng.integers(2, 12))
    row = [start + step * i for i in range(6)]
    return Example(", ".join(map(str, row[:5])) + ", ...", str(row[5]))


EXERCISES = (
    Exercise("Answer the question about numbers of things. Show the sum.", _shopping),
    Exercise("Put the words into alphabetical order.", _sorting),
    Exercise("Convert the measure. Answer with the number and the unit.", _converting),
    Exercise("Is the review positive or negative? Answer with one word.", _judging),
    Exercise("Give who travels, where to and when, as JSON.", _extracting),
    Exercise("Answer with the name of the older person.", _comparing),
    Exercise("Count the letter in the word. Answer with a number.", _counting),
    Exercise("Give the next number of the row.", _continuing),
)
