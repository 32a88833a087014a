"""A scheduler gets its controller, or is refused before its model is loaded."""

from __future__ import annotations

import logging
from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]

logger = logging.getLogger(__name__)


def _hook() -> Any:
    from cosched.config import load_config
    from cosched.engine.arguments import check_arguments
    from cosched.engine.attach import attach
    from cosched.errors import ConfigError

    def check_build_attach(
        original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any
    ) -> None:
        config = load_config()
        try:
            if config is not None:
                check_arguments(server_args, config)
            original(scheduler, server_args, *args, **kwargs)
            if config is not None:
                attach(scheduler, config)
        except ConfigError as error:
            logger.error("cosched: %s", error)  # SGLang logs a traceback after it
            raise

    return check_build_attach


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.__init__",
    kind="around",
    signature=("self", "server_args", "port_args"),
    hook=_hook,
    why=(
        "Puts controller and observer beside a scheduler, and the waiting queue (online queue and "
        "offline pool) in the place of SGLang's list. Before that, before a model is loaded, "
        "arguments that the policy cannot go with are refused, whichever way the scheduler came "
        "to be made."
    ),
    upstream="sgl-project/sglang#5603",
)
