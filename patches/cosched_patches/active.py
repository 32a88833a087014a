"""What this process runs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from cosched.config import Config, load_config
from cosched.policy.registry import policy_entry

if TYPE_CHECKING:
    from cosched.engine.front import Front
    from cosched.limits.table import Scope

__all__ = ["front", "has_planning_policy", "limits_of", "shares_pages"]


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


def limits_of(owner: Any) -> Scope:
    """What the bounds of requests depend on, by SGLang's tokenizer manager or scheduler, which
    keeps it."""
    from dataclasses import replace

    from cosched.engine.checks import OFFLINE_SHARE, scope_of

    scope: Scope | None = getattr(owner, "cosched_limits", None)
    if scope is None:
        longest = owner.max_req_input_len
        may_cut = owner.server_args.allow_auto_truncate
        scope = scope_of(
            owner.model_config,
            chars_per_token=(load_config() or Config()).limits.chars_per_token,
            # SGLang refuses a prompt of `max_req_input_len` itself.
            max_input_tokens=None if longest is None or may_cut else longest - 1,
        )
        if has_planning_policy() and hasattr(owner, "max_total_num_tokens"):
            limit = int(owner.max_total_num_tokens * OFFLINE_SHARE)
            scope = replace(scope, max_offline_tokens=limit)
        owner.cosched_limits = scope
    return scope
