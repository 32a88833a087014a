"""The detokenizer leaves SIGTERM and SIGINT to its parent."""

from __future__ import annotations

from typing import Any

from cosched_patches.scheduler_processes import leave_signals
from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    return leave_signals()


SEAM = Seam(
    target="sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses",
    kind="around",
    signature=("server_args", "port_args", "run_detokenizer_process_func"),
    hook=_hook,
    why="As for the schedulers: the text of the last chats comes through it.",
)
