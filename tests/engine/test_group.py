"""Ranks that step together: what they send each other, and what each learns from it."""

import math
import threading
from types import SimpleNamespace

import pytest

from cosched.core.batch import BatchShape, BatchTotals, Prefill
from cosched.core.group import RankNeeds, others_of
from cosched.engine.guard import Guard
from cosched.engine.iteration import Iteration
from cosched.engine.rank_agreement import WIDTH, Group, Microbatches

LONG = BatchShape(prefills=[Prefill(500, 20)], decodes=[7, 9])
SHORT = BatchShape(decodes=[30])
GUARD = Guard(is_strict=True)
BUSY = RankNeeds(alone_s=0.02, least_s=0.03, required_s=0.1, online_s=0.2, offline_s=0.04)


class AllGather:
    """Each of `size` threads gets what all of them send."""

    def __init__(self, size):
        self._rows = [None] * size
        self._barrier = threading.Barrier(size, timeout=120)

    def of(self, rank):
        def exchange(numbers):
            assert len(numbers) == WIDTH
            self._rows[rank] = list(numbers)
            self._barrier.wait()
            rows = list(self._rows)
            self._barrier.wait()
            return rows

        return exchange


def agree(*members, plans_ahead=False):
    """members: needs and launched iteration of each rank. Returns the groups and their waits."""
    gather = AllGather(len(members))
    groups = [
        Group(gather.of(rank), GUARD, rank=rank, plans_ahead=plans_ahead)
        for rank in range(len(members))
    ]
    waits = [None] * len(members)

    def run(rank):
        waits[rank] = groups[rank].send(*members[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups, waits


def test_every_rank_knows_what_the_others_need():
    needs = [BUSY, RankNeeds(), BUSY._replace(offline_s=-math.inf)]
    groups, waits = agree(*((one, None) for one in needs))
    assert [group.others for group in groups] == [others_of(needs, rank) for rank in range(3)]
    assert waits == [0, 0, 0]


def test_all_ranks_learn_the_time_of_the_longest_batch():
    long, short = Iteration(shape=LONG), Iteration(shape=SHORT)
    long.predicted_s, short.predicted_s = 0.3, 0.1
    agree((BUSY, short), (BUSY, long), (RankNeeds(), None))
    assert short.longest == long.longest == BatchTotals.of(LONG)
    assert short.predicted_s == long.predicted_s == 0.3
    agree((BUSY, short), (BUSY, Iteration(shape=SHORT, predicted_s=0.9)))
    assert short.predicted_s == 0.3, "a rank says it once"


def test_with_drafts_the_ranks_decode_where_one_is_due_and_never_twice_for_it():
    due, ahead = BUSY._replace(online_s=-0.01, offline_s=-0.02), BUSY
    gathered = [[*needs, 0.0, *[0] * (WIDTH - 6)] for needs in (due, ahead)]
    group = Group(lambda _: gathered, GUARD, rank=1, plans_ahead=False, takes_turns=True)
    seen = [(group.send(ahead, None), group.others)[1] for _ in range(3)]
    assert [others.must_decode for others in seen] == [True, False, True]
    assert seen[0].offline_s == 0 and seen[0].taken_s == due.alone_s


def test_a_microbatch_is_bounded_by_the_online_requests_of_the_others():
    needs = [BUSY, RankNeeds(), BUSY._replace(offline_s=0.01)]
    policy, turn = SimpleNamespace(needs=lambda view: needs[view.number]), iter([0, 1, 2, 0, 1, 1])
    group, seen = Microbatches(lambda: next(turn), GUARD), []
    for number in (0, 1, 2, 0, 1):
        view = SimpleNamespace(number=number)
        group.agree(policy, view, None)
        seen.append(view.others.offline_s)
    assert seen == [math.inf, 0.04, 0.04, 0.01, 0.01]
    group.agree(policy, None, None)
    assert group.others.taken_s == -math.inf


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_needs_count_from_the_end_of_the_longest_batch(plans_ahead):
    long, short = Iteration(shape=LONG), Iteration(shape=SHORT)
    long.predicted_s, short.predicted_s = 0.3, 0.1
    groups, waits = agree((BUSY, short), (BUSY, long), plans_ahead=plans_ahead)
    assert waits == pytest.approx([0.2, 0] if plans_ahead else [0, 0])
    expected_s = BUSY.offline_s - (0.2 if plans_ahead else 0)
    assert groups[1].others.offline_s == pytest.approx(expected_s)
    assert groups[0].others.offline_s == BUSY.offline_s
