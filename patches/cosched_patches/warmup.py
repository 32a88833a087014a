"""The server is ready once it listens itself, and then says what it is."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.config import load_config

    def ready(original: Any, server_args: Any, launch_callback: Any = None, **options: Any) -> None:
        from cosched.engine.startup import log_ready, wait_until_listening

        config = load_config()
        if config is None:
            original(server_args, launch_callback, **options)
            return
        if not wait_until_listening(server_args):
            return

        def announce() -> None:
            log_ready(server_args, config)
            if launch_callback is not None:
                launch_callback()

        original(server_args, announce, **options)

    return ready


SEAM = Seam(
    target="sglang.srt.entrypoints.http_server._wait_and_warmup",
    kind="around",
    signature=("server_args", "launch_callback", "execute_warmup_func", "post_warmup_callback"),
    hook=_hook,
    why=(
        "SGLang's warm-up asks its own address: where another server has the port, that one "
        "answers, and the line that says ready is printed by a server that then fails. After that "
        "line stand cosched's policy, targets and two requests to try."
    ),
)
