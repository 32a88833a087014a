"""HTTP routes for operators, and the answers of a server that is shutting down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import HTTPException, Request
from fastapi.responses import Response
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.utils.auth import AuthLevel, auth_level

from cosched.batch.batch_records import Offer
from cosched.batch.rate import RunningLine, WorkProgress
from cosched.config import Config
from cosched.core.view import OfflineLimits
from cosched.engine.offline_gate import limits_to_message
from cosched.engine.port.endpoints import fields_by_url, served_name, urls_of, usable_tools
from cosched.limits.bounds import Scope as LineScope
from cosched.policies import policy_entry
from cosched.server.checks import scope_of
from cosched.server.front import own_request
from cosched.server.history import PERIOD_S, History
from cosched.server.middleware import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    add_key_header,
    add_page,
)
from cosched.server.preparation import LoopLag, PreparationGate

if TYPE_CHECKING:
    from cosched.batch.tracing import BatchTracer

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5
"""``Retry-After`` of refused requests [s]."""

_SHUTTING_DOWN = "the server is shutting down"
_ALLOWED_WHILE_ENDING = ("/abort_request",)


class OfflineLimitsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /cosched/offline``: all limits, so that sending it twice changes nothing.

    The fields are as in `cosched.core.view.OfflineLimits`.
    """

    paused: bool = False
    max_running: int | None = None
    stop_running: bool = False

    def __post_init__(self) -> None:
        if self.max_running is not None and self.max_running < 0:
            raise ValueError(f"max_running must be 0 or more, or null, not {self.max_running}")


def limits_of(body: bytes) -> OfflineLimits:
    """HTTPException 400 that names what is wrong."""
    try:
        order = msgspec.json.decode(body, type=OfflineLimitsBody)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPException(status_code=400, detail=f"/cosched/offline: {error}") from None
    return OfflineLimits(**msgspec.structs.asdict(order))


def add_routes(app: Any, config: Config) -> None:
    """Give SGLang's application cosched's routes; before it starts."""

    lag = app.state.cosched_loop_lag = LoopLag()
    app.state.cosched_preparation = PreparationGate(lag)

    async def show() -> Response:
        http = {"loop_lag_s": round(lag.now_s, 4), "longest_loop_lag_s": round(lag.most_s, 4)}
        return _json(await _state(config) | {"http": http})

    async def set_offline(request: Request) -> Response:
        limits = limits_of(await request.body())
        if policy_entry(config.policy).make is None:
            raise HTTPException(
                status_code=400,
                detail=f"policy {config.policy!r} leaves scheduling to SGLang: nothing to limit",
            )
        message = SetInternalStateReq(server_args=limits_to_message(limits))
        await _manager().set_internal_state(message)
        app.state.cosched_offline = limits
        return _json(await _state(config))

    history = History()

    async def show_history() -> Response:
        return _json(history.to_dict())

    async def record() -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                replicas = (await _state(config))["replicas"]
                history.add(time.time(), [one for one in replicas if one])
            except Exception:  # pictures are not worth more than a line in the log
                logger.warning("no sample for the page", exc_info=True)

    @asynccontextmanager
    async def recording() -> AsyncIterator[None]:
        task = asyncio.create_task(record())
        try:
            yield
        finally:
            task.cancel()

    protect = auth_level(AuthLevel.ADMIN_OPTIONAL)  # as SGLang's own routes for operators
    app.add_api_route("/cosched", protect(show), methods=["GET"])
    app.add_api_route("/cosched/history", protect(show_history), methods=["GET"])
    app.add_api_route("/cosched/offline", protect(set_offline), methods=["POST"])
    app.add_middleware(_TurnAway)
    add_key_header(app)
    add_page(app)
    _run_beside(app, lag.measuring)
    if policy_entry(config.policy).make is not None:
        _run_beside(app, recording)


def add_batches(app: Any, config: Config, server_args: Any) -> None:
    """The routes of Files and Batches, and the feeder, which lives as long as the application;
    before it starts."""
    from cosched.batch import message_batches, routes
    from cosched.batch.service import BatchService

    if config.policy == "sglang":
        logger.warning("batches: under policy 'sglang' their requests queue with chats")
    api_key = server_args.api_key
    tracer = _batch_tracer(server_args)
    service = BatchService(config.batches, keys=config.api_keys(), tracer=tracer)
    service.loop_lag_s = lambda: app.state.cosched_loop_lag.most_s
    logger.info("batches: %s", service.summary())
    isolates = config.batches.isolates(api_key)
    protect = auth_level(AuthLevel.ADMIN_OPTIONAL)
    routes.add_routes(app, service, isolate_keys=isolates, offer=_offer, protect=protect)
    message_batches.add_message_routes(app, service, isolate_keys=isolates, offer=_offer)
    _run_beside(
        app,
        lambda: service.feeding(
            app,
            api_key=api_key,
            state=partial(own_request, keys=config.api_keys()),
            is_paused=lambda: _keeps_offline_waiting(app),
            progress=_offline_progress,
            scope=_scope_of_lines(app),
        ),
    )


def _batch_tracer(server_args: Any) -> BatchTracer | None:
    """Spans of batches go where those of SGLang go, at every level but 0."""
    if not server_args.enable_trace:
        return None
    from sglang.srt.observability.trace import get_global_trace_level

    from cosched.batch.tracing import BatchTracer

    return BatchTracer(is_on=lambda: get_global_trace_level() > 0)


def _offer() -> Offer:
    return Offer(model=served_name(_manager()), endpoints=urls_of(_manager()))


def _scope_of_lines(app: Any) -> LineScope:
    """A line of a batch may have no field and no tool that the endpoint ignores: thousands of
    replies would not be what the client asked for."""
    return replace(scope_of(_manager()), fields=fields_by_url(), tools=usable_tools(app))


def _run_beside(app: Any, running: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
    """Run it for as long as the application lives."""
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def with_it(of: Any) -> AsyncIterator[Any]:
        async with lifespan(of) as state, running():
            yield state

    app.router.lifespan_context = with_it


def _keeps_offline_waiting(app: Any) -> bool:
    """True if the operator allows no offline request to run."""
    limits: OfflineLimits = getattr(app.state, "cosched_offline", OfflineLimits())
    return limits.paused or limits.max_running == 0


async def _offline_progress() -> WorkProgress:
    """Progress of offline requests of all schedulers; empty if SGLang itself schedules."""
    states = [state.get("cosched", {}) for state in await _manager().get_internal_state()]
    replied = [state for state in states if "offline_progress" in state]
    if not replied:
        return WorkProgress()
    far = [state["offline_progress"] for state in replied]
    shares = [state["chat"]["saturation"] for state in replied if state.get("chat")]
    chat = [share for share in shares if share is not None]  # None: it was not finite
    return WorkProgress(
        running=[RunningLine(*one) for some in far for one in some["begun"]],
        num_iterations=fmean(state["num_iterations"] for state in replied),
        num_online=fmean(state["online_prefill_tokens"] for state in replied),
        prefill_token_s=fmean(one["prefill_token_s"] or 0.0 for one in far),
        decode_s=fmean(one["tail_decode_s"] or 0.0 for one in far),
        saturation=fmean(chat) if chat else None,
    )


async def _state(config: Config) -> dict[str, Any]:
    manager = _manager()
    states = await manager.get_internal_state()
    return {
        "policy": config.policy,
        "model": manager.served_model_name,
        "slo": msgspec.structs.asdict(config.slo),
        "tiers": {
            tier.name: {
                "ttft_ms": tier.ttft_ms or config.slo.ttft_ms,
                "tpot_ms": tier.tpot_ms or config.slo.tpot_ms,
            }
            for tier in config.tiers
        },
        "shutting_down": bool(manager.gracefully_exit),
        "replicas": [state.get("cosched") for state in states],
    }


class _TurnAway:
    """ASGI middleware: 503 for new requests while the server shuts down, and ``Retry-After`` on
    every 429 and 503."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _manager().gracefully_exit and _is_new_request(scope):
            answer = _json({"error": {"message": _SHUTTING_DOWN, "code": 503}}, status=503)
            answer.headers["connection"] = "close"
            await answer(scope, receive, _with_retry_after(send))
            return
        await self._app(scope, receive, _with_retry_after(send))


def _with_retry_after(send: Send) -> Send:
    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in (429, 503):
            headers = list(message.get("headers", ()))
            if all(name.lower() != b"retry-after" for name, _ in headers):
                headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
            message = {**message, "headers": headers}
        await send(message)

    return marked


def _is_new_request(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] not in _ALLOWED_WHILE_ENDING


def _manager() -> Any:
    return http_server._global_state.tokenizer_manager


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
