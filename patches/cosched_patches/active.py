"""What this process runs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from cosched.config import Config, load_config
from cosched.policy.registry import policy_entry

if TYPE_CHECKING:
    from cosched.engine.front import Front

__all__ = ["front", "has_planning_policy"]


def has_planning_policy() -> bool:
    """Whether cosched plans here; False under ``sglang`` and ``priority``, where SGLang does."""
    config = load_config()
    return config is not None and policy_entry(config.policy).make is not None


@cache
def front() -> Front:
    """The one HTTP side of this process."""
    from cosched.engine.front import Front

    return Front(load_config() or Config())
