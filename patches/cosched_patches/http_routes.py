"""The server gets cosched's routes for operators."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.config import load_config

    def extend_app(*_: Any, **__: Any) -> None:
        from sglang.srt.entrypoints.http_server import app

        from cosched.engine.admin import add_routes

        config = load_config()
        if config is not None:
            add_routes(app, config)

    return extend_app


SEAM = Seam(
    target="sglang.srt.entrypoints.http_server._setup_and_run_http_server",
    kind="before",
    signature=(
        "server_args",
        "tokenizer_manager",
        "template_manager",
        "port_args",
        "scheduler_infos",
        "subprocess_watchdog",
        "execute_warmup_func",
        "launch_callback",
    ),
    hook=_hook,
    why=(
        "``GET /cosched``, ``POST /cosched/offline`` behind SGLang's admin key, 503 for requests "
        "that come while the server ends, and ``Retry-After`` on 429 and 503."
    ),
)
