"""The radix tree of waiting requests, against a flat list that is re-sorted each time."""

from __future__ import annotations

import random
import sys

import pytest

from cosched.pool.radix import Place, RadixTree, pack
from tests.pool.integrity import check_tree
from tests.pool.prefixes import NaiveTree, prefixed, shared_len

NUM_OPERATIONS = 2400


class Pair:
    """The tree and the model, changed together and compared."""

    def __init__(self) -> None:
        self.tree: RadixTree = RadixTree()
        self.model = NaiveTree()
        self.places: dict[str, Place] = {}

    def insert(self, request, *, front=False):
        place = self.places[request.rid] = Place(request)
        self.tree.insert(place, request.token_ids, key=request.prefix_key, front=front)
        self.model.insert(request, front=front)

    def remove(self, request):
        self.tree.remove(self.places.pop(request.rid))
        self.model.remove(request)

    def admit(self, request):
        self.tree.admit(self.places.pop(request.rid))
        self.model.remove(request)
        self.model.lead(request)

    def promote(self, probe, *, behind_head=False):
        node, num_shared = self.tree.nearest(probe.token_ids, key=probe.prefix_key)
        most = max((shared_len(probe, other) for other in self.model.order), default=0)
        assert num_shared == max(most, 0)
        assert (node is None) == (most <= 0)
        if node is None:
            return
        self.tree.promote(node, behind_head=behind_head)
        if behind_head:
            self.model.lead_behind_head(probe)
        else:
            self.model.lead(probe)

    def check(self):
        check_tree(self.tree)
        assert [place.item for place in self.tree] == self.model.order
        assert len(self.tree) == len(self.model.order)
        assert self.tree.num_tokens == sum(len(r.token_ids) for r in self.model.order)
        assert self.tree.num_distinct_tokens == self.model.num_distinct_tokens()
        assert (self.tree.head is None) == (not self.model.order)


def random_request(rng, *, vocabulary=2, longest=8, **fields):
    ids = [rng.randrange(vocabulary) for _ in range(rng.randrange(longest + 1))]
    return prefixed(ids, prefix_key=rng.choice([None, "lora"]), **fields)


@pytest.mark.parametrize(
    ("seed", "vocabulary", "longest"), [(0, 2, 6), (1, 2, 12), (2, 9, 3), (3, 1, 10)]
)
def test_tree_keeps_the_order_and_counts_of_a_sorted_list(seed, vocabulary, longest):
    rng = random.Random(seed)
    pair = Pair()
    for step in range(NUM_OPERATIONS):
        # The pool swells and drains in turn: both ends have bugs of their own.
        draining = step % 400 >= 200
        verb = rng.choices(
            ["insert", "return", "admit head", "admit", "abort", "promote", "promote behind"],
            [1, 0.3, 1, 1, 1, 0.5, 1] if draining else [4, 1, 1, 0.5, 0.5, 0.5, 1],
        )[0]
        request = rng.choice(pair.model.order) if pair.model.order else None
        fresh = random_request(rng, vocabulary=vocabulary, longest=longest)
        if verb in ("insert", "return"):
            pair.insert(fresh, front=verb == "return")
        elif verb == "promote":
            pair.promote(fresh)
        elif verb == "promote behind":
            pair.promote(fresh, behind_head=True)
        elif request is not None and verb == "admit head":
            pair.admit(pair.model.order[0])
        elif request is not None and verb == "admit":
            pair.admit(request)
        elif request is not None:
            pair.remove(request)
        pair.check()
    while pair.model.order:
        pair.admit(rng.choice(pair.model.order))
        pair.check()


@pytest.mark.parametrize("seed", range(3))
def test_questions_are_answered_as_by_looking_at_every_request(seed):
    rng = random.Random(seed)
    pair = Pair()
    for _ in range(300):
        pair.insert(random_request(rng))
        if rng.random() < 0.5:
            pair.admit(rng.choice(pair.model.order))
        probe = random_request(rng)
        path = pair.tree.path(pack(probe.token_ids), key=probe.prefix_key)
        for num_tokens in range(1, len(probe.token_ids) + 1):
            sharing = pair.model.sharing(probe, num_tokens)
            entry = next((entry for entry in path if entry.prefix_len >= num_tokens), None)
            assert (0 if entry is None else entry.num_requests) == len(sharing)
            node = pair.tree.find(probe.token_ids, key=probe.prefix_key, num_tokens=num_tokens)
            if node is None:
                assert not sharing
            else:
                assert node.num_requests == len(sharing)
                assert node.first.item is sharing[0] and node.last.item is sharing[-1]
        order = list(pair.tree)
        for place in order:
            others = [other.item for other in order if other is not place]
            most = max((shared_len(place.item, other) for other in others), default=-1)
            node = place.innermost_shared()
            assert node.prefix_len == max(most, 0)
            assert most < 0 or node.num_requests > 1
            if len(place.item.token_ids):
                num_tokens = rng.randrange(1, len(place.item.token_ids) + 1)
                assert place.node_at(num_tokens) is pair.tree.find(
                    place.item.token_ids, key=place.item.prefix_key, num_tokens=num_tokens
                )
            assert (place.next is None) == (place is order[-1])


def test_a_long_segment_is_cut_where_it_differs():
    rng = random.Random(0)
    base = [rng.randrange(-(2**31), 2**31) for _ in range(3000)]
    pair = Pair()
    pair.insert(prefixed(base))
    for cut in [0, 1, 2, 3, 4, 5, 7, 8, 9, 1000, 1023, 1024, 1025, 2998, 2999, 3000]:
        differing = [base[cut] ^ 1, *base[cut + 1 :]] if cut < len(base) else []
        pair.insert(prefixed(base[:cut] + differing))
        # Differs in the high byte only: a token is equal as a whole or not at all.
        differing = [base[cut] ^ (1 << 24)] if cut < len(base) else [7]
        pair.insert(prefixed(base[:cut] + differing))
    assert [place.item for place in pair.tree] == pair.model.order
    check_tree(pair.tree)


def test_depth_first_order_computes_each_distinct_token_once():
    rng = random.Random(0)
    tree: RadixTree = RadixTree()
    for _ in range(500):
        request = random_request(rng, longest=20)
        tree.insert(Place(request), request.token_ids, key=request.prefix_key)
    total, distinct, computed, cached = tree.num_tokens, tree.num_distinct_tokens, 0, set()
    while (place := tree.head) is not None:
        # What is not on the path to the last request has been evicted.
        item = place.item
        path = {(item.prefix_key, *item.token_ids[: n + 1]) for n in range(len(item.token_ids))}
        computed += len(path - cached)
        cached = path
        tree.admit(place)
    assert computed == distinct < total


def test_depth_is_not_limited_by_the_interpreters_stack():
    tree: RadixTree = RadixTree()
    depth = sys.getrecursionlimit() + 200
    places = [Place(prefixed([7] * n)) for n in range(1, depth)]
    for place in places:
        tree.insert(place, place.item.token_ids, key=None)
    assert tree.num_distinct_tokens == depth - 1
    while tree.head is not None:
        tree.admit(tree.head)
    assert tree.num_distinct_tokens == 0
