"""HiCache on a CPU under cosched: the real model's tokens are the same with KV that was copied to
host memory and back, and nothing is lost on either side."""

import random

import pytest
from sglang.srt.mem_cache.l2_transfer import TransferCompletion

from cosched.memory.occupancy import HostOccupancy
from tests.engine.conftest import assert_drained, outputs, prompt

HOST = {"switches": ["--enable-hierarchical-cache"], "hicache_size": 0}


class LateTransfers:
    """Copies only after the event of a copy was polled a few times or waited for, or when a batch
    waits for a load: reading too early gives wrong data."""

    def __init__(self, engine, num_polls):
        self.num_polls = num_polls
        self.pending = []
        controller = engine.scheduler.tree_cache.cache_controller
        transfers = controller.l2_transfer_engine
        for name in ("submit_device_to_host", "submit_host_to_device"):
            setattr(transfers, name, self.later(getattr(transfers, name)))
        counter = controller.layer_done_counter

        def wait_until(layer):
            if counter.consumer_index >= 0:
                for event in list(self.pending):
                    event.synchronize()

        counter.wait_until = wait_until

    def later(self, submit):
        def submit_later(*args, **kwargs):
            event = LateEvent(self, lambda: submit(*args, **kwargs))
            self.pending.append(event)
            return TransferCompletion(event, event, False)

        return submit_later


class LateEvent:
    def __init__(self, transfers, copy):
        self.transfers = transfers
        self.num_polls = transfers.num_polls
        self.copy = copy

    def query(self):
        self.num_polls -= 1
        if self.num_polls < 0:
            self.synchronize()
        return self not in self.transfers.pending

    def synchronize(self):
        """Do this copy and those before it."""
        while self in self.transfers.pending:
            self.transfers.pending.pop(0).copy()


def serve(engine, *, seed=1, num_rounds=6):
    """Sessions of both classes with shared prefixes, more than the device holds."""
    draw = random.Random(seed)
    heads = [prompt(i, 120) for i in range(6)]
    number = 0
    for _ in range(num_rounds):
        for _ in range(draw.randrange(1, 6)):
            head = draw.choice(heads)[: draw.randrange(20, 120)]
            tail = prompt(100 + draw.randrange(30), draw.randrange(1, 90))
            is_online = draw.random() < 0.5
            engine.submit(
                f"r{number}",
                head + tail,
                max_new_tokens=draw.randrange(1, 16),
                priority=0 if is_online else -1,
            )
            number += 1
        engine.run_until_idle()
    assert_drained(engine)
    return outputs(engine)


@pytest.fixture(scope="module")
def undisturbed():
    """Filled by the first test: the tokens of an engine with enough memory."""
    return {}


@pytest.mark.parametrize(
    ("write", "page_size", "num_polls", "ratio"),
    [
        ("write_back", 16, 3, 1.5),
        pytest.param("write_back", 1, 9, 1.5, marks=pytest.mark.long),
        ("write_back", 1, 6, 0.4),
        ("write_through", 1, 2, 1.5),
        ("write_through_selective", 16, 0, 0.4),
    ],
)
def test_tokens_are_the_same_with_host_memory(
    make_engine, undisturbed, write, page_size, num_polls, ratio
):
    if not undisturbed:
        undisturbed |= serve(make_engine(policy="hygen", overlap=True, max_total_tokens=4000))
    engine = make_engine(
        policy="hygen",
        overlap=True,
        config={"kv": {"reservation": "off"}},
        max_total_tokens=608,
        page_size=page_size,
        hicache_write_policy=write,
        hicache_ratio=ratio,
        **HOST,
    )
    LateTransfers(engine, num_polls)
    assert serve(engine) == undisturbed
    kv = engine.scheduler.cosched.kv
    host = kv.occupancy().host
    assert isinstance(host, HostOccupancy)
    assert host.to_host > 0 and host.demoted > 0
    assert host.to_device > 0 or ratio < 1
    pool = engine.scheduler.tree_cache.cache_controller.mem_pool_host
    assert host.free == pool.available_size()
    copies = [node for node in kv.core.nodes.values() if node.on_host]
    assert host.doubled == sum(node.num_tokens for node in copies if node.on_device)
    assert host.free + host.doubled + host.returning + host.referenced + host.dead == pool.size


def overflow(engine, rid, num_tokens, *, seed):
    """Evict what is idle from the device."""
    engine.submit(rid, prompt(seed, num_tokens), max_new_tokens=2)
    engine.run_until_idle()


def with_host(make_engine, *, kv=None, **flags):
    flags = {"hicache_write_policy": "write_back", "hicache_ratio": 3, **flags}
    return make_engine(
        policy="hygen",
        config={"kv": {"reservation": "off", **(kv or {})}},
        max_total_tokens=600,
        **HOST,
        **flags,
    )


def test_a_context_on_the_host_is_loaded_and_not_computed(make_engine):
    engine = with_host(make_engine)
    counters = engine.scheduler.cosched.counters
    engine.submit("first", prompt(1, 300), max_new_tokens=8)
    engine.run_until_idle()
    context = prompt(1, 300) + list(engine.replies["first"].output_ids)
    overflow(engine, "other", 500, seed=2)
    before = counters.online_prefill_tokens
    engine.submit("second", context + prompt(3, 40), max_new_tokens=4)
    engine.run_until_idle()
    assert engine.scheduler.cosched.kv.core.transferred["to_device"] > 200
    assert counters.online_prefill_tokens - before < 50
    assert_drained(engine)


def ask_each(engine, num_requests, *, priority=0):
    """Requests that share nothing, one after the other."""
    for i in range(num_requests):
        engine.submit(f"r{i}", prompt(i + 1, 300), max_new_tokens=2, priority=priority)
        engine.run_until_idle()


@pytest.mark.parametrize(
    ("priority", "kv"),
    [
        pytest.param(-1, {}, id="no offline request waits for it"),
        pytest.param(0, {"host_bandwidth_gb_s": 1e-9}, id="computing is faster than copying"),
    ],
)
def test_what_is_not_worth_it_is_not_copied(make_engine, priority, kv):
    engine = with_host(make_engine, kv=kv)
    ask_each(engine, 6, priority=priority)
    core = engine.scheduler.cosched.kv.core
    assert core.evicted["all"] > 1000
    assert core.transferred["to_host"] == 0
    assert_drained(engine)


def num_on_host(engine):
    """Tokens of all copies."""
    nodes = engine.scheduler.cosched.kv.core.nodes.values()
    return sum(node.num_tokens for node in nodes if node.on_host)


def test_a_flush_empties_both(make_engine):
    engine = with_host(make_engine)
    LateTransfers(engine, 2)
    ask_each(engine, 4)
    kv = engine.scheduler.cosched.kv
    assert num_on_host(engine) > 0
    engine.scheduler.flush_cache()
    assert len(kv.core.nodes) == 1, "the root"
    assert num_on_host(engine) == 0
    assert_drained(engine)
    engine.submit("after", prompt(1, 300), max_new_tokens=2)
    engine.run_until_idle()
    assert_drained(engine)


def test_after_a_failed_load_at_most_one_prefill_is_unfinished(make_engine):
    """The load is of a prompt that the plan admits whole, beside another that it cuts."""
    asked = {
        "second": prompt(1, 200) + prompt(3, 3),
        "third": prompt(2, 200) + prompt(4, 3),
        "long": prompt(5, 100),
    }

    def submit(engine):
        for rid, tokens in asked.items():
            engine.submit(rid, tokens, max_new_tokens=6)
        engine.run_until_idle()
        return {rid: engine.replies[rid].output_ids for rid in asked}

    expected = submit(make_engine(policy="hygen", max_total_tokens=4000))
    engine = with_host(make_engine, hicache_ratio=5)
    engine.submit("first", prompt(1, 200), max_new_tokens=2)
    engine.submit("before", prompt(2, 200), max_new_tokens=2)
    engine.run_until_idle()
    overflow(engine, "other", 560, seed=6)
    assert num_on_host(engine) > 380
    failed = []
    engine.scheduler.tree_cache.load_back = lambda *args, **kwargs: failed.append(1)
    assert submit(engine) == expected
    assert failed
    assert_drained(engine)
