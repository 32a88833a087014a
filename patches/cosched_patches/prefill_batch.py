"""Before SGLang builds a prefill batch, the policy plans the iteration."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.engine.apply import schedule_prefill

    def plan_and_build(
        original: Any, scheduler: Any, prefill_delayer_single_pass: Any, running_batch: Any
    ) -> Any:
        faults = getattr(scheduler, "cosched_faults", None)
        if faults is not None and faults.is_isolating:
            return faults.build_group(
                lambda **kwargs: original(scheduler, **kwargs),
                prefill_delayer_single_pass=prefill_delayer_single_pass,
                running_batch=running_batch,
            )
        controller = getattr(scheduler, "cosched", None)
        if controller is None:
            return original(scheduler, prefill_delayer_single_pass, running_batch)
        return schedule_prefill(
            lambda **kwargs: original(scheduler, **kwargs),
            controller,
            prefill_delayer_single_pass=prefill_delayer_single_pass,
            running_batch=running_batch,
        )

    return plan_and_build


SEAM = Seam(
    target="sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
    kind="around",
    signature=("self", "prefill_delayer_single_pass", "running_batch"),
    hook=_hook,
    why=(
        "The one decision of an iteration. Stock resumes a started offline prefill before it looks "
        "at the queue, preempts only when request slots run out, and throws preempted KV away."
    ),
    upstream="sgl-project/sglang#34623, sgl-project/sglang#22904, sgl-project/sglang#26276",
)
