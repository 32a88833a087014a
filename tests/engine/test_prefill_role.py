"""The prefill server of PD disaggregation, over SGLang's fake transfer: nothing is sent.

500 requests: ``COSCHED_PREFILL_REQUESTS=500 pytest tests/engine/test_prefill_role.py``.
"""

import os
import random

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine.read_state import state_of
from tests.engine.conftest import OFFLINE, assert_drained, outputs, prompt
from tests.engine.test_decode_role import FAKE

FLAGS = {
    "disaggregation_mode": "prefill",
    "disaggregation_transfer_backend": "nixl",
    "max_running_requests": 6,
    "max_total_tokens": 600,
}
NUM_REQUESTS = int(os.environ.get("COSCHED_PREFILL_REQUESTS", "24"))


@pytest.fixture(autouse=True)
def fake_transfer(monkeypatch):
    from sglang.srt.disaggregation import prefill, utils

    # With overlap SGLang records a CUDA event for it.
    monkeypatch.setenv("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
    original = utils.get_kv_class
    fake = utils.TransferBackend.FAKE
    monkeypatch.setattr(prefill, "get_kv_class", lambda backend, kind: original(fake, kind))


def send(engine, number, seed=1):
    """Two of three are offline; many share a prefix."""
    choose = random.Random(seed)
    for n in range(number):
        engine.submit(
            f"r{n}",
            prompt(n % 5, choose.choice((0, 40, 90))) + prompt(50 + n, choose.randrange(5, 200)),
            max_new_tokens=20,
            priority=OFFLINE if n % 3 else 0,
            bootstrap_room=n,
            **FAKE,
        )


@pytest.mark.parametrize(("policy", "overlap"), [("cosched", True), ("hygen", False)])
def test_the_same_tokens_as_stock(make_engine, policy, overlap):
    stock = make_engine(policy="sglang", mixed=False, **FLAGS)
    send(stock, NUM_REQUESTS)
    stock.run_until_idle()
    expected = outputs(stock)
    engine = make_engine(policy=policy, mixed=False, overlap=overlap, **FLAGS)
    send(engine, NUM_REQUESTS)
    engine.run_until_idle(max_iterations=20_000)
    assert outputs(engine) == expected and len(expected) == NUM_REQUESTS
    ends = [int(rid[1:]) % 3 for rid in engine.replies]
    assert ends[:8].count(0) >= 6, "online requests come first"
    assert_drained(engine)
    controller = engine.scheduler.cosched
    assert not controller.counters.num_safe_plans and not controller.waiting.offline.under_way
    state = state_of(controller)
    costs = [s for of in state.device_s.values() for s in of.values()]
    assert sum(costs) == pytest.approx(state.busy_s, rel=1e-3)


def test_aborts_and_lost_decode_servers_leak_nothing(make_engine, monkeypatch):
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.fake import FakeKVSender

    original, lost = FakeKVSender.poll, set()

    def poll(sender):
        if sender.bootstrap_room in lost:
            return KVPoll.Failed
        return original(sender)

    monkeypatch.setattr(FakeKVSender, "poll", poll)
    engine = make_engine(policy="cosched", mixed=False, overlap=True, **FLAGS)
    send(engine, 40)
    choose = random.Random(3)

    def act(iteration):
        if iteration % 3 == 0:
            engine.abort(f"r{choose.randrange(40)}")
        if iteration % 4 == 1:
            lost.add(choose.randrange(40))

    engine.run_until_idle(on_iteration=act, max_iterations=20_000)
    reasons = [reply.finish_reason for reply in engine.replies.values()]
    assert len(reasons) == 40 and reasons.count("abort") > 5 and reasons.count("length") > 5
    assert_drained(engine)
    waiting = engine.scheduler.cosched.waiting
    assert not len(waiting) and not waiting.offline.under_way


def test_an_online_prompt_does_not_wait_for_a_long_offline_one(make_engine):
    """Which cannot be preempted: a part of its KV may be under way."""
    flags = FLAGS | {"max_total_tokens": 6000, "chunked_prefill_size": 256}
    engine = make_engine(policy="cosched", mixed=False, **flags)
    fake = {**FAKE, "max_new_tokens": 5}
    engine.submit("long", prompt(1, 3900), priority=OFFLINE, bootstrap_room=1, **fake)
    ends = {}

    def act(iteration):
        if iteration == 5:
            engine.submit("chat", prompt(2, 150), priority=0, bootstrap_room=2, **fake)
        for rid in engine.replies:
            ends.setdefault(rid, iteration)

    engine.run_until_idle(on_iteration=act, max_iterations=2000)
    assert ends["chat"] <= 8 < 12 < ends["long"]
    assert_drained(engine)
