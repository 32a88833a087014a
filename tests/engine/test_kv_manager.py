"""What the manager of the KV memory keeps for online requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before SGLang
from cosched.engine import kv
from cosched.engine.kv import KvManager
from cosched.kv.config import KvConfig


@pytest.mark.parametrize(
    ("now", "reserve", "kept"),
    [
        (20_000, 50_000, 50_000),
        (20_000, 100_000, 80_000),  # a quarter of what is left is for offline requests
        (96_000, 120_000, 99_000),  # where online requests fill the memory that is little
        (110_000, 120_000, 110_000),
    ],
)
def test_more_than_the_demand_of_now_is_kept_of_what_that_leaves(monkeypatch, now, reserve, kept):
    monkeypatch.setattr(kv.port, "kv_total", lambda scheduler: 100_000)
    manager = object.__new__(KvManager)
    manager.config = KvConfig()
    manager._scheduler = None
    manager.demand = SimpleNamespace(now=now, reserve=reserve)
    assert manager.kept == kept
