"""The decode server of PD disaggregation, over SGLang's fake transfer.

500 requests: ``COSCHED_DECODE_REQUESTS=500 pytest tests/engine/test_decode_role.py``.
"""

import os
import random

import pytest
from msgspec.structs import replace

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.view import OfflineLimits
from tests.engine.conftest import OFFLINE, outputs, prompt, without_model

FLAGS = {
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "fake",
    "max_running_requests": 6,
    "max_total_tokens": 400,
    "num_reserved_decode_tokens": 4,
    "disaggregation_decode_retraction_backup": "cpu_tensor",
}
NUM_REQUESTS = int(os.environ.get("COSCHED_DECODE_REQUESTS", "14"))
FAKE = {"bootstrap_host": "2.2.2.2", "bootstrap_port": 1}


@pytest.fixture
def transfer(monkeypatch):
    """The fake one leaves in the KV memory what was there: fill in something for each prompt."""
    import torch
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    original = DecodePreallocQueue._pre_alloc

    def allocate(queue, req, *args, **kwargs):
        indices = original(queue, req, *args, **kwargs)
        generator = torch.Generator().manual_seed(int(req.rid[1:]))
        row = queue.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        slots = row[: len(req.origin_input_ids)].long()
        kv = queue.token_to_kv_pool_allocator.get_kvcache()
        for pool in (*kv.k_buffer, *kv.v_buffer):
            pool[slots] = torch.randn(pool[slots].shape, generator=generator)
        return indices

    monkeypatch.setattr(DecodePreallocQueue, "_pre_alloc", allocate)


def send(engine, number, seed=1):
    """Two of three are offline."""
    choose = random.Random(seed)
    for n in range(number):
        engine.submit(
            f"r{n}",
            prompt(n, choose.randrange(5, 60)),
            max_new_tokens=choose.randrange(2, 40),
            priority=OFFLINE if n % 3 else 0,
            bootstrap_room=n,
            **FAKE,
        )


def pause_at_random(engine, share, on_plan, seed=1):
    planner, choose = engine.scheduler.cosched.planner, random.Random(seed)
    original, paused = planner.plan, []

    def plan(running_batch, *rest, **options):
        on_plan(running_batch)
        iteration = original(running_batch, *rest, **options)
        more = {r.rid for r in running_batch.reqs[1:] if choose.random() < share}
        more -= {r.rid for r in running_batch.reqs if r.finished()}
        paused.append(len(more))
        if more:
            iteration.plan = replace(iteration.plan, paused=frozenset(more))
        return iteration

    planner.plan = plan
    return paused


def test_the_same_tokens_as_stock_with_pauses_and_too_little_memory(make_engine, transfer):
    stock = make_engine(policy="sglang", mixed=False, **FLAGS | {"max_total_tokens": 2000})
    send(stock, NUM_REQUESTS)
    stock.run_until_idle()
    expected = outputs(stock)
    engine = make_engine(policy="cosched", mixed=False, overlap=True, **FLAGS)
    scheduler, gone, batches = engine.scheduler, [], []

    def leaves(rid):
        gone.append(rid)
        if int(rid[1:]) % 3 == 0:
            assert not any(int(req.rid[1:]) % 3 for req in batches[-1].reqs), "an offline one runs"

    engine.watch_stops(leaves)
    paused = pause_at_random(engine, 0.2, batches.append)
    send(engine, NUM_REQUESTS)
    engine.run_until_idle(max_iterations=20_000)
    assert outputs(engine) == expected
    assert sum(paused) > 10 and any(int(rid[1:]) % 3 for rid in gone)
    assert scheduler.token_to_kv_pool_allocator.available_size() == 400
    assert not scheduler.cosched.counters.num_safe_plans


def test_online_requests_get_memory_first_and_limits_hold(make_engine):
    engine = without_model(make_engine(policy="hygen", mixed=False, **FLAGS))
    engine.scheduler.cosched.waiting.offline_limits = OfflineLimits(max_running=1)
    running = []

    def look(iteration):
        reqs = engine.scheduler.running_batch.reqs
        running.append([req.rid for req in reqs if not req.finished()])

    send(engine, 20)
    engine.run_until_idle(on_iteration=look, max_iterations=5000)
    assert len(engine.replies) == 20
    assert max(sum(int(rid[1:]) % 3 > 0 for rid in rids) for rids in running) == 1
    ends = list(engine.replies)
    assert sum(int(rid[1:]) % 3 == 0 for rid in ends[:8]) >= 6
