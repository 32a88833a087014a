"""The HTTP side of a server: the class and the targets that a request gets, and its reply headers.

Every reply to a request with a class has the header ``x-cosched-class``, and ``x-cosched-targets``
if the request named targets; ``x-cosched-ignored`` names fields without effect. The reply to a
request with ``x-cosched-late: 1`` says if its TTFT target was out of reach. Replies of OpenAI's
endpoints that have the field ``service_tier`` carry it, streamed ones in every chunk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cosched.config import Config
from cosched.core.request import RequestClass, Slo
from cosched.errors import LimitError
from cosched.limits.api_keys import NO_KEYS, ApiKeys
from cosched.limits.claims import Grant, KeyGate, hex_digest, presented_key
from cosched.limits.sequences import asked, made
from cosched.server.preparation import TICKET_KEY
from cosched.wire import (
    ANTHROPIC_SERVICE_TIERS,
    BEHIND_KEY,
    GRANTED_TIERS,
    HINT_KEY,
    LATE_HEADER,
    LATE_KEY,
    NAME_KEY,
    OWNER_KEY,
    SERVICE_TIERS,
    USAGE_KEY,
    check_sampling_params,
    map_targets,
    params_of_slo,
    parse_hint,
    parse_http,
    parse_priority,
    parse_slo,
    with_server_params,
    with_slo,
    without_targets,
)

CLASS_HEADER = "x-cosched-class"
TARGETS_HEADER = "x-cosched-targets"
IGNORED_HEADER = "x-cosched-ignored"

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

# Keys of `request.state` of Starlette, which all middleware of one HTTP request share.
_STATE, _TIERED, _RETRY_AFTER = "cosched", "cosched_tiered", "cosched_retry_after_s"
_OWN, _OWN_NAME, _LATE = "cosched_own", "cosched_own_name", "cosched_late"
_DEVICE_S, _ABORTED, _IGNORED = "cosched_device_s", "cosched_aborted", "cosched_ignored"
_BEHIND = "cosched_behind"

_NOT_LATE = "no"

_ANTHROPIC = "/v1/messages"

_TIERED_ROUTES = frozenset(
    {
        "/invocations",  # SageMaker's name for chat completions
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
    }
)
"""Routes whose replies have a ``service_tier`` in OpenAI's API."""

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
"""Routes that do not run the model: limits of API keys do not count them."""


def own_request(
    deadline_s: float | None = None,
    owner: str = "",
    tenant: str = "",
    aborted: Callable[[float], None] | None = None,
    num_behind: int = 0,
    *,
    keys: ApiKeys = NO_KEYS,
) -> dict[str, Any]:
    """The initial `request.state` of a request that the server sends to itself: it is offline
    whatever its body says, and counts against no API key.

    deadline_s  latest completion, from now on [s], unless the request names one
    owner       digest of the API key that it costs
    aborted     called with what it has cost [s] if it is aborted while it runs
    num_behind  requests that will come after it
    """
    name = keys.name(owner) + (f"/{tenant}" if tenant else "")
    slo = params_of_slo(Slo(deadline_s=deadline_s))
    return {
        _OWN: slo,
        _OWN_NAME: (name, keys.owner(owner)),
        _ABORTED: aborted,
        _BEHIND: num_behind,
    }


def told_of_abort(request: Any) -> Callable[[float], None] | None:
    """What is to be called with the cost of a request that is aborted [s]."""
    told: Callable[[float], None] | None = getattr(getattr(request, "state", None), _ABORTED, None)
    return told


class Front:
    """Reads class and targets of requests, within the operator's claims. One per HTTP process."""

    def __init__(self, config: Config) -> None:
        self._ignored = config.claims.ignored
        self._keys = config.api_keys()
        self._owner_of = config.batches.owner_of
        tiers = config.online_tiers()
        self.gate = KeyGate(config.claims, config.slo.targets(), tiers)
        names = {tier.name: None for tier in tiers}
        self._service_tiers = {**SERVICE_TIERS, **names}
        self._anthropic_tiers = {**ANTHROPIC_SERVICE_TIERS, **names}

    def read(self, request: Any, body: Any, *, route: str) -> None:
        """Read a JSON body and its headers, once per HTTP request. RequestError, LimitError."""
        state = request.state
        if hasattr(state, _STATE):
            return
        tiers = self._anthropic_tiers if route == _ANTHROPIC else self._service_tiers
        wish = parse_http(body, request.headers, tiers=tiers, ignored=self._ignored)
        own = getattr(state, _OWN, None)
        if own is not None:
            slo = {**own, **wish.slo}
            wish = replace(wish, only=RequestClass.OFFLINE, slo=slo, asks_usage=True)
            name, owner = getattr(state, _OWN_NAME)
            grant = Grant(wish=wish, name=name, owner=owner)
        elif route in _WITHOUT_A_RUN:
            grant = self.gate.grant(wish, request.headers)
        else:
            try:
                grant = self.gate.enter(wish, request.headers, asked(route, body))
            except LimitError as error:
                setattr(state, _RETRY_AFTER, error.retry_after_s)
                raise
        if own is None:
            self._name(grant, request.headers)
        setattr(state, _STATE, grant)
        setattr(state, _TIERED, route in _TIERED_ROUTES)

    @staticmethod
    def note_ignored(request: Any, names: Sequence[str]) -> None:
        """The reply says that these fields have no effect."""
        setattr(request.state, _IGNORED, names)

    def apply(self, obj: Any, request: Any) -> None:
        """Write the granted class and targets into SGLang's request object, and count its sequences
        until `ended`. RequestError, LimitError."""
        state = getattr(request, "state", None)
        grant: Grant | None = getattr(state, _STATE, None)
        if grant is None:
            # No JSON body came with it: a form, a web socket, gRPC, or a program around the engine.
            headers = getattr(request, "headers", None)
            wish = parse_http(None, headers or {}, ignored=self._ignored)
            # Without headers there is no key, and `*` is for requests that could have sent one.
            grant = Grant(wish=wish) if headers is None else self.gate.grant(wish, headers)
            self._name(grant, headers or {})
            if state is not None:
                setattr(state, _STATE, grant)
        if state is not None:
            grant.outlives_reply = bool(getattr(obj, "background", False))
            try:
                self.gate.admit(grant, made(obj))
            except LimitError as error:
                setattr(state, _RETRY_AFTER, error.retry_after_s)
                raise
        priority = None if "priority" in self._ignored else parse_priority(obj.priority)
        obj.priority = self.gate.priority(grant, priority)
        params = obj.sampling_params
        if "body_targets" in self._ignored:
            params = without_targets(params)
        else:
            check_sampling_params(params)
        params = with_slo(params, grant.wish.slo)
        if grant.bounds.is_bounding:
            clamp = grant.bounds.clamp
            params = map_targets(params, partial(_clamped, clamp))
        if request is not None:
            params = with_server_params(params, _told(grant, getattr(state, _BEHIND, 0)))
        obj.sampling_params = params

    def ended(self, request: Any, *, is_whole: bool) -> None:
        """What `apply` was called with is no longer generated. If all of it was, its key may have
        another one, before the client has read the end of the reply; else when the reply ends."""
        grant: Grant | None = getattr(getattr(request, "state", None), _STATE, None)
        if grant is not None and (is_whole or grant.outlives_reply):
            self.gate.leave(grant)

    def _name(self, grant: Grant, headers: Mapping[str, str]) -> None:
        """Note the owner that pays for it."""
        key = presented_key(headers)
        grant.name = self._keys.name(hex_digest(key))
        grant.owner = "" if grant.name else self._keys.owner(self._owner_of(key))

    def hear(self, reply: Any, request: Any) -> None:
        """Move what the scheduler says of lateness and cost from a reply, or a part of one, to the
        state that `ReplyMiddleware` reads."""
        late = None
        costs: dict[str, float] = {}
        for each in _parts(reply):
            meta_info = each.get("meta_info")
            reported = meta_info.pop(LATE_KEY, None) if meta_info else None
            late = late or next((reason for reason in reported or () if reason), None)
            if meta_info and USAGE_KEY in meta_info:
                known = [seconds for seconds in meta_info[USAGE_KEY] if seconds is not None]
                meta_info[USAGE_KEY] = costs[meta_info["id"]] = known[-1] if known else 0.0
        state = getattr(request, "state", None)
        if state is not None and costs:  # of each choice
            setattr(state, _DEVICE_S, getattr(state, _DEVICE_S, {}) | costs)
        if state is not None and (late or not hasattr(state, _LATE)):
            setattr(state, _LATE, late or _NOT_LATE)


def _parts(reply: Any) -> Iterator[Mapping[str, Any]]:
    """The replies in it: of several prompts or samples, or the results of a beam search."""
    if isinstance(reply, list):
        for each in reply:
            yield from _parts(each)
    elif isinstance(reply, dict):
        yield from reply.get("beam_results", (reply,))


def is_own(request: Any) -> bool:
    """Whether the server sends a request to itself."""
    return hasattr(getattr(request, "state", None), _OWN)


def is_offline(request: Any) -> bool:
    """Whether a request that was read is offline."""
    grant: Grant | None = getattr(request.state, _STATE, None)
    return grant is not None and grant.request_class is RequestClass.OFFLINE


def payer_of(request: Any) -> str:
    """The API key that pays for a request that was read, whatever its tenant: the name of its
    owner, or what stands for one; "" where keys are not told apart."""
    grant: Grant | None = getattr(request.state, _STATE, None)
    return "" if grant is None else grant.name.partition("/")[0] or grant.owner


def was_aborted(reply: Any) -> bool:
    """Whether a reply, or a part of one, ends because it was aborted; errors have a status."""
    reasons = [(each.get("meta_info") or {}).get("finish_reason") for each in _parts(reply)]
    return any(
        isinstance(reason, dict)
        and reason.get("type") == "abort"
        and reason.get("status_code") is None
        for reason in reasons
    )


def _clamped(clamp: Callable[[Slo], Slo], own: Mapping[str, Any]) -> dict[str, Any]:
    """The targets, clamped; a hint stays as it is."""
    hint = parse_hint(own)
    granted = params_of_slo(clamp(parse_slo(own)))
    return granted if hint is None else {**granted, HINT_KEY: hint}


def _told(grant: Grant, num_behind: int) -> dict[str, Any]:
    """What the scheduler learns of a request beside class and targets."""
    told = {
        NAME_KEY: grant.name,
        OWNER_KEY: grant.owner,
        USAGE_KEY: grant.wish.asks_usage,
        BEHIND_KEY: num_behind,
    }
    return {key: value for key, value in told.items() if value}


class ReplyMiddleware:
    """ASGI middleware: adds headers and fields to replies, and frees the limit of an API key when
    its request ends.

    It reads no body: bytes are inserted into messages as they pass. SGLang goes on for two seconds
    after a stream, to abort what a client has left.
    """

    def __init__(self, app: Any, *, front: Callable[[], Front]) -> None:
        self.app = app
        self.front = front

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        def leave() -> None:
            grant = state.get(_STATE)
            if grant is not None and not grant.outlives_reply:
                self.front().gate.leave(grant)
            if (ticket := state.get(TICKET_KEY)) is not None:
                ticket.end()

        is_http = scope["type"] == "http"
        try:
            await self.app(scope, receive, _Reply(state, send, leave) if is_http else send)
        finally:
            leave()


class _Reply:
    """The messages of one reply on their way out."""

    def __init__(self, state: Mapping[str, Any], send: Send, leave: Callable[[], None]) -> None:
        self._state = state
        self._send = send
        self._leave = leave
        self._held: Message | None = None
        self._marks: list[Callable[[bytes], bytes]] = []
        self._is_stream = False
        self._late: str | None = None
        """The lateness that the reply reports."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not self._start(message):
                return
        elif self._marks and message["type"] == "http.response.body":
            body = message.get("body", b"")
            for mark in self._marks:
                body = mark(body)
            message = {**message, "body": body}
            if self._held is not None:
                await self._send(self._with_length(self._held, message))
                self._held = None
                self._marks.clear()
        if self._is_stream and message.get("body"):
            message = self._with_late(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._leave()  # before the client can send another request
        await self._send(message)

    def _start(self, message: Message) -> bool:
        """Add headers. False: they must wait for the body."""
        headers = message.setdefault("headers", [])
        retry_after_s = self._state.get(_RETRY_AFTER)
        if retry_after_s is not None:
            headers.append((b"retry-after", str(retry_after_s).encode()))
        if names := self._state.get(_IGNORED):
            headers.append((IGNORED_HEADER.encode(), ", ".join(names).encode()))
        grant: Grant | None = self._state.get(_STATE)
        if grant is None:
            return True
        headers.append((CLASS_HEADER.encode(), grant.request_class.value.encode()))
        targets = params_of_slo(grant.slo)
        if targets:
            text = ", ".join(f"{name}={value:g}" for name, value in targets.items())
            headers.append((TARGETS_HEADER.encode(), text.encode()))
        if message["status"] != 200:
            return True
        kind = dict(headers).get(b"content-type", b"")
        if grant.wish.asks_late and grant.request_class is RequestClass.ONLINE:
            self._is_stream = kind.startswith(b"text/event-stream")
            self._late = self._state.get(_LATE)
            if self._late is not None:
                headers.append((LATE_HEADER.encode(), self._late.encode()))
        is_stream = kind.startswith(b"text/event-stream")
        if not is_stream and not kind.startswith(b"application/json"):
            return True
        if self._state.get(_TIERED):
            tier = grant.tier or GRANTED_TIERS[grant.request_class]
            field = f'"service_tier":"{tier}",'.encode()
            self._marks.append(partial(_mark_events if is_stream else _mark_object, field=field))
        if grant.wish.asks_usage:
            self._marks.append(self._with_usage)
        if is_stream or not self._marks:
            return True
        self._held = message
        return False

    def _with_usage(self, body: bytes) -> bytes:
        """The last ``usage``: those before it may be in what the model was given."""
        costs: Mapping[str, float] | None = self._state.get(_DEVICE_S)
        before, usage, after = body.rpartition(_USAGE)
        if not costs or not usage:
            return body
        return before + usage + f'"{USAGE_KEY}":{sum(costs.values()):.6f},'.encode() + after

    def _with_late(self, message: Message) -> Message:
        """Put a comment before a part of a stream, since the headers were sent before lateness was
        known. Parts are whole events."""
        late = self._state.get(_LATE)
        if late is None or late == self._late:
            return message
        self._late = late
        comment = f": {LATE_HEADER}: {late}\n\n".encode()
        return {**message, "body": comment + message["body"]}

    @staticmethod
    def _with_length(start: Message, message: Message) -> Message:
        length = str(len(message["body"])).encode()
        headers = [
            (name, length if name == b"content-length" else value)
            for name, value in start["headers"]
        ]
        return {**start, "headers": headers}


# The objects that have the field all begin with their id. In a text, the quotes would be escaped:
# these bytes are nothing but the beginning of such an object.
_OBJECT, _CHUNK, _NESTED = b'{"id":', b'data: {"id":', b'"response":{"id":'
_NO_TIER = b'"service_tier":null,'
_USAGE = b'"usage":{'


def _mark_object(body: bytes, field: bytes) -> bytes:
    return b"{" + field + body[1:] if body.startswith(_OBJECT) else body


def _mark_events(body: bytes, field: bytes) -> bytes:
    if _CHUNK in body:
        return body.replace(_CHUNK, b"data: {" + field + b'"id":')
    # An event of /v1/responses: once, as a tool's parameters further in may look the same.
    if _NESTED in body and _NO_TIER in body:
        return body.replace(_NO_TIER, field, 1)
    return body.replace(_NESTED, b'"response":{' + field + b'"id":', 1)
