"""Who may claim what: the configuration and the gate per API key."""

from __future__ import annotations

import hashlib
import json

import pytest

from cosched.config import Config, parse_config
from cosched.core.request import RequestClass, Slo
from cosched.errors import ConfigError, LimitError
from cosched.limits.claims import ANY_KEY, KeyGate, read_claims
from cosched.wire import Wish

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE
SERVER = Slo(ttft_s=1.0, tpot_s=0.05)


def claims(**fields):
    return read_claims(json.dumps(fields), source="test")


def bearer(key):
    return {"authorization": f"Bearer {key}"}


class TestBounds:
    def test_by_default_a_quarter_of_the_servers_targets_is_the_floor(self):
        bounds = Config().target_bounds()
        assert bounds.floors == Slo(ttft_s=0.25, tpot_s=0.0125, deadline_s=0.25)
        assert bounds.ceilings == Slo()
        slo = Slo(ttft_s=1e-9, tpot_s=1e-9, deadline_s=1e-9)
        assert claims(floor_ratio=0).bounds(SERVER).clamp(slo) == slo

    def test_named_ones_win(self):
        given = claims(
            floor_ratio=0.5,
            floors={"tpot_ms": 8, "deadline_s": 60},
            ceilings={"ttft_ms": 10_000},
        )
        bounds = given.bounds(SERVER)
        assert bounds.floors == Slo(ttft_s=0.5, tpot_s=0.008, deadline_s=60)
        assert bounds.ceilings == Slo(ttft_s=10.0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"floor_ratio": 1.5}, r"floor_ratio must be in \[0, 1\], not 1.5"),
        ({"floors": {"ttft_ms": 0}}, "ttft_ms must be a positive number, not 0"),
        ({"floors": {"ttft": 5}}, "ttft"),
        ({"ignore": ["priorities"]}, "unknown sign 'priorities'; choose from body_targets, class"),
        ({"keys": {"a": {"class": "batch"}}}, "batch"),
        ({"keys": {"a": {"max_online": -1}}}, "max_online must be at least 0, not -1"),
        ({"keys": {"sha256:12": {}}}, "64 hexadecimal digits"),
        ({"keys": {"a": {}, "sha256:" + hashlib.sha256(b"a").hexdigest(): {}}}, "twice"),
        (
            {"keys": {"a": {"floors": {"tpot_ms": 9}, "ceilings": {"tpot_ms": 5}}}},
            "tpot_slo_ms: the floor 9 is above the ceiling 5",
        ),
        ({"accept": True}, "accept"),
    ],
)
def test_wrong_claims(fields, named):
    with pytest.raises(ConfigError, match=named):
        claims(**fields)
    with pytest.raises(ConfigError, match=named):
        parse_config(json.dumps({"claims": fields}), source="test")


def test_claims_are_read_from_a_file_and_held_against_the_servers_targets(tmp_path):
    path = tmp_path / "claims.json"
    path.write_text('{"floor_ratio": 0.1}')
    assert read_claims(str(path), source="--cosched-claims").floor_ratio == 0.1
    with pytest.raises(ConfigError, match=r"--cosched-claims is neither .*missing"):
        read_claims("missing", source="--cosched-claims")
    text = json.dumps({"claims": {"ceilings": {"ttft_ms": 100}}})
    with pytest.raises(ConfigError, match="ttft_slo_ms: the floor 250 is above the ceiling 100"):
        parse_config(text, source="test")


def test_no_key_goes_on_in_clear_text():
    config = parse_config('{"claims": {"keys": {"topsecret": {"max_online": 1}}}}', source="test")
    assert "topsecret" not in config.to_json() and "topsecret" not in repr(config)
    again = parse_config(config.to_json(), source="test")
    assert again == config


class TestGate:
    def gate(self, **keys):
        return KeyGate(claims(keys=keys), SERVER)

    def test_limits_are_per_class_and_end_with_the_request(self):
        gate = self.gate(a={"max_online": 2, "max_offline": 50})
        first = gate.enter(Wish(), bearer("a"), 2)
        with pytest.raises(
            LimitError, match=r"may have 2 online .* has 2, .* asks for 1"
        ) as caught:
            gate.enter(Wish(), bearer("a"), 1)
        assert caught.value.retry_after_s == 1
        # Neither offline work nor another key is in its way.
        gate.enter(Wish(offline=True), bearer("a"), 50)
        with pytest.raises(LimitError) as caught:
            gate.enter(Wish(priority=-1), bearer("a"), 1)
        assert caught.value.retry_after_s == 10
        gate.enter(Wish(), bearer("b"), 50)
        gate.leave(first)
        gate.leave(first)
        gate.enter(Wish(), bearer("a"), 2)
        with pytest.raises(LimitError):
            gate.enter(Wish(), bearer("a"), 1)

    @pytest.mark.parametrize("only", ["online", "offline"])
    def test_class(self, only):
        gate = self.gate(a={"class": only, f"max_{only}": 1})
        for wish in (Wish(), Wish(offline=True)):
            grant = gate.enter(wish, bearer("a"), 1)
            assert grant.request_class.value == only
            with pytest.raises(LimitError):
                gate.enter(wish, bearer("a"), 1)
            gate.leave(grant)

    def test_keys(self):
        digest = "sha256:" + hashlib.sha256(b"b").hexdigest()
        gate = self.gate(a={"class": "offline"}, **{digest: {"class": "offline"}})
        offline = [bearer("a"), bearer("b"), {"x-api-key": "a"}, {"authorization": "bearer  a "}]
        for headers in offline:
            assert gate.grant(Wish(), headers).request_class is OFFLINE, headers
        # A digest is not the key.
        for headers in ({}, bearer("c"), bearer(digest), {"authorization": "Basic a"}, bearer("*")):
            assert gate.grant(Wish(), headers).request_class is ONLINE, headers

    def test_any_other_key(self):
        gate = self.gate(**{"a": {}, ANY_KEY: {"class": "offline"}})
        assert gate.grant(Wish(), bearer("a")).request_class is ONLINE
        for headers in ({}, bearer("c"), bearer(ANY_KEY)):
            assert gate.grant(Wish(), headers).request_class is OFFLINE

    def test_targets_within_both_bounds(self):
        gate = self.gate(a={"floors": {"tpot_ms": 40}, "ceilings": {"ttft_ms": 900}})
        wish = Wish(slo={"ttft_slo_ms": 5000, "tpot_slo_ms": 1, "deadline_s": 0.001})
        assert gate.grant(wish, bearer("a")).slo == Slo(ttft_s=0.9, tpot_s=0.04, deadline_s=0.25)
        assert gate.grant(wish, {}).slo == Slo(ttft_s=5.0, tpot_s=0.0125, deadline_s=0.25)


def test_the_flag_wins_over_the_environment(monkeypatch):
    from cosched.cli import parse
    from cosched.engine.options import ServeOptions, config_from

    monkeypatch.setenv("COSCHED_CONFIG", '{"claims": {"floor_ratio": 0.5, "ignore": ["priority"]}}')
    assert config_from(parse(ServeOptions, [])).claims.floor_ratio == 0.5
    words = ["--cosched-claims", '{"floor_ratio": 0.1}']
    config = config_from(parse(ServeOptions, words))
    assert config.claims.floor_ratio == 0.1 and config.claims.ignore == ()
    flags = ["--cosched-claims", '{"ceilings": {"tpot_ms": 20}}', "--cosched-slo-tpot-ms", "200"]
    with pytest.raises(ConfigError, match="tpot_slo_ms: the floor 50 is above the ceiling 20"):
        config_from(parse(ServeOptions, flags))


def test_narrower_targets_of_a_key_leave_its_hints_alone():
    from types import SimpleNamespace

    from cosched.server.front import Front

    given = claims(keys={"a": {"floors": {"tpot_ms": 40}}})
    front = Front(Config(claims=given))
    own = {"tpot_slo_ms": 5, "output_tokens_hint": 120}
    obj = SimpleNamespace(
        priority=None, sampling_params={"custom_params": {"cosched": own, "other": 1}}
    )
    front.apply(obj, SimpleNamespace(headers=bearer("a"), state=SimpleNamespace()))
    granted = obj.sampling_params["custom_params"]
    assert granted["cosched"] == {"tpot_slo_ms": 40.0, "output_tokens_hint": 120}
    assert granted["other"] == 1
