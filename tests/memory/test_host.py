"""What is worth a copy in host memory, and what a copy is worth."""

from __future__ import annotations

import math

import pytest

from cosched.memory.eviction import CopyOrder, Leaves
from cosched.memory.node import Visit
from tests.memory.plain_tree import PlainTree
from tests.memory.test_eviction import Kv, context


class HostKv(Kv):
    """A tree with host memory; a token takes a tenth of what computing it takes, either way."""

    def __init__(self, transfer_s=1e-5):
        super().__init__()
        self.value.transfer_s = transfer_s
        self.copies = Leaves(CopyOrder(self.value), self.value, slot="host_rank")
        self.tree = PlainTree(self.leaves, self.copies)

    def node(self, tokens, **options):
        return self.tree.nodes[self.add(tokens, **options)]

    def gain(self, node, **options):
        return self.value.gain_of_copying(node, 0.0, **options)


def visited(kv, tokens, *, ttft_s=None):
    node = kv.node(tokens, is_online=True)
    kv.tree.left(node.node_id, Visit(0, 0.0, len(tokens), ttft_s))
    return node


def test_what_has_a_copy_costs_the_way_back():
    kv = HostKv()
    node = visited(kv, context(1, 50))
    before = kv.value(node, 0.0)
    kv.tree.copy(node.node_id)
    assert kv.value(node, 0.0) == pytest.approx(before / 10, rel=0.3)
    assert kv.value.of_copy(node, 0.0) == pytest.approx(before * 9 / 10, rel=0.3)


def test_what_is_copied_is_worth_more_than_the_copy_takes():
    kv = HostKv(transfer_s=4e-5)
    assert kv.gain(kv.node(context(1, 50))) <= 0, "no request may come for it"
    node = visited(kv, context(2, 50))
    assert kv.gain(node) > 0
    assert kv.gain(node, is_ahead=True) > kv.gain(node, is_ahead=False)


@pytest.mark.parametrize("transfer_s", [1e-3, math.inf], ids=["a slow link", "no host memory"])
def test_nothing_is_copied_where_computing_is_faster(transfer_s):
    kv = HostKv(transfer_s=transfer_s)
    node = visited(kv, context(1, 50))
    assert kv.value.of_copy(node, 0.0) == 0 >= kv.gain(node)
    assert kv.value.loading_share == 1.0


def test_copies_that_are_worth_least_go_first_and_doubles_before_them():
    kv = HostKv()
    dead, alive, long = kv.node(context(1, 50)), visited(kv, context(2, 50)), context(3, 150)
    held = visited(kv, long)
    for node in (dead, alive, held):
        kv.tree.copy(node.node_id)
    for node in (dead, alive):
        kv.tree.evict(node.node_id)
    kv.tree.hold(held.node_id)
    order = [node.node_id for node in kv.copies.sorted_nodes()]
    # What a running request holds on the device has no need of its copy.
    assert order[-1] == alive.node_id
    assert set(order[:2]) == {dead.node_id, held.node_id}


def test_the_chance_in_host_memory_has_a_horizon_of_its_own():
    kv = HostKv()
    kv.reuse.refresh(0.0, discount_s=1.0, host_discount_s=1e6)
    node = visited(kv, context(1, 50))
    on_device = kv.value.chance_of_reuse(node, 0.0)
    assert kv.value.chance_of_reuse(node, 0.0, on_host=True) > 5 * on_device
