"""SGLang's web application gets cosched's routes, headers in its replies, and 400 for nonsense."""

from __future__ import annotations

from typing import Any

from cosched_patches.seam import Seam

__all__ = ["SEAM"]


def _hook() -> Any:
    import logging
    from functools import cache

    from fastapi import HTTPException, Request
    from sglang.srt.entrypoints.http_server import app, get_global_state
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from cosched.config import Config, load_config
    from cosched.engine.admin import add_routes, keeps_offline_waiting, offline_progress
    from cosched.engine.front import ReplyMiddleware, own_request
    from cosched.engine.middleware import BodyLimit
    from cosched_patches.active import front, limits_of
    from cosched_patches.generate_request import WRONG_VALUES

    logger = logging.getLogger(__name__)

    async def too_large(scope: Any, message: str) -> Any:
        request = Request(scope)
        return await app.exception_handlers[HTTPException](
            request, HTTPException(status_code=413, detail=message)
        )

    def most_bytes() -> int:
        model = get_global_state().tokenizer_manager.model_config
        limits = (load_config() or Config()).limits
        return limits.body_bytes(context_len=model.context_len, has_media=model.is_multimodal)

    async def refuse(request: Any, error: Exception) -> Any:
        logger.warning("a request that SGLang cannot read", exc_info=error)
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        # In the endpoint's own form, as SGLang does it.
        in_form = app.exception_handlers[HTTPException]
        wrong = HTTPException(status_code=400, detail=f"cannot read this request: {reason}")
        return await in_form(request, wrong)

    def add_batches(config: Config, server_args: Any) -> None:
        from contextlib import asynccontextmanager

        from cosched.batches import routes
        from cosched.batches.service import BatchService

        if config.policy == "sglang":
            logger.warning("batches: under policy 'sglang' their lines stand in line with chats")
        service = BatchService(config.batches)
        logger.info("batches: %s", service.summary())
        api_key = server_args.api_key
        routes.add_routes(
            app,
            service,
            isolate_keys=config.batches.isolates(api_key),
            protect=auth_level(AuthLevel.ADMIN_OPTIONAL),
        )
        lifespan = app.router.lifespan_context

        @asynccontextmanager
        async def with_feeder(of: Any) -> Any:
            async with lifespan(of) as state:
                async with service.feeding(
                    app,
                    api_key=api_key,
                    state=own_request,
                    is_paused=lambda: keeps_offline_waiting(app),
                    progress=offline_progress,
                    scope=limits_of(get_global_state().tokenizer_manager),
                ):
                    yield state

        app.router.lifespan_context = with_feeder

    def prepare_app(server_args: Any = None, *_: Any, **__: Any) -> None:
        config = load_config()
        app.add_middleware(BodyLimit, limit=cache(most_bytes), answer=too_large)
        # The last one added is the outermost: it adds a ``Retry-After`` only where there is none.
        app.add_middleware(ReplyMiddleware, front=front)
        if config is not None:
            add_routes(app, config)
            if config.batches.is_on:
                add_batches(config, server_args)
        for kind in (ValueError, *WRONG_VALUES):
            app.add_exception_handler(kind, refuse)

    return prepare_app


SEAM = Seam(
    target="sglang.srt.entrypoints.http_server._setup_and_run_http_server",
    kind="before",
    signature=(
        "server_args",
        "tokenizer_manager",
        "template_manager",
        "port_args",
        "scheduler_infos",
        "subprocess_watchdog",
        "execute_warmup_func",
        "launch_callback",
    ),
    hook=_hook,
    why=(
        "``GET /cosched`` (a page for browsers) and ``POST /cosched/offline`` behind SGLang's "
        "admin key, 503 for what comes while the server ends, ``Retry-After`` on 429 and 503. "
        "A middleware: headers and ``service_tier`` in the reply, and the end of a request for "
        "the limits of its API key; SGLang's reply models have no ``service_tier``, and its "
        "streams are built as bytes in several places. And a handler for what endpoints raise "
        "over wrong values: SGLang answers 500. Another middleware answers a "
        "body that is too large with 413. With ``batches.folder`` also OpenAI's "
        "Files and Batches (docs/api.md); their feeder lives as long as the application."
    ),
)
