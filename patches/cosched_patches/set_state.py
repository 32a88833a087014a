"""The operator's limits on offline work reach the scheduler, on every rank."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    from cosched.engine.offline_gate import is_for_gate

    def set_limits(original: Any, scheduler: Any, recv_req: Any) -> Any:
        gate = getattr(scheduler, "cosched_offline", None)
        if gate is None or not is_for_gate(recv_req.server_args):
            return original(scheduler, recv_req)
        return SetInternalStateReqOutput(updated=gate.set(recv_req.server_args))

    return set_limits


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.set_internal_state",
    kind="around",
    signature=("self", "recv_req"),
    hook=_hook,
    why=(
        "Pausing and limiting offline work while the server runs, and letting it go when the "
        "server ends. SGLang broadcasts this message to all ranks, which must plan alike."
    ),
)
