"""Tiers of online requests at the HTTP door: what is claimed, what is granted."""

import json
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from cosched.config import parse_config
from cosched.core.tiers import Tier, allowed_tier, tier_rank
from cosched.errors import ConfigError, RequestError
from cosched.server.front import Front, ReplyMiddleware

TIERS = [
    {"name": "default", "priority": 5},
    {"name": "priority", "priority": 10, "ttft_ms": 300},
    {"name": "slow", "priority": 0},
]
KEYS = {"plain": {"tiers": ["default", "slow"]}, "top": {"tiers": ["priority"]}}


def config(**keys):
    return parse_config(json.dumps({"tiers": TIERS, **keys}), source="test")


FRONT = Front(config(claims={"keys": KEYS}))


def granted(body, *, key=None, route="/v1/chat/completions", front=FRONT, headers=()):
    """(name of the granted tier, priority at the scheduler)."""
    headers = dict(headers) | ({} if key is None else {"authorization": f"Bearer {key}"})
    request = SimpleNamespace(headers=headers, state=SimpleNamespace())
    front.read(request, body, route=route)
    obj = SimpleNamespace(priority=body.get("priority"), sampling_params={})
    front.apply(obj, request)
    return request.state.cosched.tier, obj.priority


@pytest.mark.parametrize(
    ("body", "tier"),
    [
        ({}, ("default", 5)),
        ({"service_tier": "auto"}, ("default", 5)),
        ({"service_tier": "priority"}, ("priority", 10)),
        ({"service_tier": "slow"}, ("slow", 0)),
        ({"priority": 7}, ("default", 7)),
        ({"priority": 99, "service_tier": "priority"}, ("priority", 99)),
        ({"service_tier": "flex"}, ("", -100)),
        ({"priority": -3, "service_tier": "priority"}, ("", -3)),
    ],
)
def test_a_request_has_the_tier_it_asks_for(body, tier):
    assert granted(body) == tier


@pytest.mark.parametrize(
    ("said", "key", "tier"),
    [
        ("-12", None, ("priority", 12)),
        ("-7", None, ("default", 7)),
        ("0", None, ("slow", 0)),
        ("1", None, ("", -1)),
        ("-12", "plain", ("default", 5)),
    ],
)
def test_vllms_priority_claims_a_tier_whatever_the_body_says(said, key, tier):
    for body in ({}, {"priority": 5}, {"priority": -5}, {"service_tier": "slow"}):
        assert granted(body, key=key, headers={"x-vllm-priority": said}) == tier


def test_a_key_gets_the_tier_it_may_claim():
    assert granted({"service_tier": "priority"}, key="plain") == ("default", 5)
    assert granted({"priority": 12}, key="plain") == ("default", 5)
    assert granted({"service_tier": "slow"}, key="plain") == ("slow", 0)
    assert granted({}, key="top") == ("priority", 10), "it has no lower one"
    assert granted({"service_tier": "priority"}, key="other") == ("priority", 10)


@pytest.mark.parametrize(
    ("tiers", "expected"), [(None, ("default", 5)), (["priority"], ("priority", 10))]
)
def test_whom_the_operator_does_not_know_gets_no_tier_above_the_default_one(tiers, expected):
    """Unless the entry ``*`` names it; a key of its own may have all where it names none."""
    other = {} if tiers is None else {"tiers": tiers}
    front = Front(config(claims={"keys": {"*": other, "known": {}}}))
    for body in ({"service_tier": "priority"}, {"priority": 10}):
        for key in (None, "made up"):
            assert granted(body, key=key, front=front) == expected
        assert granted(body, key="known", front=front) == ("priority", 10)
    if tiers is None:
        assert granted({"service_tier": "slow"}, front=front) == ("slow", 0)


def test_a_service_tier_and_a_priority_that_contradict_each_other_are_refused():
    with pytest.raises(RequestError, match="'slow' is not the tier of priority 10"):
        granted({"service_tier": "slow", "priority": 10})
    with pytest.raises(RequestError, match=r"choose from auto, default, flex, priority, scale$"):
        granted({"service_tier": "slow"}, front=Front(parse_config("{}", source="test")))


def test_without_tiers_a_priority_stays_as_it_is():
    front = Front(parse_config("{}", source="test"))
    assert granted({"priority": 3, "service_tier": "priority"}, front=front) == ("", 3)


def test_ranks():
    tiers = [Tier(name="a", priority=9), Tier(name="b", priority=4), Tier(name="c", priority=1)]
    assert [tier_rank(tiers, p) for p in (100, 9, 8, 4, 1, 0, None)] == [0, 0, 1, 1, 2, 2, 2]
    assert tier_rank((), 5) == 0
    assert [allowed_tier(tiers, rank, {"b"}) for rank in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("tier", "named"),
    [
        ({"name": "flex", "priority": 1}, "name 'flex' cannot be that of a tier"),
        ({"name": "a b", "priority": 1}, "name 'a b'"),
        ({"name": "a", "priority": -1}, "below 0"),
        ({"name": "a", "priority": 10}, "two have the same priority"),
        ({"name": "slow", "priority": 1}, "two have the same name"),
        ({"name": "a", "priority": 1, "ttft_ms": 0}, "ttft_ms must be a positive"),
        ({"name": "a", "priority": 1, "share": 0.9}, "share of tier a"),
    ],
)
def test_wrong_tiers(tier, named):
    with pytest.raises(ConfigError, match=named):
        parse_config(json.dumps({"tiers": [*TIERS, tier]}), source="test")


def test_claims_name_configured_tiers():
    with pytest.raises(ConfigError, match="unknown tier 'fast'"):
        config(claims={"keys": {"a": {"tiers": ["fast"]}}})


def test_the_reply_names_the_granted_tier():
    async def app(scope, receive, send):
        request = Request(scope)
        FRONT.read(request, {"service_tier": "priority"}, route="/v1/completions")
        FRONT.apply(SimpleNamespace(priority=None, sampling_params={}), request)
        await JSONResponse({"id": "a"})(scope, receive, send)

    client = TestClient(ReplyMiddleware(app, front=lambda: FRONT))
    replies = [
        client.get("/", headers={"authorization": f"Bearer {key}"}) for key in ("x", "plain")
    ]
    assert [one.json()["service_tier"] for one in replies] == ["priority", "default"]
