"""What is attacked, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.forks import Forks


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run of an item.

    folder   empty, and of this run alone
    is_full  the whole of it; else what a few seconds are enough for
    minutes  for what goes on for a time
    forks    for real servers
    """

    seed: int
    folder: Path
    is_full: bool
    minutes: float
    forks: Forks


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """run: gives what was seen; AssertionError where it is not as it should be. what: in words, and
    `full` its extent where it is run whole."""

    name: str
    what: str
    full: str
    run: Callable[[Setting], dict[str, object]]
    needs_server: bool = False


ITEMS: dict[str, Item] = {}


def attack(
    what: str, *, full: str, needs_server: bool = False
) -> Callable[..., Callable[..., object]]:
    """The function is an item of its name."""

    def add(run: Callable[[Setting], dict[str, object]]) -> Callable[..., object]:
        name = run.__name__.replace("_", "-")
        ITEMS[name] = Item(name=name, what=what, full=full, run=run, needs_server=needs_server)
        return run

    return add
