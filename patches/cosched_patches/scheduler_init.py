"""A scheduler that was just built gets its controller."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.config import load_config
    from cosched.engine.attach import attach

    def attach_if_on(result: None, scheduler: Any, server_args: Any, port_args: Any) -> None:
        config = load_config()
        if config is not None:
            attach(scheduler, config)

    return attach_if_on


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.__init__",
    kind="after",
    signature=("self", "server_args", "port_args"),
    hook=_hook,
    why=(
        "Puts controller and observer beside a scheduler, and the waiting queue (online queue and "
        "offline pool) in the place of SGLang's list."
    ),
    upstream="sgl-project/sglang#5603",
)
