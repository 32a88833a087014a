"""An offline request that the full pool turns away is answered with 429, a grammar without texts
with 400."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]

_NO_TOKEN = "Grammar accept_token failed"
"""How the message begins with which SGLang ends a request whose grammar matches no text."""


def _hook() -> Any:
    from http import HTTPStatus

    from fastapi import HTTPException

    async def too_many(
        original: Any, manager: Any, out: dict[str, Any], state: Any, is_stream: bool
    ) -> Any:
        reason = out["meta_info"]["finish_reason"]
        if str(reason.get("message", "")).startswith(_NO_TOKEN):
            reason["status_code"] = HTTPStatus.BAD_REQUEST
            reason["message"] = "the grammar of this request allows no further token"
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
    why=(
        "Stock passes on 400, 500 and 503 only; any other would become 200 with an empty answer. "
        "And it answers a grammar that matches no text (rules that only refer to one another) with "
        "500."
    ),
)
