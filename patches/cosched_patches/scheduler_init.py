"""A scheduler that was just built gets its controller."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.config import load_config
    from cosched.engine.controller import Controller

    def attach(result: None, scheduler: Any, server_args: Any, port_args: Any) -> None:
        config = load_config()
        if config is not None:
            Controller.attach(scheduler, config)

    return attach


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.__init__",
    kind="after",
    signature=("self", "server_args", "port_args"),
    hook=_hook,
    why=(
        "Puts the controller beside a scheduler and its waiting queue (online queue and offline "
        "pool) in the place of SGLang's list."
    ),
    upstream="sgl-project/sglang#5603",
)
