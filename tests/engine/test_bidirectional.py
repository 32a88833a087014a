"""An online and an offline request share a page on a real in-process SGLang scheduler."""

import random
from collections import Counter

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine import port
from cosched.errors import ConfigError
from tests.engine.conftest import assert_drained, kv_tokens, prompt, with_virtual_time
from tests.engine.test_partial_decode import hold_at_random

SHARED = {"kv": {"bidirectional_pages": True}}


def owners(scheduler):
    """Rows of requests that have any, and how many slots each has; mixed decodes and an unfinished
    prefill included."""
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch]
    reqs = {req for batch in batches for req in batch.reqs} | {scheduler.chunked_req}
    return {req.kv.req_pool_idx: req for req in reqs if req is not None and req.kv.holds_kv}


def audit(scheduler):
    """No slot has two owners, and none is lost: what requests have beside the tree lies where the
    table says, in the order of its class, in no free page. Returns how many pages are shared."""
    allocator, table = scheduler.token_to_kv_pool_allocator, None
    page_size = allocator.page_size
    table = allocator.table
    table.check_integrity()
    rows = owners(scheduler)
    free = allocator.get_all_free_pages().tolist()
    assert len(free) == len(set(free))
    slots_of = Counter()
    users = {}
    for row, req in rows.items():
        slots = scheduler.req_to_token_pool.req_to_token[row, : req.kv.kv_allocated_len].tolist()
        own = slots[req.kv.cache_protected_len :]
        slots_of.update(own)
        for slot in own:
            users.setdefault(slot // page_size, set()).add(row)
        tail = len(slots) % page_size
        if tail:
            mine = table.tail(row)
            assert (mine.start, mine.count) == (len(slots) - tail, tail)
            first = slots[-tail] // page_size * page_size
            if mine.is_online:
                assert slots[-tail:] == [first + i for i in range(tail)]
            else:
                assert slots[-tail:] == [first + page_size - 1 - i for i in range(tail)]
        else:
            assert table.tail(row) is None
    assert {tail.row for tail in table} <= rows.keys()
    assert not slots_of or max(slots_of.values()) == 1
    assert not users.keys() & set(free)
    assert all(len(of_page) <= 2 for of_page in users.values())
    num_shared = sum(len(of_page) == 2 for of_page in users.values())
    assert num_shared == table.num_shared
    tree = scheduler.tree_cache
    held = len(users) + len(free) + (tree.evictable_size() + tree.protected_size()) // page_size
    assert held == port.kv_total(scheduler) // page_size
    return num_shared


def traffic(engine, seed, *, num_iterations=150):
    """Random arrivals, aborts and stops of both classes in little memory. Returns the replies."""
    rng = random.Random(seed)
    scheduler = engine.scheduler
    sent, num_shared = {}, 0

    def act(iteration):
        nonlocal num_shared
        scheduler.invariant_checker.self_check_during_busy()
        num_shared += audit(scheduler)
        held, total = kv_tokens(scheduler)
        assert held <= total
        is_idle = len(engine.replies) == len(sent)
        if iteration < num_iterations and (is_idle or rng.random() < 0.2):
            rid = f"r{len(sent)}"
            length = rng.randint(1, 80)
            tokens = prompt(rng.randint(0, 3), 64) if rng.random() < 0.3 else []
            tokens = tokens + prompt(100 + len(sent), rng.randint(1, 80))
            sent[rid] = (tokens, length)
            engine.submit(
                rid, tokens, max_new_tokens=length, priority=rng.choice([None, 0, -1, -1])
            )
        if sent and rng.random() < 0.04:
            engine.abort(rng.choice(list(sent)))

    engine.run_until_idle(on_iteration=act, max_iterations=20_000)
    assert_drained(engine)
    return sent, num_shared


@pytest.mark.parametrize(
    ("page_size", "num_tokens", "overlap", "mixed", "holds"),
    [
        (8, 960, False, True, True),
        (16, 640, True, True, False),
        (16, 640, False, False, True),
        (64, 1280, True, False, True),
    ],
)
def test_sharing_pages_changes_no_token(
    make_engine, monkeypatch, page_size, num_tokens, overlap, mixed, holds
):
    """holds: requests sit out iterations too."""
    monkeypatch.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
    flags = {"overlap": overlap, "mixed": mixed, "page_size": page_size}
    engine = with_virtual_time(make_engine(config=SHARED, **flags, max_total_tokens=num_tokens))
    allocator = engine.scheduler.token_to_kv_pool_allocator
    if holds:
        hold_at_random(engine, seed=1)
    sent, num_shared = traffic(engine, page_size)
    replies = dict(engine.replies)
    assert num_shared > 20
    assert allocator.num_parted
    assert any(reply.num_retractions for reply in replies.values())

    plain = make_engine(**flags, max_total_tokens=8000)
    for rid, (tokens, length) in sent.items():
        plain.submit(rid, tokens, max_new_tokens=length)
    plain.run_until_idle(max_iterations=20_000)
    ended = 0
    for rid, reply in replies.items():
        expected = plain.replies[rid].output_ids
        if reply.finish_reason == "abort":
            assert reply.output_ids == expected[: len(reply.output_ids)]
        else:
            assert reply.output_ids == expected
            ended += 1
    assert ended > 10


@pytest.mark.parametrize(
    ("flags", "switches", "reason"),
    [
        ({"page_size": 1}, (), "one slot, and nothing to share"),
        ({"page_size": 16}, ("--enable-hierarchical-cache",), "copies pages in ascending order"),
        ({"page_size": 16, "attention_backend": "fa3"}, (), "fa3 reads whole pages"),
        ({"page_size": 16, "tp": 2}, (), "several ranks"),
    ],
)
def test_where_pages_cannot_be_shared_the_start_is_refused(make_engine, flags, switches, reason):
    with pytest.raises(ConfigError, match=reason):
        make_engine(config=SHARED, switches=switches, **flags)


def test_without_the_key_the_allocator_is_sglangs(make_engine):
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    engine = make_engine(page_size=16)
    assert type(engine.scheduler.token_to_kv_pool_allocator) is PagedTokenToKVPoolAllocator
