"""What the manager of the KV memory learns between two plans."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before SGLang
from cosched.engine.kv import KvManager
from cosched.kv.demand import OnlineDemand


@pytest.fixture
def manager():
    manager = object.__new__(KvManager)
    manager.core = SimpleNamespace(evicted=Counter())
    manager.kv_tree = SimpleNamespace(num_evictable=100_000)
    manager.demand = OnlineDemand()
    manager._online_tokens = lambda: 0
    manager._learnt_s, manager._missed_before, manager._missed_per_s = -math.inf, 0, 0.0
    return manager


def evict(manager, seconds, **per_second):
    for second in range(seconds):
        manager.core.evicted.update(per_second)
        manager._learn(float(second))


def test_what_nobody_comes_for_does_not_shorten_how_long_a_context_is_worth_holding(manager):
    evict(manager, 200, all=10_000, offline=10_000)
    assert math.isinf(manager.turnover_s)


def test_what_somebody_would_have_come_for_does(manager):
    evict(manager, 200, all=10_000, online=1_000, returning=600, referenced=400)
    assert manager.turnover_s == pytest.approx(100.0, rel=0.01)
