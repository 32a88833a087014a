"""Schedulers leave SIGTERM and SIGINT to their parent."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM", "leave_signals"]


def leave_signals() -> Any:
    """The hook: what is started inside leaves both signals to this process."""

    def start(original: Any, *args: Any, **kwargs: Any) -> Any:
        from cosched.engine.shutdown import signals_left_to_parent

        with signals_left_to_parent():
            return original(*args, **kwargs)

    return start


SEAM = Seam(
    target="sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
    kind="around",
    signature=("server_args", "port_args", "run_scheduler_process_func", "placement_group"),
    hook=leave_signals,
    why=(
        "Ctrl-C and many supervisors send the signal to all processes of a server; stock "
        "schedulers then end before the chats do."
    ),
)
