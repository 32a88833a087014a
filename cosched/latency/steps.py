"""Long work in steps, so that a caller who has little time at once can do it bit by bit."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

__all__ = ["Steps", "finish"]

T = TypeVar("T")

Steps: TypeAlias = Generator[int, None, T]
"""Yields before each step how many entries of arrays it touches, and returns what came out: work
is counted and not timed, so that every rank and every run stops at the same places."""


def finish(steps: Steps[T]) -> T:
    """Do all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
