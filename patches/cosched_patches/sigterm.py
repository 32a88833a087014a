"""SIGTERM lets chats finish and offline work go, within a stated time."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.config import load_config

    async def drain_first(original: Any, manager: Any) -> None:
        from cosched.engine.shutdown import drain

        config = load_config()
        if config is None:
            await original(manager)
        else:
            await drain(original, manager, drain_s=config.drain_s)

    return drain_first


SEAM = Seam(
    target="sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog",
    kind="around",
    signature=("self",),
    hook=_hook,
    why=(
        "Stock waits without a bound until every request is answered, and goes on taking new ones: "
        "with a batch under way a server does not end before the batch does."
    ),
)
