"""What kind of policy this process runs."""

from __future__ import annotations

from cosched.config import load_config
from cosched.policy.registry import policy_entry

__all__ = ["has_planning_policy"]


def has_planning_policy() -> bool:
    """Whether cosched plans here; False under ``sglang`` and ``priority``, where SGLang does."""
    config = load_config()
    return config is not None and policy_entry(config.policy).make is not None
