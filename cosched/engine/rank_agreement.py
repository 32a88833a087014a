"""The ranks of DP attention agree on the time of the next iteration.

SGLang lets all of them step together: each iteration ends when the slowest rank has ended, and a
rank without requests runs an idle batch. Before each plan every rank sends what its online requests
need (`RankNeeds`), and the batch that it launched last; then each plans for itself, within what all
of them leave (`OtherRanks`).

SGLang exchanges the shapes of batches in each iteration too, but after they are planned. Numbers
sent with them would be an iteration old when they are used, and would not know of a request that
has just arrived. So this is an exchange of its own: 136 bytes per rank, between processes, while
the device computes. Every rank takes part once in each iteration, with or without requests; where
one has several attention ranks all of them do, and the first of each counts.

A rank cannot measure its own batch: its time is that of the longest one. So all ranks learn the
time of the batch that was predicted to be the longest of the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from cosched.core.batch import BatchTotals
from cosched.core.group import NO_OTHERS, OtherRanks, RankNeeds, others_of
from cosched.engine.guard import Guard
from cosched.engine.iteration import Iteration
from cosched.engine.view_of import SchedulerView
from cosched.schedule.base import GroupPolicy, Policy

_NUM_NEEDS = len(RankNeeds._fields)
_TOTALS = BatchTotals.__slots__
WIDTH = _NUM_NEEDS + 1 + len(_TOTALS)
"""Numbers that each rank sends."""


class Group:
    """One rank of those that step together.

    others  what the others need of the iteration that is planned
    """

    def __init__(
        self,
        exchange: Callable[[Sequence[float]], Sequence[Sequence[float]]],
        guard: Guard,
        *,
        rank: int,
        plans_ahead: bool,
        takes_turns: bool = False,
    ) -> None:
        """exchange     a rank's numbers -> the numbers of all ranks, `WIDTH` each
        plans_ahead  an iteration is planned while the one before it runs
        takes_turns  see `EngineCaps`
        """
        self._exchange = exchange
        self._guard = guard
        self._rank = rank
        self.plans_ahead = plans_ahead
        self._takes_turns = takes_turns
        self._has_decoded = False
        """The latest iteration had no prefills, so that decodes are not late."""
        self.others: OtherRanks = NO_OTHERS

    def agree(
        self, policy: Policy[Any] | None, view: SchedulerView | None, newest: Iteration | None
    ) -> None:
        """Before each plan: tell the others what this rank needs, and the view what they need.
        view: of the plan; None: nothing runs or waits here, or another rank plans. newest: the
        iteration that was launched here last."""
        needs = RankNeeds()
        if view is not None and not self._guard.has_given_up:
            before = self.others
            view.others = OtherRanks(alone_s=before.alone_s, fills=before.fills)
            with self._guard.watching("needs"):
                needs = cast("GroupPolicy[Any]", policy).needs(view)
        waits_s = self.send(needs, newest)
        if view is not None:
            view.others = self.others
            view.start_s += waits_s

    def send(self, needs: RankNeeds, launched: Iteration | None) -> float:
        """Returns how much later than by its own batch the iteration under way is expected to end
        [s]."""
        if launched is not None and launched.longest is not None:
            launched = None  # the others know it, and this rank has launched nothing since
        own_s, totals = 0.0, BatchTotals()
        if launched is not None:
            own_s, totals = launched.predicted_s or 0.0, BatchTotals.of(launched.shape)
        own = (*needs, own_s, *(getattr(totals, name) for name in _TOTALS))
        rows = self._exchange([float(number) for number in own])
        predicted = [row[_NUM_NEEDS] for row in rows]
        longest_s = max(predicted)
        if launched is not None:
            launched.longest = _totals_of(rows[predicted.index(longest_s)][_NUM_NEEDS + 1 :])
            if launched.predicted_s is not None:
                launched.predicted_s = longest_s
        # Ranks count their time from the end of their own batches.
        waits = [longest_s - batch_s if self.plans_ahead else 0.0 for batch_s in predicted]
        group = [
            needs._replace(online_s=needs.online_s - wait_s, offline_s=needs.offline_s - wait_s)
            for row, wait_s in zip(rows, waits, strict=True)
            for needs in (RankNeeds(*row[:_NUM_NEEDS]),)
        ]
        self.others = others_of(group, self._rank)
        if self._takes_turns:
            is_due = min(needs.online_s for needs in group) <= 0
            self._has_decoded = is_due and not self._has_decoded
            if self._has_decoded:
                allowed_s = min(needs.offline_s + needs.alone_s for needs in group)
                self.others = self.others._replace(
                    taken_s=self.others.alone_s, offline_s=allowed_s, must_decode=True
                )
        return waits[self._rank]


class Microbatches:
    """Those of a pipeline take turns: in the time of an iteration (`Iteration.duration_s`) each of
    the others has one too. So none may last longer than the online requests of any other allow, as
    of its latest plan. In place of `Group`, without an exchange: one rank plans for all."""

    def __init__(self, due: Callable[[], int], guard: Guard) -> None:
        """due: number of the one that is planned"""
        self._due = due
        self._guard = guard
        self._needs: dict[int, RankNeeds] = {}
        self.others: OtherRanks = NO_OTHERS

    def agree(
        self, policy: Policy[Any] | None, view: SchedulerView | None, newest: Iteration | None
    ) -> None:
        """As `Group.agree`."""
        due = self._due()
        self._needs[due] = RankNeeds()
        numbers = [*self._needs]
        others = others_of([self._needs[n] for n in numbers], numbers.index(due))
        if view is not None and not self._guard.has_given_up:
            view.others = OtherRanks(alone_s=others.alone_s)
            with self._guard.watching("needs"):
                self._needs[due] = cast("GroupPolicy[Any]", policy).needs(view)
        self.others = others._replace(taken_s=-math.inf)  # no time is free: the others come next
        if view is not None:
            view.others = self.others


def _totals_of(numbers: Sequence[float]) -> BatchTotals:
    totals = BatchTotals()
    for name, number in zip(_TOTALS, numbers, strict=True):
        setattr(totals, name, int(number))
    return totals
