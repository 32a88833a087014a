"""SGLang's radix tree with cosched's order, under random operations."""

from __future__ import annotations

import os
import random
from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

import cosched.bootstrap  # noqa: F401  # before SGLang
from cosched.engine.kv_readers import KvReaders
from cosched.engine.tree_core import KvTreeCore
from cosched.memory.eviction import Leaves
from cosched.memory.node import Visit
from cosched.memory.reuse import ReuseModel
from cosched.memory.value import KvValue, RecomputeCosts
from cosched.policies import EVICTION_ORDERS
from cosched.pool.prefix_pool import PoolConfig, PrefixPool
from cosched.pool.radix import pack
from tests.engine.integrity import check_tree
from tests.factories import Linear, offline

NUM_OPERATIONS = int(os.environ.get("COSCHED_TREE_OPERATIONS", "2000"))

FULL = ComponentType.FULL


def make_core(page_size, kind=KvTreeCore):
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        page_size=page_size,
        tree_components=(FULL,),
    )
    cache = SimpleNamespace(enable_session_radix_cache=False)
    return kind(params, {FULL: FullComponent(cache, params)})


def consume(leaf):
    """Take what an eviction has freed, as SGLang's cache does."""
    leaf.device_frees.clear()
    leaf.cache_actions.clear()


class Machine:
    """A tree of SGLang's and an offline pool under random operations."""

    kind = KvTreeCore
    is_given = False

    def __init__(self, *, page_size, order, seed):
        self.draw = random.Random(seed)
        self.page_size = page_size
        self.pool = PrefixPool(PoolConfig(utility_ratio=0.9, num_buckets=2))
        self.reuse = ReuseModel()
        costs = RecomputeCosts()
        costs.refresh(Linear())
        value = KvValue(self.reuse, costs)
        self.leaves = Leaves(EVICTION_ORDERS[order](value), value)
        self.core = make_core(page_size, self.kind)
        self.readers = KvReaders(page_size, self.future, self.core.changed)
        self.watch()
        self.locks = []
        self.pins = []
        self.waiting = {}
        self.nodes = []
        self.now_s = 0.0
        self.num_rids = 0

    def watch(self):
        self.cache = SimpleNamespace(evict_for_alloc=None)
        self.core.watch(self.cache, self.leaves, self.readers, is_given=self.is_given)

    def future(self, ids, prefix_key):
        return self.pool.future_references(pack(ids), prefix_key)

    def tokens(self):
        """From a tiny vocabulary: prompts share much, and nodes are split often."""
        draw = self.draw
        head = [draw.randrange(2)] * draw.randrange(0, 12)
        return head + [draw.randrange(3) for _ in range(draw.randrange(1, 16))]

    def key(self, tokens):
        key = RadixKey(array("q", tokens), extra_key=self.draw.choice((None, None, "lora")))
        return key.page_aligned(self.page_size)

    def insert(self):
        key = self.key(self.tokens())
        if not len(key):
            return
        step = self.core.begin_insert(self.insert_params(key))
        while step.result is None:
            step.actions.clear()
            step = self.core.resume_insert()
        step.actions.clear()
        self.core.end_insert().clear()
        self.nodes.append(step.result.last_device_node)

    def insert_params(self, key):
        is_online = self.draw.random() < 0.5
        return InsertParams(
            key=key,
            value=torch.arange(len(key)),
            prev_prefix_len=0,
            priority=0 if is_online else -1,
        )

    def match_params(self, key):
        return MatchPrefixParams(key=key)

    def match(self):
        result = self.core.match_prefix(self.match_params(self.key(self.tokens())))
        result.cache_actions.clear()
        if result.last_device_node != self.core.root_node.id:
            self.nodes.append(result.last_device_node)

    def some_node(self):
        nodes = [node for node in self.nodes[-30:] if node in self.core.nodes]
        return self.draw.choice(nodes) if nodes else None

    def lock(self):
        node = self.some_node()
        if node is not None and len(self.locks) < 20:
            self.locks.append((node, self.core.inc_lock_ref(node).to_dec_params()))

    def unlock(self):
        if self.locks:
            node, receipt = self.locks.pop(self.draw.randrange(len(self.locks)))
            self.core.dec_lock_ref(node, receipt)

    def pin(self):
        node = self.some_node()
        if node is not None and len(self.pins) < 5:
            self.core.inc_full_pin(node)
            self.pins.append(node)

    def unpin(self):
        if self.pins:
            self.core.dec_full_pin(self.pins.pop(self.draw.randrange(len(self.pins))))

    def evict(self):
        expected = [node.node_id for node in self.leaves.in_order()]
        gone = self.evict_some()
        assert gone == expected[: len(gone)]

    def evict_some(self):
        """Returns the evicted nodes."""
        wanted = self.draw.randrange(1, 40)
        tracker = {FULL: 0}
        before = self.core.num_evictable
        self.core.evict_device_start(FULL, wanted)
        gone = []
        while (result := self.core.evict_device_next_node(FULL, tracker)).node_id is not None:
            gone.append(result.node_id)
            leaf = self.core.evict_device_leaf(result.node_id, False)
            tracker[FULL] += leaf.tracker[FULL]
            consume(leaf)
        self.core.evict_device_end(FULL)
        assert tracker[FULL] >= min(wanted, before)
        return gone

    def wait(self):
        if len(self.waiting) > 30:
            return
        self.num_rids += 1
        key = self.draw.choice((None, None, "lora"))
        request = offline(f"r{self.num_rids}", token_ids=self.tokens(), prefix_key=(key, None))
        self.pool.add(request)
        self.waiting[request.rid] = request
        self.readers.refer(self.core.root_node, key_of(request), 1)

    def leave(self):
        if self.waiting:
            rid = self.draw.choice(list(self.waiting))
            request = self.waiting.pop(rid)
            (self.pool.remove if self.draw.random() < 0.7 else self.pool.abort)(rid)
            self.readers.refer(self.core.root_node, key_of(request), -1)

    def depart(self):
        node = self.some_node()
        if node is not None:
            self.core.left(node, Visit(0, self.now_s, self.draw.randrange(1, 99), 0.01))

    def tick(self):
        self.now_s += self.draw.expovariate(0.5)
        self.leaves.advance(self.now_s)

    def flush(self):
        if not self.locks and not self.pins and self.draw.random() < 0.05:
            self.core.reset()

    def audit(self):
        check_tree(self.core, [key_of(request) for request in self.pool], **self.under_way())

    def under_way(self):
        return {}


def key_of(request):
    extra_key, cache_salt = request.prefix_key
    return RadixKey(array("q", request.token_ids), extra_key, cache_salt=cache_salt)


OPERATIONS = {
    Machine.insert: 6,
    Machine.match: 3,
    Machine.lock: 3,
    Machine.unlock: 3,
    Machine.pin: 1,
    Machine.unpin: 1,
    Machine.evict: 4,
    Machine.wait: 4,
    Machine.leave: 4,
    Machine.depart: 1,
    Machine.tick: 2,
    Machine.flush: 1,
}


def run(machine, operations, *, seed):
    """Random operations by weight, with an audit after each."""
    drawn = random.Random(seed).choices(
        list(operations), list(operations.values()), k=NUM_OPERATIONS
    )
    for operation in drawn:
        operation(machine)
        machine.audit()


@pytest.mark.parametrize(("page_size", "order"), [(1, "value"), (4, "value"), (1, "echo")])
def test_all_counts_are_right_after_every_operation(monkeypatch, page_size, order):
    monkeypatch.setattr("cosched.engine.tree_core._LEAST_TAIL", 2)  # nodes are short here
    machine = Machine(page_size=page_size, order=order, seed=page_size)
    run(machine, OPERATIONS, seed=3)


# --- Several ranks ---


def only_follow(machine):
    """Make it a rank that is not rank 0: it knows neither the time nor the requests."""
    machine.readers.refer = lambda *args: None
    machine.core.left = lambda *args: None
    machine.leaves.advance = lambda now_s: None
    machine.readers.added = lambda node: None


class Rank(Machine):
    """is_source: rank 0, which knows the time, and which requests wait and have ended."""

    is_given = True

    def __init__(self, *, page_size, seed, is_source):
        super().__init__(page_size=page_size, order="value", seed=seed)
        if not is_source:
            only_follow(self)


CHANGES = (
    *("insert", "insert", "insert", "match", "lock", "unlock", "pin", "unpin"),
    *("wait", "leave", "depart", "tick"),
)


def run_alike(source, other, changes, evict):
    """The same random changes and evictions on two ranks; yields after each. `evict` names the
    method that evicts and returns the nodes."""
    draw = random.Random(2)
    num_given = num_alike = 0
    for _ in range(NUM_OPERATIONS):
        if draw.random() < 0.2:
            # More or fewer nodes than are evicted; sometimes SGLang's order.
            evictions = source.leaves.next_to_go(draw.randrange(60))
            given = None if draw.random() < 0.1 else evictions
            for rank in (source, other):
                rank.core.give(given)
            if draw.random() < 0.3:  # the tree changes after the list was made
                change = draw.choice(changes)
                for rank in (source, other):
                    getattr(rank, change)()
            gone = getattr(source, evict)()
            assert gone == getattr(other, evict)()
            num_given += len(gone) if given else 0
            num_alike += len({node_id for node_id, _ in given or ()} & set(gone))
        else:
            change = draw.choice(changes)
            for rank in (source, other):
                getattr(rank, change)()
        assert source.core.nodes.keys() == other.core.nodes.keys()
        assert source.core.num_evictable == other.core.num_evictable
        yield
    assert num_alike > num_given / 2 > 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_all_ranks_evict_the_nodes_of_rank_0(page_size):
    source, other = (
        Rank(page_size=page_size, seed=1, is_source=is_source) for is_source in (True, False)
    )
    for _ in run_alike(source, other, CHANGES, "evict_some"):
        pass
