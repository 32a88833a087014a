"""A server that cosched cannot serve, or whose HTTP side it cannot see, does not start."""

from __future__ import annotations

import sys
from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.environ import envs

    from cosched.config import load_config
    from cosched.engine.arguments import check_arguments
    from cosched.errors import ConfigError

    def check(server_args: Any) -> None:
        num_processes = resolving_view(server_args).tokenizer_worker_num
        reason = "would take offline requests for online ones; leave it out"
        if num_processes > 1:
            raise ConfigError(
                f"--tokenizer-worker-num {num_processes} cannot go with cosched: SGLang loads no "
                f"plugins in its further HTTP processes, which {reason}"
            )
        if envs.SGLANG_RUST_SERVER.get():
            raise ConfigError(
                f"SGLANG_RUST_SERVER cannot go with cosched: it has no hooks and {reason}"
            )

        config = load_config()
        if config is not None:
            check_arguments(server_args, config)

    def refuse(server_args: Any, *_: Any, **__: Any) -> None:
        try:
            check(server_args)
        except ConfigError as error:
            # Whichever program called: one sentence, no traceback, no process started.
            print(f"cosched: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    return refuse


SEAM = Seam(
    target="sglang.srt.entrypoints.http_server.launch_server",
    kind="before",
    signature=(
        "server_args",
        "init_tokenizer_manager_func",
        "run_scheduler_process_func",
        "run_detokenizer_process_func",
        "execute_warmup_func",
        "launch_callback",
    ),
    hook=_hook,
    why=(
        "SGLang's HTTP workers (``--tokenizer-worker-num`` above 1) load no plugins and its Rust "
        "front end has no hooks: ``service_tier`` and headers would be ignored without a word. "
        "Arguments that the policy cannot go with are refused here too, before a process starts."
    ),
)
