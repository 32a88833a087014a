"""Hooks in the HTTP process: its start and end, what requests say, how they are answered."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import cache, partial
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from sglang.srt.entrypoints.http_server import app, get_global_state

from cosched.config import Config, load_config
from cosched.engine.port import pace_checks
from cosched.engine.port.endpoints import check_route, limit_reply, served_name
from cosched.engine.startup import log_ready, wait_until_listening
from cosched.engine.support import check_arguments
from cosched.errors import ConfigError, LimitError, RequestError
from cosched.limits import validation
from cosched.limits.bodies import check_body, normalize, without_effect
from cosched.limits.origins import Origins
from cosched.server.aborted_cost import note_released, tell_cost
from cosched.server.access import REDACTED, SECRET_ARGUMENTS, Access, Keys, hide_in_command
from cosched.server.admin import add_batches, add_routes
from cosched.server.checks import check_input, check_params, check_tokenized, scope_of
from cosched.server.connections import SilentConnections
from cosched.server.front import (
    Front,
    ReplyMiddleware,
    is_offline,
    is_own,
    payer_of,
    told_of_abort,
    was_aborted,
)
from cosched.server.middleware import BodyLimit, add_outermost
from cosched.server.model_operations import (
    is_about_to_read,
    refusal_of,
    unloading,
    use_model_lock,
)
from cosched.server.owned_ids import with_owner, without_owner
from cosched.server.preparation import TICKET_KEY, PreparationGate, is_prepared
from cosched.server.shutdown import drain, signals_left_to_parent
from cosched_patches.openai_endpoints import word_error
from cosched_patches.seam import Seam, after, around, before

logger = logging.getLogger(__name__)

_APP_PATH = "SGLANG_HTTP_SERVER_APP_PATH"
_OUR_APP = "cosched_patches.http_worker:app"

_OWN_FORM = ("/v1/messages", "/v1/systemone")
"""Routes for which SGLang itself words these errors."""

_WRONG_VALUES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, re.error)
"""What Python raises when code gets a value that it does not expect."""


@cache
def front() -> Front:
    """Of this process."""
    return Front(load_config() or Config())


# --- Start and end of the server ---


def check_server(server_args: Any, *_: Any, **__: Any) -> None:
    """Refuses arguments that the policy does not support before a process starts. Further HTTP
    processes (``--tokenizer-worker-num``) import cosched's application: SGLang's own loads no
    plugins."""
    try:
        config = load_config()
        if config is not None:
            check_arguments(server_args, config)
            command = getattr(server_args, "_launch_command", None)
            if command:  # SGLang shows it in ``/server_info`` and over gRPC
                server_args._launch_command = hide_in_command(command, server_args)
            path = os.environ.setdefault(_APP_PATH, _OUR_APP)
            if path != _OUR_APP and server_args.tokenizer_worker_num > 1:
                raise ConfigError(
                    f"{_APP_PATH}={path} cannot go with --tokenizer-worker-num: these processes "
                    f"must import {_OUR_APP}; unset it"
                )
    except ConfigError as error:
        # One sentence, no traceback, no process started.
        print(f"cosched: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def hide_secrets(fields: dict[str, Any], server_args: Any) -> dict[str, Any]:
    """Keys and passwords are not among the arguments that SGLang logs, dumps, and shows over HTTP
    and gRPC. Stock hides the keys of watermarks only."""
    return {**fields, **{name: REDACTED for name in SECRET_ARGUMENTS if fields.get(name)}}


def leave_signals(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Schedulers and the detokenizer ignore SIGTERM and SIGINT. Ctrl-C and many supervisors send
    them to all processes of a server; in stock these processes end before the chats do."""
    with signals_left_to_parent():
        return original(*args, **kwargs)


def prepare_app(server_args: Any, *_: Any, **__: Any) -> None:
    """SGLang's web application gets ``GET /cosched``, ``POST /cosched/offline`` and, with
    ``batches.folder``, OpenAI's Files and Batches (docs/api.md). Middleware adds headers and
    ``service_tier`` to replies, ``Retry-After`` to 429 and 503, answers bodies that are too large
    with 413, and new requests with 503 while the server ends. What endpoints raise over wrong
    values becomes 400; stock answers 500. Each route has a level, and answers show no secrets
    (`cosched.server.access`); stock's ``/server_info`` prints the admin key."""
    config = load_config()
    _guard_access(server_args, config or Config())
    too_large = partial(_refuse_with, status=413)
    app.add_middleware(BodyLimit, limit=cache(_max_body_bytes), answer=too_large)
    # The last one added is the outermost: it adds a ``Retry-After`` only where there is none.
    app.add_middleware(ReplyMiddleware, front=front)
    if config is not None:
        add_routes(app, config)
        if config.batches.is_on:
            add_batches(app, config, server_args)
    for kind in (ValueError, *_WRONG_VALUES):
        app.add_exception_handler(kind, _refuse)
    stock = app.exception_handlers[RequestValidationError]
    app.add_exception_handler(RequestValidationError, partial(_refuse_fields, stock))


def _max_body_bytes() -> int:
    model = get_global_state().tokenizer_manager.model_config
    limits = (load_config() or Config()).limits
    return limits.body_bytes(context_len=model.context_len, has_media=model.is_multimodal)


def _guard_access(server_args: Any, config: Config) -> None:
    guard = partial(
        Access,
        keys=Keys(
            api=getattr(server_args, "api_key", None),
            admin=getattr(server_args, "admin_api_key", None),
            digests=config.key_digests(),
        ),
        origins=Origins(config.access),
        owner_of=config.batches.owner_of,
        answer=_refuse_with,
        has_metrics=bool(getattr(server_args, "enable_metrics", False)),
    )
    add_outermost(app, guard)


async def _refuse_with(scope: Any, message: str, status: int) -> Any:
    return await _in_form(Request(scope), HTTPException(status_code=status, detail=message))


async def _refuse(request: Any, error: Exception) -> Any:
    logger.warning("a request that SGLang cannot read", exc_info=error)
    reason = str(error) if isinstance(error, ValueError) else repr(error)
    detail = f"cannot read this request: {reason}"
    return await _in_form(request, HTTPException(status_code=400, detail=detail))


async def _refuse_fields(stock: Any, request: Any, error: Exception) -> Any:
    """A body that does not fit the endpoint's model. Stock lists the errors of every form that a
    value may have, with a file and a line of the server."""
    assert isinstance(error, RequestValidationError)
    if request.url.path.startswith(_OWN_FORM):
        return await stock(request, error)
    detail = validation.summary(error.errors(), error.body)
    return await _in_form(request, HTTPException(status_code=400, detail=detail))


async def _in_form(request: Any, error: HTTPException) -> Any:
    """The answer in the form of the endpoint, by SGLang's handler."""
    return await app.exception_handlers[HTTPException](request, error)


def announce_ready(
    original: Any, server_args: Any, launch_callback: Any = None, **options: Any
) -> None:
    """The server is called ready once this process itself listens, and the log shows cosched's
    policy, targets and two requests to try. SGLang's warm-up sends a request to its own address: if
    another server has the port, that one answers, and a server that then fails is called ready."""
    config = load_config()
    if config is None:
        original(server_args, launch_callback, **options)
        return
    if not wait_until_listening(server_args):
        return

    def announce() -> None:
        log_ready(server_args, config)
        if launch_callback is not None:
            launch_callback()

    original(server_args, announce, **options)


_SILENT = SilentConnections()
_TICKS = 10
"""Of uvicorn, in a second."""


async def end_silent(original: Any, server: Any, counter: int) -> Any:
    """Connections that are open and send nothing are ended after a minute, and the oldest where
    there are more than 1,000. Uvicorn has no limit for a first request, its headers or its body."""
    if counter % _TICKS == 0:
        _SILENT.end(server.server_state.connections, time.monotonic())
    return await original(server, counter)


async def drain_first(original: Any, manager: Any) -> None:
    """On SIGTERM online requests finish and offline requests are dropped, within ``drain_s``. Stock
    waits without a limit until every request is answered, and accepts new ones: a server with a
    batch in progress does not end before the batch."""
    config = load_config()
    if config is None:
        await original(manager)
    else:
        await drain(original, manager, drain_s=config.drain_s)


# --- What requests say ---

_RANK = "x-data-parallel-rank"
_RESPONSES = "/v1/responses"
_ANY_MODEL_NAME = "default"
"""The served model, whatever its name; of SGLang's endpoints only /v1/responses refuses it."""


async def read_body(original: Any, request: Any) -> Any:
    """Body and headers of every endpoint are checked and read for class and targets before a stream
    has begun, so that an error is HTTP 400, or 429 for an API key above its limit. SGLang's request
    models drop ``service_tier``, correct wrong values of ``priority``, refuse null. Errors use the
    names that the client used. Offline requests go on a few at a time, slower while the event loop
    lags."""
    body = await original(request)
    route = getattr(request.scope.get("route"), "path", "")
    manager = get_global_state().tokenizer_manager
    try:
        _check_rank(request.headers.get(_RANK))
        check_route(route, manager)
        if isinstance(body, dict):
            normalize(body)
            if route == _RESPONSES and body.get("model") in (None, _ANY_MODEL_NAME):
                body["model"] = served_name(manager)
            front().note_ignored(request, without_effect(body, scope_of(manager)))
        check_body(route, body, scope_of(manager))
        front().read(request, body, route=route)
    except (RequestError, LimitError) as error:
        status = 400 if isinstance(error, RequestError) else 429
        # FastAPI passes on only this type; SGLang gives it the endpoint's form.
        raise HTTPException(status_code=status, detail=str(error)) from None
    gate: PreparationGate | None = getattr(app.state, "cosched_preparation", None)
    # SGLang reads some bodies twice.
    is_first = getattr(request.state, TICKET_KEY, None) is None
    if gate is not None and is_first and is_offline(request):
        setattr(request.state, TICKET_KEY, await gate.enter(payer_of(request)))
    return body


def _check_rank(header: str | None) -> None:
    """SGLang answers 400 for a wrong one, and 500 in the form of Anthropic."""
    try:
        int(header or 0)
    except ValueError:
        raise RequestError(_RANK, f"must be a whole number, not {header!r}") from None


def render_messages(original: Any, serving: Any, *args: Any, **kwargs: Any) -> Any:
    """Messages that no chat template can render are answered with 400. Templates raise arbitrary
    errors over missing messages, unknown roles and contents; stock answers 500."""
    try:
        return original(serving, *args, **kwargs)
    except _WRONG_VALUES as error:
        raise ValueError(f"messages: cannot be rendered as a prompt: {error!r}") from error


async def classify(
    original: Any, manager: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """The one place that every request of every endpoint passes: it gets its class and targets, and
    every field is checked against its bound before anything is tokenized. Some endpoints lose
    fields (``/v1/responses`` drops even ``priority``), and requests of a program around the engine
    enter here. SGLang answers many wrong values with 500, because Python raises another error than
    ``ValueError``; here that becomes 400. What SGLang makes of it counts against its API key. With
    thousands of waiting requests SGLang checks less often whether their clients are still
    connected. A line of a batch that the operator aborted gets 503, is sent again; stock: 200."""
    has_answered = is_whole = False
    try:
        front().apply(obj, request)
        check_input(obj, scope_of(manager))
        _own_session(obj)
        pace_checks(manager)
        is_about_to_read(obj.priority)
        async with aclosing(original(manager, obj, request)) as replies:
            async for reply in replies:
                has_answered = True
                front().hear(reply, request)
                if is_own(request) and was_aborted(reply):
                    raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, _ABORTED)
                yield reply
        is_whole = True
    except LimitError as error:
        if getattr(obj, "stream", False):  # which may have begun: SGLang ends it with the error
            raise ValueError(str(error)) from None
        raise HTTPException(status_code=429, detail=str(error)) from None
    except HTTPException as error:
        raise refusal_of(error, obj, request) from None
    except RequestError as error:
        # The one type that every caller of this method answers with HTTP 400.
        raise ValueError(str(error)) from None
    except _WRONG_VALUES as error:
        if has_answered:
            raise
        logger.warning("a request that SGLang cannot read", exc_info=True)
        raise ValueError(f"cannot read this request: {error!r}") from error
    finally:
        front().ended(request, is_whole=is_whole)
        tell_cost(manager, None if has_answered else told_of_abort(request))
        # SGLang reads it after a stream, also of a request that could not be read.
        if not hasattr(obj, "is_single"):
            obj.is_single = not isinstance(obj.rid, list)


def _own_session(obj: Any) -> None:
    """The session of a request is one of its API key."""
    if getattr(obj, "session_id", None):
        obj.session_id = with_owner(obj.session_id)
    params = getattr(obj, "session_params", None)
    if params and params.get("id"):
        obj.session_params = {**params, "id": with_owner(params["id"])}


async def open_session(original: Any, manager: Any, obj: Any, request: Any = None) -> Any:
    """A session belongs to the API key that opened it (`cosched.server.owned_ids`). In stock every
    client that learns its id reads the prompt through log probabilities, and closes it."""
    obj.session_id = with_owner(obj.session_id or uuid.uuid4().hex)
    opened = await original(manager, obj, request)
    return None if opened is None else without_owner(opened)


async def close_session(original: Any, manager: Any, obj: Any, request: Any = None) -> Any:
    """Only the API key that opened a session closes it; stock answers 200 to every key."""
    obj.session_id = with_owner(obj.session_id)
    return await original(manager, obj, request)


def check_values(manager: Any, obj: Any, input_ids: Any) -> None:
    """The types of sampling parameters are checked, and what depends on the tokens of the prompt:
    it must not be empty, ``logprob_start_len`` must be within it. In stock a string as a
    ``logit_bias`` raises in the scheduler and ends the server. The next offline request may be
    prepared."""
    is_prepared()
    try:
        limit_reply(obj, len(input_ids or ()), manager)
        check_params(obj.sampling_params, manager.sampling_params_class)
        check_tokenized(obj, input_ids, scope_of(manager))
    except RequestError as error:
        raise ValueError(str(error)) from None


def send_created_time(state: Any, times: Any) -> Any:
    """The scheduler learns when a request arrived at the server: a client measures from then, and
    the scheduler receives requests between two iterations only. SGLang has the field in both
    processes and does not send it."""
    created_s = getattr(times, "created_time", 0.0)
    return {**state, "created_time": created_s} if created_s else state


# --- What operators do ---


def wait_for_begun_only(result: Any, manager: Any) -> None:
    """New weights wait for the requests that have begun, not for those in the offline pool, which
    may be paused. Stock waits for every request, and lets new chats wait for the operation."""
    if load_config() is not None:
        use_model_lock(manager)


async def unload_without_waiting(original: Any, manager: Any, obj: Any) -> Any:
    """Offline requests that wait with a LoRA adapter which is unloaded, or makes room for another,
    are answered with 503. Stock waits until they have run."""
    if load_config() is None:
        return await original(manager, obj)
    async with unloading(manager, obj):
        return await original(manager, obj)


# --- How they are answered ---

_ABORTED = "the request was aborted by the operator; send it again"
_IN_GRAMMAR_QUEUE = "Aborted by AbortReq."
"""SGLang's message for a request that is aborted while its grammar is compiled."""
_NO_TOKEN = "Grammar accept_token failed"
"""Start of SGLang's message for a request whose grammar matches no text."""


async def answer_abort(
    original: Any, manager: Any, out: dict[str, Any], state: Any, is_stream: bool
) -> Any:
    """An offline request that the full pool refuses is answered with 429: stock passes on 400, 500
    and 503 only, and any other status becomes 200 with an empty answer. A grammar that matches no
    text is answered with 400; stock answers 500. A request that is aborted while its grammar is
    compiled gets the finish reason ``abort`` as others do; stock answers 400."""
    reason = out["meta_info"]["finish_reason"]
    if reason.get("message") == _IN_GRAMMAR_QUEUE:
        reason["status_code"] = None
    if reason.get("message"):
        reason["message"] = without_owner(str(reason["message"]))
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


def keep_status(original: Any, serving: Any, message: str, *args: Any, **kwargs: Any) -> Any:
    """A request to ``/v1/responses`` that is refused or aborted with 429 or 503 is answered so, and
    clients send it again. Stock answers 400 whatever has happened."""
    error = sys.exception()
    if not isinstance(error, HTTPException):
        return word_error(original, serving, message, *args, **kwargs)
    kind = HTTPStatus(error.status_code).phrase
    return original(serving, str(error.detail), err_type=kind, status_code=error.status_code)


_SERVER = "sglang.srt.entrypoints.http_server"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

SEAMS: tuple[Seam, ...] = (
    before(
        f"{_SERVER}.launch_server",
        "server_args, init_tokenizer_manager_func, run_scheduler_process_func, "
        "run_detokenizer_process_func, execute_warmup_func, launch_callback",
        check_server,
    ),
    around(
        f"{_ENGINE}._launch_scheduler_processes",
        "server_args, port_args, run_scheduler_process_func, placement_group",
        leave_signals,
    ),
    around(
        f"{_ENGINE}._launch_detokenizer_subprocesses",
        "server_args, port_args, run_detokenizer_process_func",
        leave_signals,
    ),
    before(
        f"{_SERVER}._setup_and_run_http_server",
        "server_args, tokenizer_manager, template_manager, port_args, scheduler_infos, "
        "subprocess_watchdog, execute_warmup_func, launch_callback",
        prepare_app,
    ),
    around(
        f"{_SERVER}._wait_and_warmup",
        "server_args, launch_callback, execute_warmup_func, post_warmup_callback",
        announce_ready,
    ),
    around("uvicorn.Server.on_tick", "self, counter", end_silent),
    around(f"{_MANAGER}.sigterm_watchdog", "self", drain_first),
    after(f"{_MANAGER}.init_weight_update", "self", wait_for_begun_only),
    around(f"{_MANAGER}._unload_lora_adapter_locked", "self, obj", unload_without_waiting),
    after("sglang.srt.server_args.ServerArgs.resolved_dict", "self", hide_secrets),
    around(f"{_SERVER}.ORJSONRequest.json", "self", read_body),
    around(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
        "self, request, is_multimodal, output_constrained",
        render_messages,
    ),
    around(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses."
        "create_error_response",
        "self, message, err_type, status_code, param",
        keep_status,
    ),
    around(f"{_MANAGER}.generate_request", "self, obj, request", classify),
    around(f"{_MANAGER}.open_session", "self, obj, request", open_session),
    around(f"{_MANAGER}.close_session", "self, obj, request", close_session),
    before(f"{_MANAGER}._validate_one_request", "self, obj, input_ids", check_values),
    before(f"{_MANAGER}._release_req_states_on_failure", "self, request_states", note_released),
    after(
        "sglang.srt.observability.req_time_stats.ReqTimeStatsBase.__getstate__",
        "self",
        send_created_time,
    ),
    around(f"{_MANAGER}._handle_abort_finish_reason", "self, out, state, is_stream", answer_abort),
)
