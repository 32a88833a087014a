"""What is kept of those that run from plan to plan; in a scheduler: the soak."""

import weakref
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cosched.core.request import PLAIN, RequestClass, Traits
from cosched.engine.running_table import RunningTable

NUM_ROWS = 64


class Tree:
    num_shifts = 0

    def __init__(self, **gains):
        self.gains = gains

    def gains_of_release(self, nodes):
        return [self.gains[node] for node in nodes]


class Lengths:
    """Looked at with every 16th token: a quarter as much again, or half."""

    def __init__(self):
        self.num_looks = 0

    def ends(self, request, num_output):
        self.num_looks += 1
        ends = (num_output * 5 // 4, num_output * 3 // 2 + 1)
        return num_output + 16, ends[-1], tuple(min(end, request.max_new_tokens) for end in ends)


class Request:
    """A `TrackedRequest` and its `Req` in one."""

    num_seen = 0

    def __init__(self, node, *, row=1, most=100, rows=1, output=10, own=10, offline=False):
        self.req = self.cosched = self
        self.last_node = node
        self.finished_reason = None
        self.req_row = row
        self.row = None
        self.arrival_seq = row
        self.rid = f"{node}{row}"
        self.max_new_tokens = most
        self.traits = PLAIN if rows == 1 else Traits(num_rows=rows)
        self.request_class = RequestClass.OFFLINE if offline else RequestClass.ONLINE
        self.promised = None
        self.loan, self.reserves_all = None, False
        self.output_ids = array("q", range(output))
        self.num_computed_tokens = 89 + output
        self.num_own_tokens = own

    @property
    def num_output_tokens(self):
        self.num_seen += 1
        return len(self.output_ids)


class Engine:
    def __init__(self, tree=None, lengths=None, *, page_size=1):
        self.tree = tree or Tree(a=0)
        self.generations = np.ones(NUM_ROWS, dtype=np.int64)
        self.table = RunningTable(lengths or Lengths(), self.generations, page_size=page_size)

    def batch(self, requests):
        return SimpleNamespace(
            reqs=requests,
            req_pool_indices_cpu=torch.tensor([r.req_row for r in requests]),
            seq_lens_cpu=torch.tensor([r.num_computed_tokens for r in requests]),
        )

    def running(self, requests):
        return self.table.follow(self.batch(requests))

    def outlook(self, requests):
        found = self.table.outlook(self.running(requests), kv_tree=self.tree, gain_of=None)
        assert (found.ends[:-2] <= 0).all(), "none"
        return found.held.tolist(), found.ends[-1].tolist()

    def decode(self, requests, tokens=1):
        """They decode, and the result is known."""
        for request in requests:
            request.num_computed_tokens += tokens
            request.num_own_tokens += tokens
            request.output_ids.extend([0] * tokens)
        self.table.came(self.batch(requests))


def test_only_those_that_are_new_are_looked_at():
    engine = Engine()
    requests = [Request("a", row=row) for row in range(10)]
    for _ in range(3):
        engine.running(requests)
        engine.decode(requests)
    seen = [r.num_seen for r in requests]
    for _ in range(3):
        assert engine.running(requests[::-1]).progress.num_output == [13] * 10
    assert [r.num_seen for r in requests] == seen


def test_what_a_plan_reads_of_them():
    engine = Engine()
    a = Request("a", row=3, output=5, own=7)
    b = Request("a", row=1, output=6, own=8, offline=True, most=20)
    c = Request("a", row=2, output=0, own=9, offline=True, rows=4)
    b.promised = 6
    running = engine.running([a, b, c])
    assert [*running.everyone] == [a, b, c]
    online, offline = (running.by_class[c] for c in RequestClass)
    assert [[*part] for part in online] == [[a], [95], [3]]
    assert [[*part] for part in offline] == [[b, c], [96, 90], [1, 2]]
    assert [[*part] for part in offline.at(np.array([1, 0]))] == [[c, b], [90, 96], [2, 1]]
    assert [[*part] for part in offline.where([False, True])] == [[c], [90], [2]]
    assert running.own() == {RequestClass.ONLINE: 7, RequestClass.OFFLINE: 17}
    assert running.progress == ([5, 6, 0], [None, 6, None])
    assert [part.tolist() for part in running.to_come()] == [[95, 400], []]
    assert running.promised == 1
    assert running.next_step == 6
    assert not running.are_plain
    assert running.mixes
    b.promised, c.reserves_all = 9, True
    engine.table.forget(b)
    engine.table.forget(c)
    running = engine.running([a, b, c])
    assert running.progress.promised == [None, 9, None]
    assert [part.tolist() for part in running.to_come()] == [[95], [400]]
    assert running.promised == 3 + 1


def test_a_length_is_looked_at_when_it_is_due_and_is_no_more_than_the_limit():
    lengths = Lengths()
    engine, request = Engine(lengths=lengths), Request("a", most=30)
    left, longest = [], []
    for num_tokens in (0, 5, 5, 6, 3, 1, 1):
        engine.decode([request], num_tokens)
        left.append(engine.outlook([request])[1][0])
        longest.append(engine.table.longest_left(engine.running([request]), RequestClass.ONLINE))
    assert left == [6, 1, -4, 4, 1, 0, -1], "not above 0: it is over with the next token"
    assert longest == [6, 1, 1, 4, 1, 0, 0]
    assert engine.table.longest_left(engine.running([request]), RequestClass.OFFLINE) == 0
    assert lengths.num_looks == 2


def test_of_many_lengths_that_are_due_at_once_few_are_estimated_with_each_result():
    lengths = Lengths()
    engine, requests = Engine(lengths=lengths), [Request("a", row=row) for row in range(40)]
    engine.outlook(requests)
    looks = []
    for tokens in (15, 1, 1, 1, 1, 12, 1):
        before = lengths.num_looks
        engine.decode(requests, tokens)
        looks.append(lengths.num_looks - before)
        before = lengths.num_looks
        engine.outlook(requests)
        assert lengths.num_looks == before
    assert looks == [0, 16, 16, 8, 0, 0, 16], "the second time they are due one after the other"


@pytest.mark.parametrize("knows", [True, False])
def test_another_one_in_a_row_is_looked_at(knows):
    """Whether or not anybody said that the one before it has left."""
    engine = Engine(Tree(a=100, b=7))
    before, after = Request("a"), Request("b")
    engine.outlook([before])
    if knows:
        engine.table.forget(before)
    engine.generations[1] += 1
    assert engine.outlook([after])[0] == [17]
    assert (before.row, after.row) == (None, 1)


def test_requests_are_found_by_their_ids_also_in_another_row():
    engine = Engine()
    moved, other = Request("a", row=1), Request("b", row=1)
    engine.running([moved])
    moved.req_row = 2  # the engine itself took it out and admitted it again
    engine.running([moved])
    engine.generations[1] += 1
    both = engine.running([moved, other])
    assert (moved.row, other.row) == (2, 1)
    assert engine.table.named({"a1", "b1", "c1"}, both) == {"a1": moved, "b1": other}
    assert engine.table.named({"a1", "b1"}, engine.running([other])) == {"b1": other}
    engine.table.forget(moved)
    assert engine.table.named({"a1"}, both) == {}


def test_nothing_is_kept_of_those_that_are_over():
    engine = Engine()
    requests = [Request("a", row=row) for row in range(50)]
    left = [weakref.ref(request) for request in requests]
    engine.running(requests)
    for request in requests:
        engine.table.forget(request)
        request.req = request.cosched = None  # the ring that this test's request is
    del request
    requests.clear()
    assert not any(request() for request in left)
