"""One table says what each HTTP route shows at which level."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.batch import message_batches, routes
from cosched.config import Config
from cosched.limits.claims import digest_of
from cosched.limits.origins import AccessConfig, Origins
from cosched.server.access import (
    RULES,
    Access,
    Keys,
    Level,
    hide_in_command,
    rule_of,
    without_owners,
    without_secret_values,
)
from cosched.server.owned_ids import OwnedDict, owner, with_owner, without_owner

CHAT, INFO, STATE, FILES = "/v1/chat/completions", "/server_info", "/cosched", "/v1/files"
EVIL = {"origin": "https://evil.example"}
REBOUND = {"host": "evil.example"}


def routes_of(app):
    """Path and endpoint of each."""
    for route in app.routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from routes_of(included)
        else:
            yield route.path, getattr(route, "endpoint", None)


@pytest.fixture(scope="module")
def every_route():
    """Of SGLang's application and cosched's, with metrics."""
    from types import SimpleNamespace
    from unittest.mock import Mock

    from sglang.srt.entrypoints.http_server import app as stock

    from cosched.server.admin import add_routes

    ours = FastAPI()
    ours.state = SimpleNamespace()
    add_routes(ours, Config())
    routes.add_routes(ours, Mock())
    message_batches.add_message_routes(ours, Mock())
    return {*routes_of(stock), *routes_of(ours), ("/metrics", None)}


def test_every_route_is_in_the_table_and_each_row_is_a_route(every_route):
    found = {path.rstrip("/") or "/" for path, _ in every_route}
    assert found <= RULES.keys(), found - RULES.keys()
    only_with_a_variable = {"/dumper/{method}"}
    assert RULES.keys() - found <= only_with_a_variable


def test_no_route_of_operators_is_open_in_the_table(every_route):
    """SGLang marks them, but does not find the marks of routers that an application includes."""
    marked = {path for path, endpoint in every_route if hasattr(endpoint, "_auth_level")}
    assert {path for path, rule in RULES.items() if rule.level is Level.ADMIN} - marked <= {
        "/dumper/{method}", *(path for path in RULES if path.startswith("/cosched"))
    }  # fmt: skip
    assert all(RULES[path].level is Level.ADMIN for path in marked)


def test_paths_with_names_have_their_row():
    assert rule_of("/v1/files/file-1/content") is RULES["/v1/files/{id}/content"]
    assert rule_of("/v1/models/org/name") is RULES["/v1/models/{model:path}"]
    assert rule_of("/v1/files/file-1/content/") is RULES["/v1/files/{id}/content"]
    assert rule_of("/cosched/") is RULES["/cosched"]
    assert rule_of("/metrics/") is rule_of("/metricsx") is RULES["/metrics"]
    assert rule_of("/of/another/plugin").level is Level.KEY


class Door:
    """`Access` before an application that answers every request; `asked` is what came through."""

    def __init__(self, *, answer=None, **keys):
        self.asked, self.owners = [], []
        self.content = answer or {}

        async def answer_all(scope, receive, send):
            self.asked.append(scope["path"])
            self.owners.append(owner.get())
            if scope["type"] == "http":
                await JSONResponse(self.content)(scope, receive, send)

        async def refuse(scope, message, status):
            return Response(message, status_code=status)

        self.app = Access(
            answer_all,
            keys=Keys(**keys),
            origins=Origins(AccessConfig(), own_names=["gpu1"]),
            owner_of=Config().batches.owner_of,
            answer=refuse,
        )

    def ask(self, path, key=None, method="GET", **headers):
        if key is not None:
            headers["authorization"] = f"Bearer {key}"

        async def send():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gpu1:1") as client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(send())

    def status(self, path, key=None, **more):
        return self.ask(path, key, **more).status_code


def test_each_level_reaches_its_routes_and_no_others():
    both, admin_only, nothing = Door(api="A", admin="B"), Door(admin="B"), Door()
    for path, rule in RULES.items():
        for door, key, level in (
            (both, None, Level.PUBLIC), (both, "wrong", Level.PUBLIC), (both, "A", Level.KEY),
            (both, "B", Level.ADMIN), (admin_only, None, Level.KEY), (admin_only, "x", Level.KEY),
            (admin_only, "B", Level.ADMIN), (Door(api="A"), "A", Level.ADMIN),
            (nothing, None, Level.ADMIN), (nothing, "x", Level.ADMIN),
        ):  # fmt: skip
            assert door.status(path, key) == (200 if rule.level <= level else 401), (path, key)


PLANTED = "planted-5e3c"


@pytest.mark.parametrize(
    "info",
    [
        {"admin_api_key": PLANTED, "api_key": PLANTED, "ssl_keyfile_password": PLANTED},
        {"internal_states": [{"api_key": PLANTED, "env": {"HF_TOKEN": PLANTED}}]},
        {"launch_command": f"serve --admin-api-key {PLANTED} --api-key={PLANTED} --port 3"},
        {"hicache_storage_backend_extra_config": json.dumps({"a": {"secret_key": PLANTED}})},
        {"url": f"postgresql://cosched:{PLANTED}@db/cosched", "AWS_SECRET_ACCESS_KEY": PLANTED},
    ],
)
def test_secrets_are_shown_at_no_level(info):
    for path in (INFO, "/get_server_info"):
        for door, key in ((Door(answer=info), None), (Door(answer=info, admin="B"), "B")):
            answer = door.ask(path, key)
            assert answer.status_code == 200 and PLANTED not in answer.text, answer.text
            assert answer.headers["content-length"] == str(len(answer.content))


def test_what_is_no_secret_stays():
    info = {"eos_token": "</s>", "max_total_tokens": 5, "tokenizer_path": "/m", "key": "x",
            "api_key": None, "launch_command": "serve --tokenizer-path /m --port 3",
            "json_model_override_args": '{"a": 1}', "model_path": "s3://bucket/x"}  # fmt: skip
    assert without_secret_values(info) == info


def test_a_password_with_spaces_is_not_in_the_command():
    arguments = type("Arguments", (), {"ssl_keyfile_password": "my pass", "api_key": None})
    command = hide_in_command("serve --ssl-keyfile-password my pass --port 1", arguments)
    assert command == "serve --ssl-keyfile-password <redacted> --port 1"


def test_below_the_operator_nobody_sees_what_owners_used():
    costs = {"online": {"acme": 1.5, "bob/t": 0.5}, "offline": {}}
    info = {"internal_states": [{"cosched": {"device_s": costs, "policy": "cosched"}}, {}]}
    door = Door(answer=info, admin="B")

    def shown(key):
        return door.ask(INFO, key).json()["internal_states"][0]["cosched"]

    assert shown("B")["device_s"] == costs
    assert shown("x") == {
        "device_s": {"online": {"": 2.0}, "offline": {"": 0}},
        "policy": "cosched",
    }


def test_metrics_without_owners_keep_names_and_sums():
    from prometheus_client import CollectorRegistry, Counter

    registry = CollectorRegistry()
    counter = Counter("cosched:s", "x", ["key", "request_class"], registry=registry)
    for key, seconds in (("acme", 1.0), ("bob", 2.0), ("", 4.0)):
        counter.labels(key=key, request_class="online").inc(seconds)
    [metric] = [without_owners(one) for one in registry.collect()]
    [sample] = [one for one in metric.samples if one.name == "cosched:s_total"]
    assert sample.value == 7.0 and sample.labels == {"key": "", "request_class": "online"}


def test_a_web_page_without_a_key_is_refused_everywhere_but_at_probes():
    door = Door()
    for path, rule in RULES.items():
        is_open = rule.level is Level.PUBLIC
        assert door.status(path, **EVIL) == (200 if is_open else 403), path
        assert door.status(path, **REBOUND) == (403 if rule.by_name else 200), path
        assert door.status(path, method="OPTIONS", **EVIL) == 200  # grants nothing by itself
        assert door.status(path, **{"origin": "http://gpu1:1"}) == 200
        assert door.status(path, **REBOUND, origin="http://evil.example") == (
            200 if is_open else 403
        )
    assert RULES[FILES].by_name and RULES[STATE].by_name and not RULES[CHAT].by_name
    reason = door.ask(FILES, **EVIL).text
    assert "https://evil.example" in reason and "access.origins" in reason and "API key" in reason
    picture = {"sec-fetch-site": "cross-site"}
    assert door.status("/flush_cache", **picture) == 403 and door.status("/docs", **picture) == 200


def test_a_key_that_the_server_knows_opens_it_to_any_page_and_proxy():
    door = Door(api="A", digests=[digest_of("tenant")])
    assert door.status(FILES, "A", **EVIL) == door.status(FILES, "A", **REBOUND) == 200
    named = Door(admin="B", digests=[digest_of("tenant")])
    for key, status in (("tenant", 200), ("B", 200), ("guessed", 403), (digest_of("tenant"), 403)):
        assert named.status(FILES, key, **EVIL) == named.status(FILES, key, **REBOUND) == status


def test_a_web_socket_needs_the_level_and_the_origin_too():
    """SGLang checks keys of HTTP requests only, and browsers let any page open a web socket."""

    def first_message(door, **headers):
        sent = []
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": pairs}

        async def receive():
            return {"type": "websocket.connect"}

        async def send(message):
            sent.append(message["type"])

        asyncio.run(door.app(scope, receive, send))
        return sent

    door = Door(api="A")
    assert first_message(door) == ["websocket.close"] and not door.asked
    assert first_message(door, authorization="Bearer A") == [] and door.asked
    assert first_message(Door(), origin="https://evil.example") == ["websocket.close"]


def test_ids_belong_to_the_key_that_made_them():
    door = Door()
    for key in ("k1", "k2", None):
        door.ask(CHAT, key)
    first, second, none = door.owners
    assert len({first, second, none}) == 3 and owner.get() is None
    store = OwnedDict()

    def act(as_whom, action):
        token = owner.set(as_whom)
        try:
            return action()
        finally:
            owner.reset(token)

    act(first, lambda: store.update({"resp_1": "of first"}))
    inner = act(first, lambda: with_owner("s1"))
    assert act(first, lambda: (store.get("resp_1"), without_owner(inner))) == ("of first", "s1")
    for other in (second, none):
        # Neither by the client's id nor by the one that SGLang's processes have.
        assert act(other, lambda: (store.get("resp_1"), store.get(with_owner("resp_1")))) == (
            None,
            None,
        )
        assert (
            act(other, lambda: with_owner("s1")) != inner != act(other, lambda: with_owner(inner))
        )
    assert with_owner("s1") == "s1"  # a program around the engine
