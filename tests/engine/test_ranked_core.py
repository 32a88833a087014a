"""Two ranks, of which one knows clocks and who waits: both trees evict the same."""

from __future__ import annotations

import random

import pytest

import cosched.bootstrap  # noqa: F401  # before SGLang
from cosched.engine.tree_core import RankedTreeCore
from tests.engine.test_tree_core import CORES, NUM_OPERATIONS, Machine, make_core


class Rank(Machine):
    """is_source: it knows who waits and who has gone, and what time it is."""

    def __init__(self, core_name, *, page_size, seed, is_source):
        super().__init__(core_name, page_size=page_size, order="value", seed=seed)
        self.core = RankedTreeCore(make_core(core_name, page_size), self.tree, self.leaves)
        if not is_source:
            self.tree.refer = lambda *args: None
            self.tree.left = lambda *args: None
            self.leaves.advance = lambda now_s: None
            self.tree._future = None


CHANGES = (
    *("insert", "insert", "insert", "match", "lock", "unlock", "pin", "unpin"),
    *("wait", "leave", "depart", "tick"),
)


@pytest.mark.skipif("rust" not in CORES, reason="the Python core numbers nodes per process")
@pytest.mark.parametrize("page_size", [1, 4])
def test_all_ranks_evict_what_rank_0_says(page_size):
    source, other = (
        Rank("rust", page_size=page_size, seed=1, is_source=is_source)
        for is_source in (True, False)
    )
    draw = random.Random(2)
    num_given = num_alike = 0
    for _ in range(NUM_OPERATIONS):
        if draw.random() < 0.2:
            # More or fewer than will go; now and then the engine's own order.
            evictions = source.leaves.next_to_go(draw.randrange(60))
            given = None if draw.random() < 0.1 else evictions
            for rank in (source, other):
                rank.core.give(given)
            if draw.random() < 0.3:  # what is told is not what is found any more
                change = draw.choice(CHANGES)
                for rank in (source, other):
                    getattr(rank, change)()
            gone = source.evict_some()
            assert gone == other.evict_some()
            num_given += len(gone) if given else 0
            num_alike += len({node_id for node_id, _ in given or ()} & set(gone))
        else:
            change = draw.choice(CHANGES)
            for rank in (source, other):
                getattr(rank, change)()
        assert source.tree.nodes.keys() == other.tree.nodes.keys()
        assert source.tree.num_evictable == other.core.full_evictable_size()
    assert num_alike > num_given / 2 > 0


def test_a_rank_that_lost_track_since_it_was_told_says_so():
    rank = Rank("python", page_size=1, seed=0, is_source=True)
    for _ in range(30):
        rank.insert()
    rank.core.give(rank.leaves.next_to_go(5))
    rank.core._switch_off("a test")
    with pytest.raises(RuntimeError, match="lost track"):
        rank.evict_some()
    rank.core.give(None)
    assert rank.evict_some(), "the engine's order goes on"
