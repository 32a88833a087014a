"""SGLang's radix tree with host memory under random operations: all counts are right, and no slot
is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

import cosched.bootstrap  # noqa: F401  # before SGLang
from cosched.engine.host_core import HostedTreeCore
from cosched.memory.eviction import CopyOrder, LeastRecentlyUsed, Leaves
from tests.engine.test_tree_core import CHANGES, OPERATIONS, Machine, only_follow, run, run_alike

FULL = ComponentType.FULL
HOST_TOKENS = 60
TRANSFER_S = 2e-5


class HostMachine(Machine):
    """The same with a small host memory, and the steps that `UnifiedRadixCache` takes with it."""

    kind = HostedTreeCore

    def __init__(self, *, page_size, seed, is_write_back):
        self.is_write_back = is_write_back
        self.host_free = set(range(HOST_TOKENS // page_size * page_size))
        self.loading = []
        super().__init__(page_size=page_size, order="value", seed=seed)

    def watch(self):
        value = self.leaves.value
        value.transfer_s = TRANSFER_S
        order = LeastRecentlyUsed() if self.is_given else CopyOrder(value)
        self.copies = Leaves(order, value, slot="host_rank")
        core = self.core
        core.set_hicache_enabled()
        core.is_write_back = self.is_write_back
        core.write_through_threshold = 2
        self.cache = SimpleNamespace(
            ongoing_write_through={},
            _execute_and_commit_kv_backup=self.back_up,
            writing_check=lambda **kwargs: None,
            evict_for_alloc=None,
            flush_pending_backups=lambda: None,
            ready_to_load_host_cache=lambda: -1,
        )
        core.use_host(self.copies, lambda: len(self.host_free))
        core.watch(self.cache, self.leaves, self.readers, is_given=self.is_given)

    # --- What the cache does ---

    def drain(self, result):
        result.device_frees.clear()
        for indices in result.host_frees.pop(FULL, []):
            self.free_host(indices)
        assert not result.host_frees
        result.cache_actions.clear()

    def free_host(self, indices):
        freed = set(indices.tolist())
        assert not freed & self.host_free
        self.host_free |= freed

    def apply(self, actions):
        for action in actions:
            if type(action).__name__ == "BackupKV":
                self.back_up(action)
            elif type(action).__name__ == "UpdatePendingBackupOnNodeSplit":
                pending = self.cache.ongoing_write_through.get(action.ack_id)
                if pending is not None and action.old_node_id in pending.publish_node_ids:
                    at = pending.publish_node_ids.index(action.old_node_id)
                    both = [action.new_node_id, action.new_child_node_id]
                    pending.publish_node_ids[at : at + 1] = both
        actions.clear()

    def back_up(self, action, write_back=False):
        written = 0
        for node_id in action.node_ids:
            value, _ = self.core.build_backup_spec(node_id)
            if not len(value):
                continue
            missing = len(value) - len(self.host_free)
            if missing > 0:
                result = self.core.drive_host_eviction(FULL, missing)
                freed = result.tracker[FULL]
                self.drain(result)
                if freed < missing:
                    return 0
            taken = [self.host_free.pop() for _ in range(len(value))]
            self.core.commit_backup(node_id, torch.tensor(taken), {})
            lock = None if write_back else self.core.inc_lock_ref(node_id).to_dec_params()
            nodes = self.core.mark_write_through_pending([node_id], ack_id=node_id)
            pending = SimpleNamespace(lock_params=lock, publish_node_ids=list(nodes))
            self.cache.ongoing_write_through[node_id] = pending
            written = len(value)
        return written

    def finish_write(self, node_id):
        pending = self.cache.ongoing_write_through.pop(node_id)
        self.core.finish_write_through(pending.publish_node_ids, node_id)
        if pending.lock_params is not None:
            self.core.dec_lock_ref(node_id, pending.lock_params)

    # --- Operations ---

    def insert(self):
        key = self.key(self.tokens())
        if not len(key):
            return
        params = self.insert_params(key)
        step = self.core.begin_insert(params)
        while step.result is None:
            self.apply(step.actions)
            step = self.core.resume_insert()
        self.apply(step.actions)
        self.apply(self.core.end_insert())
        self.nodes.append(step.result.last_device_node)

    def match(self):
        result = self.core.match_prefix(self.match_params(self.key(self.tokens())))
        self.apply(result.cache_actions)
        for node_id in (result.last_device_node, result.best_match_node):
            if node_id != self.core.root_node.id:
                self.nodes.append(node_id)

    def peek(self):
        """What is found in host memory without a trace is what SGLang's lookup finds."""
        key = self.key(self.tokens())
        num_before = len(self.core.nodes)
        tokens, node_id, _ = self.core.match_full_device_prefix(key)
        found = self.core.num_on_host(key, node_id, tokens)
        assert num_before == len(self.core.nodes)
        result = self.core.match_prefix(self.match_params(key))
        self.apply(result.cache_actions)
        assert (tokens, found) == (result.device_prefix_len, result.host_hit_length)

    def load(self):
        node_id = self.some_node()
        if node_id is None or self.core.nodes[node_id].on_device or len(self.loading) > 3:
            return
        host_lock = self.core.inc_host_lock_ref(node_id).to_dec_params()
        lock = self.core.inc_lock_ref(node_id).to_dec_params()
        transfer, others = self.core.build_load_back_spec(node_id)
        num_tokens = len(transfer.host_indices)
        self.core.dec_lock_ref(node_id, lock)
        if not num_tokens:
            self.core.dec_host_lock_ref(node_id, host_lock)
            return
        slots = torch.arange(num_tokens)
        self.apply(self.core.commit_load_back(node_id, slots, transfer, others))
        self.loading.append((node_id, self.core.inc_lock_ref(node_id).to_dec_params(), host_lock))

    def finish(self):
        """Some transfers end."""
        for node_id in list(self.cache.ongoing_write_through):
            if self.draw.random() < 0.5:
                self.finish_write(node_id)
        if self.loading and self.draw.random() < 0.5:
            node_id, lock, host_lock = self.loading.pop(0)
            self.core.dec_lock_ref(node_id, lock)
            self.core.dec_host_lock_ref(node_id, host_lock)
            self.core.finish_load_back(node_id)

    def ahead(self):
        self.core.write_ahead(self.draw.randrange(1, 30))

    def checkpoint(self):
        node_id = self.some_node()
        if node_id is not None:
            self.core.write(node_id)

    def evict(self):
        wanted = self.draw.randrange(1, 40)
        tracker = {FULL: 0}
        gone_ids = []
        self.core.evict_device_start(FULL, wanted)
        while (result := self.core.evict_device_next_node(FULL, tracker)).node_id is not None:
            node_id = result.node_id
            gone_ids.append(node_id)
            leaf = self.core.evict_device_leaf(node_id, self.is_write_back)
            tracker[FULL] += leaf.tracker[FULL]
            self.drain(leaf)
            if leaf.backup_kv is None:
                continue
            if self.back_up(leaf.backup_kv, write_back=True):
                self.finish_write(node_id)
                gone = self.core.demote(node_id)
            else:
                gone = self.core.drop_subtree_no_host(node_id)
                if not gone.is_dropped:
                    break
            tracker[FULL] += gone.tracker[FULL]
            self.drain(gone)
        self.core.evict_device_end(FULL)
        return gone_ids

    def flush(self):
        idle = not (self.locks or self.pins or self.loading or self.cache.ongoing_write_through)
        if idle and self.draw.random() < 0.1:
            self.core.reset()
            self.host_free = set(range(HOST_TOKENS // self.page_size * self.page_size))

    def under_way(self):
        loading = [node_id for node_id, *_ in self.loading]
        return {"writing": self.cache.ongoing_write_through, "loading": loading}

    def audit(self):
        super().audit()
        on_host = sum(node.num_tokens for node in self.core.nodes.values() if node.on_host)
        assert on_host == HOST_TOKENS // self.page_size * self.page_size - len(self.host_free)


HOST_OPERATIONS = {getattr(HostMachine, op.__name__): n for op, n in OPERATIONS.items()} | {
    HostMachine.load: 4,
    HostMachine.finish: 6,
    HostMachine.ahead: 3,
    HostMachine.checkpoint: 2,
    HostMachine.peek: 2,
}


@pytest.mark.parametrize(
    ("page_size", "is_write_back"),
    [pytest.param(1, True, marks=pytest.mark.long), (4, True), (1, False)],
)
def test_all_counts_are_right_on_both_tiers(monkeypatch, page_size, is_write_back):
    monkeypatch.setattr("cosched.engine.tree_core._LEAST_TAIL", 2)  # nodes are short here
    machine = HostMachine(page_size=page_size, seed=page_size, is_write_back=is_write_back)
    run(machine, HOST_OPERATIONS, seed=5)
    assert machine.core.transferred["to_host"] > 0
    assert machine.core.transferred["to_device"] > 0
    assert machine.core.evicted["demoted"] > 0


class HostRank(HostMachine):
    """One rank of several. Only rank 0 knows times and the requests that wait."""

    is_given = True

    def __init__(self, *, page_size, seed, is_source):
        super().__init__(page_size=page_size, seed=seed, is_write_back=False)
        self.core.write_through_threshold = 1  # more copies than host memory holds
        if not is_source:
            only_follow(self)


@pytest.mark.parametrize("page_size", [1, 4])
def test_all_ranks_keep_the_same_on_both_tiers(monkeypatch, page_size):
    monkeypatch.setattr("cosched.engine.tree_core._LEAST_TAIL", 2)
    ranks = source, other = [
        HostRank(page_size=page_size, seed=1, is_source=is_source) for is_source in (True, False)
    ]
    for _ in run_alike(source, other, (*CHANGES, "load", "finish", "finish", "peek"), "evict"):
        assert source.host_free == other.host_free
    for rank in ranks:
        rank.audit()
    assert source.core.evicted["demoted"] > 0 and source.core.evicted["host"] > 0
