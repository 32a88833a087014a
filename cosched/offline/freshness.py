"""Beside prefix order: when the oldest has its turn (HyGen §4.3, App. A.2), and who is urgent.

Serving in prefix order alone starves what shares nothing. HyGen tosses a coin for each pick: the
head of the depth-first order with probability `utility_ratio`, else the most stale request. Here
the coin is an account, so that every rank of a server decides alike and a bound can be stated: see
`max_passed_over`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from sortedcontainers import SortedList

from cosched.core.request import Request

__all__ = ["Deadlines", "UtilityMix", "due_time_s"]

R = TypeVar("R", bound=Request)

_PICK = 1_000_000


class UtilityMix:
    """Which of the next picks go to the most stale request.

    utility_ratio  part of the picks that follow prefix order
    patience       admissions by which a due request may be put off in favour of those that use a
                   prefix in use

    Every admission raises the debt by ``1 - utility_ratio`` picks (to the millionth); the admission
    of a request that is due lowers it by one. As many of the oldest are due as there are whole
    picks of debt. An admission that puts a due request off to use a prefix in use leaves the debt
    as it is, `patience` times in a row; from then on those that are due are overdue. Looking at a
    request and not taking it changes nothing, so a due request that did not fit is due again in the
    next plan.

    Deviation from HyGen: an account in place of a random number, what counts is what was admitted,
    not what was looked at, and due requests can be put off.
    """

    __slots__ = ("_debt", "_num_put_off", "_patience", "_share")

    def __init__(self, utility_ratio: float, *, patience: int = 0) -> None:
        self._share = round((1 - utility_ratio) * _PICK)
        self._debt = self._share
        self._patience = patience if utility_ratio > 0 else 0
        self._num_put_off = 0

    @property
    def num_due(self) -> int:
        """How many of the oldest requests go before others, but for those that use a prefix in
        use."""
        return self._debt // _PICK

    @property
    def is_patient(self) -> bool:
        """Whether those that are due may be put off once more."""
        return self._num_put_off < self._patience

    def count(self, *, due: bool) -> None:
        """Count an admission, of a request that was due or of another."""
        self._debt += self._share - (_PICK if due else 0)
        if due:
            self._num_put_off = 0

    def put_off(self) -> None:
        """Count an admission that uses a prefix in use while another is due; `is_patient` holds."""
        self._num_put_off += 1

    def restart(self) -> None:
        """Forget the debt: nobody waits."""
        self._debt = self._share
        self._num_put_off = 0

    def fork(self) -> UtilityMix:
        """A copy to forecast with."""
        fork = UtilityMix.__new__(UtilityMix)
        for name in UtilityMix.__slots__:
            setattr(fork, name, getattr(self, name))
        return fork

    def max_passed_over(self, num_older: int) -> int | None:
        """After how many admissions of others a request is overdue at the latest; None: never for
        sure.

        num_older  older requests that waited when it came, and those that came back since

        The debt is at least one share when it came and grows by a share per admission, except for
        one pick each time that a due request goes, and for `patience` admissions before it goes.
        Until it is due itself, those are all older than it. It is due when the whole picks of debt
        exceed the number of older ones still waiting, so at the latest when
        ``shares >= num_older + 1`` picks.
        """
        if self._share == 0:
            return None
        due = -(-(num_older + 1) * _PICK // self._share) - 1
        return due + self._patience * (num_older + 1)


class Deadlines(Generic[R]):
    """The waiting requests that have a deadline, most urgent first. Each change O(log n)."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: SortedList[tuple[float, int, R]] = SortedList()  # no two of one seq

    def add(self, request: R) -> None:
        due_s = due_time_s(request)
        if due_s is not None:
            self._entries.add((due_s, request.arrival_seq, request))

    def remove(self, request: R) -> None:
        due_s = due_time_s(request)
        if due_s is not None:
            self._entries.remove((due_s, request.arrival_seq, request))

    def until(self, limit_s: float) -> Iterator[R]:
        """All due at `limit_s` or before, lazily; valid until the next `add` or `remove`."""
        for due_s, _, request in self._entries:
            if due_s > limit_s:
                return
            yield request


def due_time_s(request: Request) -> float | None:
    """When a request must be complete, on the engine's clock [s]; None: whenever."""
    deadline_s = request.slo.deadline_s
    return None if deadline_s is None else request.arrival_s + deadline_s
