"""The KV manager: online reservation, failures, lookups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

import cosched.bootstrap  # noqa: F401  # before SGLang
from cosched.core.plan import Plan
from cosched.engine.features import kv_manager as kv
from cosched.engine.tracked import num_cached
from cosched.memory.demand import DemandReservation
from tests.engine.conftest import OFFLINE, prompt, view_now, watch_plans
from tests.engine.test_offline_gate import send_limits


@pytest.mark.parametrize(
    ("now", "reserve", "kept"),
    [
        (20_000, 50_000, 50_000),
        (20_000, 100_000, 80_000),  # a quarter of what is left is for offline requests
        (96_000, 120_000, 99_000),  # where online requests fill the memory that is little
        (110_000, 120_000, 100_000),  # contexts that may come back: never more than the memory
    ],
)
def test_growth_of_the_demand_is_reserved_up_to_a_share_of_the_rest(
    monkeypatch, now, reserve, kept
):
    monkeypatch.setattr(kv.port, "kv_total", lambda scheduler: 100_000)
    manager = object.__new__(kv.KvManager)
    manager._scheduler = None
    manager.reservation = DemandReservation()
    manager.reservation._demand = SimpleNamespace(now=now, threshold=reserve)
    assert manager.online_reservation == kept


def test_the_reservation_of_echo_is_mean_and_deviations_of_what_online_requests_hold(make_engine):
    config = {"kv": {"reservation": "echo"}}
    manager = make_engine(policy="hygen", config=config).scheduler.cosched.kv
    for second, num_tokens in enumerate((0, 300, 0)):
        manager.reservation.sample(num_tokens, float(second))
    assert manager.online_reservation == pytest.approx(100 + 2 * 141.4, abs=1)
    manager.reservation.sample(10**9, 3.0)
    assert manager.online_reservation == kv.port.kv_total(manager._scheduler)


@pytest.mark.parametrize(("token_s", "is_reserved"), [(1e-6, False), (0.1, True)])
def test_memory_is_reserved_for_contexts_whose_loss_makes_a_request_late(
    make_engine, monkeypatch, token_s, is_reserved
):
    """More contexts may be expected back than fit. Offline requests would wait for ever for memory
    of contexts that are soon computed again."""
    engine = make_engine(policy="hygen")
    manager = engine.scheduler.cosched.kv
    monkeypatch.setattr(manager.leaves.value.costs, "seconds", lambda a, b: (b - a) * token_s)
    for i in range(4):
        engine.submit(f"r{i}", prompt(i, 150), max_new_tokens=2)
    engine.run_until_idle()
    assert (manager.reuse.expected_tokens() > 100) == is_reserved
    manager._learn(1e6, 0)
    assert (manager.online_reservation > 100) == is_reserved
    assert manager.online_reservation <= kv.port.kv_total(manager._scheduler)


def test_if_the_eviction_list_fails_sglangs_order_is_used(make_engine):
    controller = make_engine(policy="hygen", config={"strict": False}).scheduler.cosched

    def fail(num_tokens):
        raise ZeroDivisionError

    assert controller._evicted(Plan(prefill={"a": 10}), SimpleNamespace(reqs=[])) is not None
    controller.kv.next_to_go = fail
    assert controller._evicted(Plan(prefill={"a": 10}), SimpleNamespace(reqs=[])) is None
    assert controller.guard.failures == {"kv": 1}


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prompt_is_looked_up_only_if_the_tree_has_its_first_page(
    make_engine, monkeypatch, page_size
):
    """And the view reports what the engine would find."""
    engine = make_engine(policy="hygen", max_running_requests=2, page_size=page_size)
    seen, looked_up = set(), []
    monkeypatch.setattr(
        kv.port, "peek", lambda *args, peek=kv.port.peek: looked_up.append(0) or peek(*args)
    )

    def look():
        view = view_now(engine.scheduler)
        for request in view.online:
            before = len(looked_up)
            cached = view.match(request).cached
            is_looked_up = len(looked_up) > before
            assert cached == num_cached(engine.scheduler.tree_cache, request)
            seen.add((cached > 0, is_looked_up))

    watch_plans(engine, before=look)
    for i in range(8):
        engine.submit(f"r{i}", prompt(i // 2, 70), max_new_tokens=3)
    engine.run_until_idle()
    assert seen >= {(True, True), (False, False)}
    assert (True, False) not in seen


def test_where_sglang_orders_evictions_lookups_change_nothing(make_engine):
    """Prompts are evicted in the order in which they were computed."""
    config = {"kv": {"eviction": "lru"}}
    engine = make_engine(policy="hygen", max_total_tokens=1000, config=config)
    for i in range(6):
        engine.submit(f"r{i}", prompt(i, 100), max_new_tokens=2)
        engine.run_until_idle()
    send_limits(engine, paused=True)
    for i in range(6):
        engine.submit(f"again{i}", prompt(i, 100), max_new_tokens=2, priority=OFFLINE)
    engine.run_until_idle(max_iterations=50)

    def found():
        """The oldest is looked up last."""
        view, waiting = view_now(engine.scheduler), engine.scheduler.cosched.waiting
        matches = [view.match(waiting.get(f"again{i}")) for i in reversed(range(6))]
        return [(match.cached, match.evictable) for match in reversed(matches)]

    for _ in range(20):
        assert found() == [(99, 99)] * 6
    engine.scheduler.tree_cache.evict(EvictParams(num_tokens=250))
    left = found()
    assert left[:2] == [(0, 0)] * 2 and left[4:] == [(99, 99)] * 2
