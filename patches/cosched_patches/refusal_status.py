"""An offline request that the full pool turns away is answered with 429."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from http import HTTPStatus

    from fastapi import HTTPException

    async def too_many(
        original: Any, manager: Any, out: dict[str, Any], state: Any, is_stream: bool
    ) -> Any:
        reason = out["meta_info"]["finish_reason"]
        if reason.get("status_code") != HTTPStatus.TOO_MANY_REQUESTS:
            return await original(manager, out, state, is_stream)
        # As the original does for 503. A stream has not begun: the request never ran.
        manager.rid_to_state.pop(state.obj.rid, None)
        if manager.enable_lora and state.obj.lora_path:
            await manager.lora_registry.release(state.obj.lora_id)
        raise HTTPException(status_code=HTTPStatus.TOO_MANY_REQUESTS, detail=reason["message"])

    return too_many


SEAM = Seam(
    target="sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason",
    kind="around",
    signature=("self", "out", "state", "is_stream"),
    hook=_hook,
    why="Stock passes on 400, 500 and 503 only; any other would become 200 with an empty answer.",
)
