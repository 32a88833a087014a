"""Who may use which HTTP route, and what its answer shows at which level: one table.

Levels are SGLang's: with ``--admin-api-key`` the operator is who sends it, else who sends
``--api-key``, and without either everybody. Secrets are shown at no level, what owners of API keys
did at the operator's. tests/wire/test_access.py asks for every route of SGLang and cosched.
"""

from __future__ import annotations

import hmac
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import msgspec
from starlette.routing import compile_path

from cosched.batch.storage import without_secrets
from cosched.limits.claims import digest_of, presented_key
from cosched.limits.origins import Origins
from cosched.server.middleware import App, Message, Receive, Scope, Send
from cosched.server.owned_ids import owner

REDACTED = "<redacted>"

OWNER_LABELS = ("key",)
"""Labels of metrics that name owners of API keys."""


class Level(IntEnum):
    """Of a request, by its API key, and the least that a route asks for."""

    PUBLIC = 0
    KEY = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table.

    level    the least that its requests must have
    by_name  ``Host`` must be a name of the server: the route shows or changes what is kept here
    change   of the JSON of an answer; keyword `level`: of the request
    """

    level: Level
    by_name: bool = True
    change: Callable[..., Any] | None = None


def _hide_secrets_and_owners(info: Any, level: Level) -> Any:
    info = without_secret_values(info)
    for state in info.get("internal_states", ()) if level < Level.ADMIN else ():
        ours = state.get("cosched") or {}
        if "device_s" in ours:
            ours["device_s"] = {
                name: {"": sum(by_owner.values())} for name, by_owner in ours["device_s"].items()
            }
    return info


_PUBLIC = Rule(Level.PUBLIC, by_name=False)
_OPEN_TO_KEYS = Rule(Level.KEY, by_name=False)
_KEY = Rule(Level.KEY)
_ADMIN = Rule(Level.ADMIN)
_INFO = Rule(Level.KEY, by_name=False, change=_hide_secrets_and_owners)

_OF_BATCHES = (
    *("/v1/files", "/v1/files/{id}", "/v1/files/{id}/content"),
    *("/v1/batches", "/v1/batches/{id}", "/v1/batches/{id}/cancel"),
    *("/v1/messages/batches", "/v1/messages/batches/{id}"),
    *("/v1/messages/batches/{id}/cancel", "/v1/messages/batches/{id}/results"),
)

RULES: Mapping[str, Rule] = {
    # Probes and Prometheus; `/metrics` has no names of owners below the level of the operator.
    **dict.fromkeys(("/health", "/health_generate", "/metrics", "/ready"), _PUBLIC),
    # Requests that run the model or a parser for the client alone, and what routers ask for.
    **dict.fromkeys(
        (
            *("/", "/ping", "/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc"),
            *("/get_model_info", "/model_info", "/v1/models", "/v1/models/{model:path}"),
            *("/v1/loads", "/get_hicache_l3_cache_layout"),
            *("/generate", "/encode", "/classify", "/tokenize", "/detokenize", "/invocations"),
            *("/parse_function_call", "/separate_reasoning", "/vertex_generate"),
            *("/api/chat", "/api/generate", "/api/show", "/api/tags"),
            *("/v1/audio/transcriptions", "/v1/chat/completions", "/v1/classify"),
            *("/v1/completions", "/v1/decisions", "/v1/detokenize", "/v1/embeddings"),
            *("/v1/messages", "/v1/messages/count_tokens", "/v1/realtime", "/v1/rerank"),
            *("/v1/responses", "/v1/score", "/v1/systemone", "/v1/tokenize"),
        ),
        _OPEN_TO_KEYS,
    ),
    # What is kept for an API key.
    **dict.fromkeys(
        (
            *("/open_session", "/close_session"),
            *("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
            *_OF_BATCHES,
        ),
        _KEY,
    ),
    **dict.fromkeys(("/server_info", "/get_server_info"), _INFO),
    # What changes the server, or shows what others do.
    **dict.fromkeys(
        (
            *("/cosched", "/cosched/batches", "/cosched/history", "/cosched/metrics"),
            *("/cosched/offline", "/abort_request", "/flush_cache", "/freeze_gc", "/slow_down"),
            *("/pause_generation", "/continue_generation", "/configure_logging"),
            *("/set_internal_state", "/set_trace_level", "/start_profile", "/stop_profile"),
            *("/dumper/{method}", "/pd_role_switch"),
            *("/scale_elastic_ep", "/is_scaling_elastic_ep"),
            *("/hicache/storage-backend", "/hicache/storage-backend/clear"),
            *("/add_external_corpus", "/list_external_corpora", "/remove_external_corpus"),
            *("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"),
            *("/release_memory_occupation", "/resume_memory_occupation"),
            "/dump_expert_distribution_record",
            "/start_expert_distribution_record",
            "/stop_expert_distribution_record",
            *("/begin_weight_update", "/end_weight_update", "/weights_checker"),
            *("/get_weights_by_name", "/update_weight_version", "/update_weights_from_disk"),
            *("/update_weights_from_distributed", "/update_weights_from_ipc"),
            *("/update_weights_from_tensor", "/init_weights_update_group"),
            *("/destroy_weights_update_group", "/send_weights_to_remote_instance"),
            "/init_weights_send_group_for_remote_instance",
            *(
                "/get_remote_instance_transfer_engine_info",
                "/remote_instance_transfer_engine_info",
            ),
        ),
        _ADMIN,
    ),
}

_PATTERNS = [(compile_path(path)[0], rule) for path, rule in RULES.items() if "{" in path]


def rule_of(path: str) -> Rule:
    """Of a path, with or without a slash at its end. Routes that are not in the table, of another
    plugin, keep their own level."""
    path = path.rstrip("/") or "/"
    if path.startswith("/metrics"):  # SGLang mounts them on every path that begins so
        return RULES["/metrics"]
    found = RULES.get(path)
    if found is not None:
        return found
    return next((rule for pattern, rule in _PATTERNS if pattern.match(path)), _KEY)


# --- Secrets ---

_SECRET = re.compile(
    r"(^|[_-])(passwords?|passwd|passphrase|secrets?|credentials?|authorization)([_-]|$)"
    r"|(^|[_-])(api|access|account|private|encryption|watermark|signing)[_-]?key([_-]b)?$"
    r"|(^|[_-])(hf|hub|access|auth|api|bearer|refresh|sas)[_-]?token$|^token$",
    re.IGNORECASE,
)
"""A name of a field, flag or environment variable whose text is a secret."""

_FLAG = re.compile(r"(?<!\S)(--[\w-]+)([ =])(\S+)")


def without_secret_values(value: Any, name: str = "") -> Any:
    """JSON in which texts with the name of a secret, passwords in URLs and JSON in texts are
    redacted."""
    if isinstance(value, dict):
        return {key: without_secret_values(one, str(key)) for key, one in value.items()}
    if isinstance(value, list):
        return [without_secret_values(one, name) for one in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET.search(name):
        return REDACTED
    if name == "launch_command":
        return _FLAG.sub(_without_flag_value, value)
    if value.startswith(("{", "[")):
        try:
            parsed = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
        redacted = without_secret_values(parsed, name)
        return value if redacted == parsed else msgspec.json.encode(redacted).decode()
    return without_secrets(value) if "://" in value else value


def _without_flag_value(found: re.Match[str]) -> str:
    flag, between, value = found.groups()
    return f"{flag}{between}{without_secret_values(value, flag)}"


SECRET_ARGUMENTS = ("admin_api_key", "api_key", "ssl_keyfile_password")
"""SGLang's arguments that are secrets."""


def hide_in_command(command: str, arguments: Any) -> str:
    """SGLang's command line without the secrets of `arguments`; these may have spaces."""
    for name in SECRET_ARGUMENTS:
        secret = getattr(arguments, name, None)
        for between in " =" if secret else "":
            flag = "--" + name.replace("_", "-") + between
            command = command.replace(f"{flag}{secret}", f"{flag}{REDACTED}")
    return command


# --- The middleware ---


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The API keys that the server knows.

    api, admin  SGLang's
    digests     of the keys in the configuration
    """

    api: str | None = None
    admin: str | None = None
    digests: Collection[str] = ()

    def level(self, headers: Mapping[str, str]) -> Level:
        """Of a request, by SGLang's rules. `headers` are looked up by lower-case name."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        bearer = key if scheme.lower() == "bearer" else ""
        operators = self.admin or self.api
        if not operators or _is_same(bearer, operators):
            return Level.ADMIN
        return Level.KEY if not self.api or _is_same(bearer, self.api) else Level.PUBLIC

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether the request has a key that the server knows."""
        key = presented_key(headers)
        if not key:
            return False
        ours = [one for one in (self.api, self.admin) if one]
        return any(_is_same(key, one) for one in ours) or digest_of(key) in self.digests


def _is_same(presented: str, key: str) -> bool:
    return hmac.compare_digest(presented.encode(), key.encode())


class Access:
    """ASGI middleware that holds to the table.

    answer       the application that answers in the form of the endpoint: scope, message, status
    owner_of     the owner of an API key
    has_metrics  SGLang serves ``/metrics``
    """

    def __init__(
        self,
        app: App,
        *,
        keys: Keys,
        origins: Origins,
        owner_of: Callable[[str], str],
        answer: Callable[[Scope, str, int], Awaitable[App]],
        has_metrics: bool = False,
    ) -> None:
        self._app = app
        self._keys = keys
        self._origins = origins
        self._owner_of = owner_of
        self._answer = answer
        self._metrics = metrics_without_owners() if has_metrics else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        rule = rule_of(path)
        headers = _headers_of(scope)
        level = self._keys.level(headers)
        if rule.level > Level.PUBLIC and scope.get("method") != "OPTIONS":
            status, reason = 401, "Unauthorized" if rule.level > level else None
            if reason is None and not self._keys.knows(headers):
                status, reason = 403, self._why_foreign(rule, headers)
            if reason is not None:
                await self._refuse(scope, receive, send, status, reason)
                return
        app = self._app
        if path.startswith("/metrics") and self._metrics is not None and level < Level.ADMIN:
            app = self._metrics
        if rule.change is not None:
            send = _Changed(send, partial(rule.change, level=level))
        token = owner.set(self._owner_of(presented_key(headers)))
        try:
            await app(scope, receive, send)
        finally:
            owner.reset(token)

    def _why_foreign(self, rule: Rule, headers: Mapping[str, str]) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is None and rule.level is Level.ADMIN:
            # A picture or a link of a foreign page: browsers send no origin with them.
            if headers.get("sec-fetch-site") == "cross-site":
                return "Sec-Fetch-Site 'cross-site': a web page of another server sent this request"
        if origin is not None:
            reason = self._origins.why_foreign_origin(origin, host)
            if reason is not None:
                return reason
        return self._origins.why_foreign_host(host) if rule.by_name else None

    async def _refuse(
        self, scope: Scope, receive: Receive, send: Send, status: int, reason: str
    ) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": reason[:120]})
            return
        await (await self._answer(scope, reason, status))(scope, receive, send)


def _headers_of(scope: Scope) -> Mapping[str, str]:
    """By lower-case name; of several with one name the first, as Starlette has it."""
    pairs = reversed(scope["headers"])
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in pairs}


class _Changed:
    """The messages of one reply: its JSON is changed."""

    def __init__(self, send: Send, change: Callable[[Any], Any]) -> None:
        self._send = send
        self._change = change
        self._start: Message = {}
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = self._body
        if self._start["status"] == 200 and body:
            body = msgspec.json.encode(self._change(msgspec.json.decode(body)))
        kept = [one for one in self._start.get("headers", ()) if one[0] != b"content-length"]
        headers = [*kept, (b"content-length", str(len(body)).encode())]
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def metrics_without_owners() -> App:
    """SGLang's ``/metrics``; the samples of all owners are one, with an empty label."""
    # SGLang says where the files are before anything may import prometheus_client.
    from prometheus_client import CollectorRegistry, make_asgi_app, multiprocess

    class _Sum:
        def __init__(self, stock: Any) -> None:
            self._stock = stock

        def collect(self) -> Any:
            return [without_owners(metric) for metric in self._stock.collect()]

    stock, shown = CollectorRegistry(), CollectorRegistry()
    multiprocess.MultiProcessCollector(stock)  # type: ignore[no-untyped-call]
    shown.register(_Sum(stock))
    app: App = make_asgi_app(registry=shown)
    return app


def without_owners(metric: Any) -> Any:
    """A metric of prometheus_client, with the sum of its samples over the labels of owners."""
    if not any(label in sample.labels for sample in metric.samples for label in OWNER_LABELS):
        return metric
    sums: defaultdict[Any, float] = defaultdict(float)
    for sample in metric.samples:
        labels = {**sample.labels, **{one: "" for one in OWNER_LABELS if one in sample.labels}}
        sums[sample.name, tuple(sorted(labels.items()))] += sample.value
    metric.samples = []
    for (name, labels), value in sums.items():
        metric.add_sample(name, dict(labels), value)
    return metric
