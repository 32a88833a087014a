"""An exception that one request causes while it is received, or sampled, is answered to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cosched_patches.seam import Seam

__all__ = ["DELAYED_SAMPLING", "EMBEDDING", "GENERATION"]


def _receive_hook() -> Any:
    def receive(original: Any, scheduler: Any, recv_req: Any, **kwargs: Any) -> Any:
        faults = getattr(scheduler, "cosched_faults", None)
        if faults is None:
            return original(scheduler, recv_req, **kwargs)
        return faults.receive(lambda: original(scheduler, recv_req, **kwargs), recv_req)

    return receive


def _sample_hook() -> Any:
    def sample(original: Any, scheduler: Any, batch_result: Any, cur_batch: Any) -> Any:
        faults = getattr(scheduler, "cosched_faults", None)
        if faults is None:
            return original(scheduler, batch_result, cur_batch)
        return faults.sample(lambda: original(scheduler, batch_result, cur_batch), cur_batch)

    return sample


GENERATION = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
    kind="around",
    signature=("self", "recv_req", "mm_input_error"),
    hook=_receive_hook,
    why=(
        "A value that SGLang does not check raises here and ends the scheduler with all requests "
        "of all users. Here that request is answered with the reason."
    ),
)

EMBEDDING = replace(
    GENERATION, target="sglang.srt.managers.scheduler.Scheduler.handle_embedding_request"
)

DELAYED_SAMPLING = Seam(
    target="sglang.srt.managers.scheduler.Scheduler.launch_batch_sample_if_needed",
    kind="around",
    signature=("self", "batch_result", "cur_batch"),
    hook=_sample_hook,
    why=(
        "With grammars under the overlap scheduler, sampling is launched apart from the forward "
        "pass. An exception in it is laid to a request (`cosched.engine.faults`)."
    ),
)
