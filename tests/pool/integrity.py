"""Every invariant of the pool's structures, asserted in time proportional to them."""

from __future__ import annotations

from operator import attrgetter

from cosched.pool.freshness import due_time_s
from cosched.pool.radix import TOKEN_BYTES


def check_tree(tree):
    held, position, before = {tree._top: []}, {}, None
    for place in tree:
        assert place._prev is before
        before = place
        position[place] = len(position)
        for node in place.enclosing():
            held.setdefault(node, []).append(place)
    for node, places in held.items():
        assert node.num_requests == len(places)
        assert node.num_tokens == sum(place.num_tokens for place in places)
        if places:
            assert node.first is places[0] and node.last is places[-1]
            assert position[places[-1]] - position[places[0]] == len(places) - 1, "not one run"
        else:
            assert node is tree._top and node.first is None and node.last is None
        ends_here = any(place._node is node for place in places)
        assert not node.segment or ends_here or node.num_children > 1, "not compressed"
        assert len({child.key for child in node.children}) == node.num_children
        for child in node.children:
            assert child in held, "an empty node"
            assert child.parent is node and node.child(child.key) is child
            assert bool(child.segment) == (node is not tree._top)
            first = int.from_bytes(child.segment[:TOKEN_BYTES], "little", signed=True)
            assert not child.segment or child.key == first
    assert tree.num_distinct_tokens == sum(node.num_segment_tokens for node in held)


def check_pool(pool):
    """Trees, ages and deadlines hold the same requests."""
    for tree in pool.buckets.trees:
        check_tree(tree)
        assert all(pool.buckets.tree_of(place.item) is tree for place in tree)
    in_trees = {place for tree in pool.buckets.trees for place in tree}
    assert in_trees == set(pool.places.values())
    assert {place.item.rid for place in in_trees} == pool.places.keys()
    requests = [place.item for place in in_trees]
    assert [p.item for p in pool.by_age] == sorted(requests, key=attrgetter("arrival_seq"))
    assert [*pool.deadlines.until(float("inf"))] == sorted(
        (request for request in requests if due_time_s(request) is not None),
        key=lambda request: (due_time_s(request), request.arrival_seq),
    )
