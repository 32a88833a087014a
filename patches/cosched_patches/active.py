"""What this process runs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from cosched.config import Config, load_config
from cosched.policy.registry import policy_entry

if TYPE_CHECKING:
    from cosched.engine.front import Front

__all__ = ["front", "has_planning_policy", "shares_pages"]


def has_planning_policy() -> bool:
    """Whether cosched plans here; False under ``sglang`` and ``priority``, where SGLang does."""
    config = load_config()
    return config is not None and policy_entry(config.policy).make is not None


def shares_pages() -> bool:
    """Whether an online and an offline request may share a page of KV here."""
    config = load_config()
    return config is not None and has_planning_policy() and config.kv.bidirectional_pages


@cache
def front() -> Front:
    """The one HTTP side of this process."""
    from cosched.engine.front import Front

    return Front(load_config() or Config())
