"""What is kept of those that run from plan to plan; in a scheduler: test_no_leaks.py."""

import weakref
from types import SimpleNamespace

from cosched.core.request import PLAIN
from cosched.engine.outlook import RunningOutlook


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
        return num_output + 16, tuple(min(end, request.most) for end in ends)


class Request:
    def __init__(self, node, *, most=100, rows=1):
        self.req = SimpleNamespace(last_node=node)
        self.most = most
        self.traits = PLAIN if rows == 1 else SimpleNamespace(num_rows=rows)


def asked(outlook, tree, requests, *, shared=90, own=10, output=10):
    running = SimpleNamespace(
        everyone=requests,
        num_shared=[shared] * len(requests),
        num_own=[own] * len(requests),
        num_output=[output] * len(requests),
        are_plain=all(r.traits is PLAIN for r in requests),
    )
    found = outlook.of(running, kv_tree=tree, gain_of=None)
    assert not found.ends[:-2].any() or (found.ends[:-2] < 0).all(), "none"
    return found.held.tolist(), found.ends[-1].tolist()


def test_who_comes_and_who_goes():
    tree, outlook = Tree(a=100, b=200, c=300), RunningOutlook(Lengths())
    a, b, c = (Request(name) for name in "abc")
    assert asked(outlook, tree, [a, b]) == ([110, 210], [6, 6])
    assert asked(outlook, tree, [b, c], output=11) == ([210, 310], [5, 6])
    assert asked(outlook, tree, []) == ([], [])
    assert asked(outlook, tree, [c], output=12) == ([310], [7])


def test_a_length_is_looked_at_when_it_is_due_and_is_no_more_than_the_limit():
    lengths = Lengths()
    tree, outlook, request = Tree(a=0), RunningOutlook(lengths), Request("a", most=30)
    left = [asked(outlook, tree, [request], output=n)[1][0] for n in (10, 15, 20, 26, 29, 30, 31)]
    assert left == [6, 1, -4, 4, 1, 0, -1], "not above 0: it is over with the next token"
    assert lengths.num_looks == 2


def test_all_rows_of_a_request_count():
    outlook = RunningOutlook(Lengths())
    requests = [Request("a"), Request("a", rows=4)]
    assert asked(outlook, Tree(a=0), requests)[1] == [6, 24]


def test_what_each_holds_alone_is_looked_at_again_when_the_tree_says_so():
    tree, outlook, request = Tree(a=100), RunningOutlook(Lengths()), Request("a")
    asked(outlook, tree, [request])
    tree.gains["a"] = 40
    assert asked(outlook, tree, [request])[0] == [110], "nothing has changed for it to be asked"
    tree.num_shifts += 1
    assert asked(outlook, tree, [request])[0] == [50]


def test_a_prompt_that_comes_into_the_tree_while_it_runs_is_looked_at_again():
    tree, outlook, request = Tree(a=100), RunningOutlook(Lengths()), Request("a")
    asked(outlook, tree, [request], own=11)
    tree.gains["a"] = 101
    assert asked(outlook, tree, [request], shared=91)[0] == [111]


def test_nothing_is_kept_of_those_that_nobody_asks_about():
    outlook = RunningOutlook(Lengths())
    requests = [Request("a") for _ in range(50)]
    left = [weakref.ref(request) for request in requests]
    for request in requests:
        outlook.admitted(request)
    del request
    requests.clear()
    assert not any(request() for request in left)


def test_one_that_was_stopped_and_runs_again_unasked_is_looked_at_again():
    tree, outlook, request = Tree(a=100), RunningOutlook(Lengths()), Request("a")
    asked(outlook, tree, [request])
    tree.gains["a"] = 101
    outlook.admitted(request)
    assert asked(outlook, tree, [request])[0] == [111]
