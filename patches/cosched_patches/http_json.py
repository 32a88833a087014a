"""Every JSON body that reaches the server is read for its class and targets, once."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]

_WITH_SERVICE_TIER = frozenset(
    {
        "/invocations",  # SageMaker's name for chat completions
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
    }
)
"""OpenAI's endpoints. Anthropic's ``service_tier`` has other values."""


def _hook() -> Any:
    from fastapi import HTTPException

    from cosched.core.wire import parse_http
    from cosched.errors import RequestError

    async def read_wish(original: Any, request: Any) -> Any:
        body = await original(request)
        route = getattr(request.scope.get("route"), "path", "")
        try:
            request.state.cosched = parse_http(
                body, request.headers, has_service_tier=route in _WITH_SERVICE_TIER
            )
        except RequestError as error:
            # FastAPI lets this one type through from here; SGLang gives it the endpoint's form.
            raise HTTPException(status_code=400, detail=str(error)) from None
        return body

    return read_wish


SEAM = Seam(
    target="sglang.srt.entrypoints.http_server.ORJSONRequest.json",
    kind="around",
    signature=("self",),
    hook=_hook,
    why=(
        "SGLang's request models drop ``service_tier`` and mend wrong values of ``priority``. Here "
        "the parsed body and the headers of every endpoint come by before a stream has begun, so "
        "that an error is still HTTP 400. This seam only reads; `generate_request` applies."
    ),
)
