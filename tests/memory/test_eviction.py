"""The order in which KV goes, and what is lost by it."""

from __future__ import annotations

import random

import pytest

from cosched.memory import occupancy
from cosched.memory.eviction import Leaves
from cosched.memory.node import Visit
from cosched.memory.reuse import ReuseModel
from cosched.memory.value import KvValue, RecomputeCosts
from cosched.policies import EVICTION_ORDERS
from tests.factories import Linear
from tests.memory.plain_tree import PlainTree


class Kv:
    """A tree to which contexts are added as an engine would."""

    def __init__(self, order: str = "value") -> None:
        self.reuse = ReuseModel()
        costs = RecomputeCosts()
        costs.refresh(Linear(fixed_s=0.001, token_s=1e-4, longest_s=1e-6))
        self.value = KvValue(self.reuse, costs)
        self.leaves = Leaves(EVICTION_ORDERS[order](self.value), self.value)
        self.tree = PlainTree(self.leaves)

    def add(self, tokens, *, chunk=50, is_online=False):
        return self.tree.add(tokens, chunk=chunk, is_online=is_online)

    def evict(self):
        node = self.leaves.first()
        self.tree.evict(node.node_id)
        return node

    def order(self):
        return [node.node_id for node in self.leaves.in_order()]


def context(seed, count=100):
    return [random.Random(seed).randrange(1, 10**6) for _ in range(count)]


def visit(end_s=0.0, num_tokens=100, ttft_s=1.0):
    return Visit(0, end_s, num_tokens, ttft_s)


def wait_for(kv, tokens, count=1):
    for _ in range(count):
        kv.tree.refer(tokens)


def test_what_nobody_comes_for_goes_first_then_the_least_recently_used():
    kv = Kv()
    first, second, third = (kv.add(context(seed), chunk=100) for seed in range(3))
    wait_for(kv, context(0))
    assert kv.order() == [second, third, first]


def test_a_context_that_may_come_back_stays_longer_than_one_that_waited_too_long():
    kv = Kv()
    old, fresh = (kv.add(context(s), chunk=100, is_online=True) for s in range(2))
    dead = kv.add(context(2), chunk=100)
    kv.tree.left(fresh, visit(end_s=1000.0))
    kv.tree.left(old, visit(end_s=0.0))
    kv.leaves.advance(1001.0)
    assert kv.order() == [dead, old, fresh]


def test_a_deep_context_whose_loss_makes_a_user_wait_is_worth_more_than_throughput():
    kv = Kv()
    online = kv.add(context(0, 4000), chunk=4000, is_online=True)
    offline = kv.add(context(1, 4000), chunk=4000)
    wait_for(kv, context(1, 4000), 20)
    kv.tree.left(online, visit(num_tokens=4000, ttft_s=0.1))
    assert kv.order()[0] == offline
    kv.tree.left(online, visit(num_tokens=4000, ttft_s=100.0))
    assert kv.order()[0] == online, "with so much time nobody notices"


@pytest.mark.parametrize(
    ("num_tokens", "ttft_s", "share"), [(500, 1.0, 0), (5_000, 1.0, 0.47), (20_000, 1.0, 1)]
)
def test_a_context_that_is_computed_again_in_time_makes_no_request_late(num_tokens, ttft_s, share):
    """A token takes 0.1 ms."""
    assert Kv().value.lateness(num_tokens, ttft_s) == pytest.approx(share, abs=0.02)


def test_one_user_waits_rather_than_two():
    """A token takes 0.1 ms, the first token shall come within a second: with eleven of twenty
    pieces of 1,000 tokens a context has lost all that can make it late."""
    kv = Kv()
    for seed in range(2):
        node_id = kv.add(context(seed, 20_000), chunk=1000, is_online=True)
        kv.tree.left(node_id, visit(num_tokens=20_000))
    lost = {seed: 0 for seed in range(2)}
    first = {context(seed, 1)[0]: seed for seed in range(2)}
    for _ in range(20):
        node = kv.leaves.first()
        top = node
        while top.parent.parent is not None:
            top = top.parent
        lost[first[top.tokens[0]]] += 1
        kv.tree.evict(node.node_id)
    assert min(lost.values()) <= 1, "what nobody notices"


def expect(kv, key, tokens):
    kv.tree.expect(key, tokens)


@pytest.mark.parametrize("seed", range(2))
def test_what_a_waiting_online_request_will_use_is_worth_more_than_all_else(seed):
    kv = Kv()
    draw = random.Random(seed)
    deep = [c for part in range(60) for c in context(100 + part, 2000)]
    others = [kv.add(deep, chunk=2000)]
    wait_for(kv, deep, 20)
    for number in range(20):
        tokens = context(number, draw.randrange(1, 5) * 1000)
        node_id = kv.add(tokens, chunk=500, is_online=True)
        kv.tree.left(node_id, visit(end_s=10.0, num_tokens=len(tokens), ttft_s=0.01))
        others.append(node_id)
    preempted = kv.add(context(50, 4000), chunk=1000, is_online=True)
    kv.leaves.advance(10.0)
    assert preempted in kv.order()[:5], "without a reference or a visit"
    expect(kv, "preempted", context(50, 4000))
    assert set(kv.order()[-4:]) == {n.node_id for n in kv.tree.nodes[preempted].upwards()}
    kv.tree.no_longer_expect("preempted")
    assert preempted in kv.order()[:5]


def test_echo_ranks_references_above_finished_online_above_the_rest():
    kv = Kv("echo")
    rest = kv.add(context(0), chunk=100)
    online = kv.add(context(1), chunk=100, is_online=True)
    two, one = kv.add(context(2), chunk=100), kv.add(context(3), chunk=100)
    wait_for(kv, context(2), 2)
    wait_for(kv, context(3), 1)
    assert kv.order() == [rest, online, one, two]
    expect(kv, "preempted", context(1))
    assert kv.order() == [rest, online, one, two], "it does not know who waits online"


@pytest.mark.parametrize("order", EVICTION_ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_the_forecast_is_what_evicting_one_by_one_gives(order, seed):
    kv = Kv(order)
    draw = random.Random(seed)
    for _ in range(30):
        tokens = [c for _ in range(draw.randrange(1, 5)) for c in context(draw.randrange(4), 50)]
        node_id = kv.add(tokens, is_online=draw.random() < 0.5)
        if draw.random() < 0.3:
            kv.tree.left(node_id, visit(end_s=draw.random() * 100))
        if draw.random() < 0.3:
            wait_for(kv, tokens)
        if draw.random() < 0.2:
            kv.tree.hold(node_id)
        if draw.random() < 0.2:
            expect(kv, len(kv.tree.nodes), tokens)
    kv.leaves.advance(100.0)
    for _ in range(20):  # everyone has a turn
        kv.leaves.advance(100.0)
    forecast = list(kv.leaves.in_order())
    assert sum(node.num_tokens for node in forecast) == kv.tree.num_evictable
    assert [kv.evict().node_id for _ in forecast] == [node.node_id for node in forecast]
    assert not kv.tree.num_evictable


def test_a_leaf_has_one_timer_however_often_it_changes():
    kv = Kv()
    node_id = kv.add(context(0), is_online=True)
    kv.tree.left(node_id, visit())
    for step in range(100):
        wait_for(kv, context(0))
        kv.leaves.advance(step * 10.0)
    assert len(kv.leaves._timers) <= 2


def test_the_uses_of_a_large_tree_are_counted_in_steps_and_add_up_to_what_is_there(monkeypatch):
    monkeypatch.setattr(occupancy, "_NODES", 10)
    kv = Kv()
    uses = occupancy.UseCount(kv.tree, kv.value)
    for seed in range(25):
        kv.add(context(seed), chunk=100)
    wait_for(kv, context(24))
    num_asked = []
    chance = kv.value.chance_of_reuse
    monkeypatch.setattr(
        kv.value, "chance_of_reuse", lambda *a, **f: num_asked.append(1) or chance(*a, **f)
    )
    for num_looked_at in (10, 20, 25, 25):
        uses.look(0.0)  # too large to be counted at once
        uses.step(0.0)
        assert len(num_asked) == num_looked_at
    assert uses.on_device == {"dead": 2400, "referenced": 100}
    for _ in range(10):
        kv.evict()
    found = occupancy.dealt(kv.tree.num_evictable, uses.on_device, "returning", "referenced")
    assert found == {"returning": 0, "referenced": 100, "dead": 1400}
    for _ in range(10):
        kv.evict()
    uses.look(0.0)
    assert uses.on_device == {"dead": 400, "referenced": 100}, "one step is enough"
