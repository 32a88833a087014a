"""A request beyond a bound is answered where the scheduler receives it, and built no further."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.checks import check_received
    from cosched.engine.port.request import refuse
    from cosched.errors import RequestError
    from cosched_patches.active import limits_of

    def check(original: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
        try:
            check_received(recv_req, limits_of(scheduler))
        except RequestError as error:
            refuse(scheduler, recv_req, str(error))
            return
        original(scheduler, recv_req, *args, **kwargs)

    return check


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler._handle_generate_request",
    kind="around",
    signature=("self", "recv_req", "mm_cleanup", "mm_input_error"),
    hook=_hook,
    why=(
        "Requests come from several front ends: HTTP, gRPC, a program around the engine, the lines "
        "of batches. Some values raise while a request is built, sampled or answered, on the "
        "thread of the scheduler, which ends with all that it serves. The bounds of the HTTP side "
        "hold here too."
    ),
)
