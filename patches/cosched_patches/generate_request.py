"""The class and the targets of a request, whatever way it came, on their way to the scheduler."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    from cosched.core import wire
    from cosched.errors import RequestError

    def wish_of(request: Any) -> wire.Wish:
        wish: wire.Wish | None = getattr(getattr(request, "state", None), "cosched", None)
        if wish is not None:
            return wish
        headers = getattr(request, "headers", None)
        # No JSON body came with it: a form, a web socket, gRPC, or a program around the engine.
        return wire.parse_http(None, {} if headers is None else headers, has_service_tier=False)

    def apply_wish(manager: Any, obj: Any, request: Any = None) -> None:
        try:
            wish = wish_of(request)
            obj.priority = wire.priority_for(wish, wire.parse_priority(obj.priority))
            wire.check_sampling_params(obj.sampling_params)
            obj.sampling_params = wire.with_slo(obj.sampling_params, wish.slo)
        except RequestError as error:
            # The one type that every caller of this method answers with HTTP 400.
            raise ValueError(str(error)) from None

    return apply_wish


SEAM = Seam(
    target="sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    kind="before",
    signature=("self", "obj", "request"),
    hook=_hook,
    why=(
        "The one place that every request of every endpoint passes. Endpoints lose what their "
        "models lack (``/v1/responses`` drops even ``priority``), and requests that an embedding "
        "program makes come in here."
    ),
)
