"""``/get_server_info`` shows what cosched does."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    import msgspec

    from cosched.config import load_config

    def add_state(result: Any, scheduler: Any, recv_req: Any) -> Any:
        controller = getattr(scheduler, "cosched", None)
        if controller is not None:
            try:
                progress = msgspec.to_builtins(controller.offline_progress())
                state = controller.state().to_dict() | {"offline_progress": progress}
                result.internal_state["cosched"] = state
            except Exception as error:
                result.internal_state["cosched"] = {"error": repr(error)}
                controller.guard.note("state", error)
        elif (config := load_config()) is not None:
            # Clients ask whether requests have classes here: not so under "sglang".
            result.internal_state["cosched"] = {"policy": config.policy}
        return result

    return add_state


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
    kind="after",
    signature=("self", "recv_req"),
    hook=_hook,
    why="Waiting and running requests by class, preemptions and planning time, for operators.",
)
