"""The table of shared pages, under random operations and against what BROS §5 says of it."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cosched.papers.bros.pages import PreemptionTable


class TableMachine(RuleBasedStateMachine):
    """Requests begin tails, grow, and leave; beside it how many tokens each has in its tail."""

    @initialize(page_size=st.sampled_from([2, 3, 4, 16, 64]))
    def begin(self, page_size):
        self.table = PreemptionTable(page_size)
        self.page_size = page_size
        self.counts = {}
        self.num_rows = 0

    @rule(is_online=st.booleans(), share=st.booleans(), data=st.data())
    def open(self, is_online, share, data):
        count = data.draw(st.integers(1, self.page_size - 1))
        table = self.table
        find = table.find_preempt_block if is_online else table.find_block
        beside = find(count)
        lone = [t.count for t in table if t.peer is None and t.is_online is not is_online]
        fits = bool(lone) and min(lone) + count + table.least_empty <= self.page_size
        assert (beside is not None) == fits
        if beside is not None:
            assert beside.count == min(lone)  # the most empty slots
        row, self.num_rows = self.num_rows, self.num_rows + 1
        peer = beside if share else None
        table.open(row, is_online=is_online, start=0, count=count, beside=peer)
        assert (table.tail(row).peer is None) == (peer is None)
        self.counts[row] = count

    @rule(data=st.data())
    def grow(self, data):
        """An iteration: some requests take the next token."""
        rows = (
            data.draw(st.lists(st.sampled_from(sorted(self.counts)), unique=True))
            if (self.counts)
            else []
        )
        threatened = self.table.num_threatened
        before = {tail.row: tail.page for tail in self.table}
        moved = self.table.part(dict.fromkeys(rows, 1))
        assert len(moved) <= threatened  # so many pages were kept free
        for tail in moved:
            page = before[tail.row]
            other = page.online or page.offline
            assert tail.peer is None and tail.page is not page
            assert other.peer is None and tail.count <= other.count
        self.table.grow_each(rows)
        for row in rows:
            self.counts[row] += 1
            if self.counts[row] == self.page_size:
                del self.counts[row]
                assert self.table.tail(row) is None

    @rule(data=st.data())
    def leave(self, data):
        assume(self.counts)
        row = data.draw(st.sampled_from(sorted(self.counts)))
        peer = self.table.tail(row).peer
        assert self.table.leave(row) is (peer is None)
        assert self.table.tail(row) is None
        assert peer is None or peer.peer is None
        del self.counts[row]

    @invariant()
    def agrees(self):
        table = getattr(self, "table", None)
        if table is None:
            return
        table.check_integrity()
        assert {tail.row: tail.count for tail in table} == self.counts
        pages = {tail.page for tail in table}
        assert len(pages) + table.num_shared == len(self.counts)


TestTable = TableMachine.TestCase
TestTable.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


@given(count=st.integers(1, 15))
def test_a_page_is_shared_only_with_the_other_class(count):
    table = PreemptionTable(16)
    table.open(1, is_online=True, start=0, count=1, beside=None)
    assert table.find_preempt_block(count) is None
    assert (table.find_block(count) is not None) == (count <= 11)


def test_who_has_fewer_tokens_moves_unless_it_must_stay():
    for stay, expected in (((), 2), ((2,), 1)):
        table = PreemptionTable(16)
        table.open(1, is_online=True, start=32, count=6, beside=None)
        table.open(2, is_online=False, start=0, count=5, beside=table.tail(1))
        assert table.part({1: 1, 2: 1}) == []
        [moved] = table.part({1: 6}, stay=stay)
        assert moved.row == expected
        table.check_integrity()


def test_pages_of_one_token_have_nothing_to_share():
    with pytest.raises(AssertionError):
        PreemptionTable(1)
