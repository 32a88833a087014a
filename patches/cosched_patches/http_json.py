"""Every JSON body that reaches the server is checked, and read for its class and targets, once."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]

_WITH_TIER_IN_REPLY = frozenset(
    {
        "/invocations",  # SageMaker's name for chat completions
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
    }
)
"""Where OpenAI's replies have a ``service_tier``."""

_ANTHROPIC = "/v1/messages"
_RANK = "x-data-parallel-rank"

_WITHOUT_A_RUN = frozenset(
    {
        "/abort_request",
        "/close_session",
        "/detokenize",
        "/open_session",
        "/tokenize",
        "/v1/detokenize",
        "/v1/messages/count_tokens",
        "/v1/tokenize",
    }
)
"""The model does not run for these, so that no limit of a key stands in their way."""


def _hook() -> Any:
    from fastapi import HTTPException
    from sglang.srt.entrypoints.http_server import get_global_state

    from cosched.core.wire import ANTHROPIC_SERVICE_TIERS, SERVICE_TIERS
    from cosched.errors import LimitError, RequestError
    from cosched.limits.bodies import check_body
    from cosched_patches.active import front, limits_of

    def check_rank(header: str | None) -> None:
        """SGLang answers 400 for a wrong one, and 500 in the form of Anthropic."""
        try:
            int(header or 0)
        except ValueError:
            raise RequestError(_RANK, f"must be a whole number, not {header!r}") from None

    async def read_wish(original: Any, request: Any) -> Any:
        body = await original(request)
        route = getattr(request.scope.get("route"), "path", "")
        try:
            check_rank(request.headers.get(_RANK))
            check_body(route, body, limits_of(get_global_state().tokenizer_manager))
            front().read(
                request,
                body,
                tiers=ANTHROPIC_SERVICE_TIERS if route == _ANTHROPIC else SERVICE_TIERS,
                counts=route not in _WITHOUT_A_RUN,
                tiered=route in _WITH_TIER_IN_REPLY,
            )
        except (RequestError, LimitError) as error:
            status = 400 if isinstance(error, RequestError) else 429
            # FastAPI lets this one type through from here; SGLang gives it the endpoint's form.
            raise HTTPException(status_code=status, detail=str(error)) from None
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
        "that an error is still HTTP 400, or 429 for an API key above its limit. This seam only "
        "reads; `generate_request` applies. Fields beyond their bounds are refused by the names "
        "that the client used."
    ),
)
