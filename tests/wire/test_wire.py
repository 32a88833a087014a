"""Classes and targets on the wire: the pure part."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core import wire
from cosched.core.request import RequestClass, Slo
from cosched.errors import RequestError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
targets = st.dictionaries(st.sampled_from(sorted(wire.SLO_FIELDS)), st.integers(1, 10**6))


def wish(body=None, *, openai=True, **headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return wire.parse_http(body, names, has_service_tier=openai)


def error(body=None, *, openai=True, **headers) -> RequestError:
    with pytest.raises(RequestError) as caught:
        wish(body, openai=openai, **headers)
    assert str(caught.value).startswith(f"{caught.value.field}: ")
    return caught.value


def request_class(body, *, openai=True, **headers) -> RequestClass:
    """As the scheduler sees it, for an endpoint that passes the body's priority on."""
    said = wish(body, openai=openai, **headers)
    return wire.class_of_priority(wire.priority_for(said, body.get("priority")))


ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


class TestClass:
    def test_default_is_online_and_leaves_the_priority_alone(self):
        assert wish({}) == wire.Wish()
        assert wire.priority_for(wire.Wish(), None) is None

    @pytest.mark.parametrize("tier", ["auto", "default", "priority", "scale", None])
    def test_other_tiers_are_online(self, tier):
        assert request_class({"service_tier": tier}) is ONLINE

    def test_flex_is_offline(self):
        said = wish({"service_tier": "flex"})
        assert wire.priority_for(said, None) == wire.OFFLINE_PRIORITY < 0

    def test_flex_keeps_a_negative_priority_of_its_own(self):
        body = {"service_tier": "flex", "priority": -3}
        assert wire.priority_for(wish(body), -3) == -3

    def test_service_tier_belongs_to_openai_endpoints(self):
        for tier in ("flex", "standard_only", 5):
            assert request_class({"service_tier": tier}, openai=False) is ONLINE

    @pytest.mark.parametrize("tier", ["Flex", "batch", "", 5, True, ["flex"], {"flex": 1}])
    def test_unknown_tier(self, tier):
        found = error({"service_tier": tier})
        assert found.field == "service_tier"
        assert "choose from auto, default, flex, priority, scale" in str(found)

    @pytest.mark.parametrize("priority", [0, 7])
    def test_flex_against_an_online_priority_names_both(self, priority):
        found = error({"service_tier": "flex", "priority": priority})
        assert found.field == "service_tier"
        assert f"priority {priority}" in str(found) and "'flex'" in str(found)

    @given(st.integers())
    def test_sign_of_the_priority_is_the_class(self, priority):
        body = {"priority": priority}
        for openai in (True, False):
            assert request_class(body, openai=openai) is (OFFLINE if priority < 0 else ONLINE)
        assert wire.priority_for(wish(body), priority) == priority

    @pytest.mark.parametrize("priority", ["-5", -5.0, True, [-5], {"class": "offline"}, "high"])
    def test_priority_must_be_an_integer(self, priority):
        assert error({"priority": priority}, openai=False).field == "priority"

    def test_an_endpoint_that_drops_the_priority_does_not_lose_it(self):
        assert wire.priority_for(wish({"priority": -5}), None) == -5

    def test_an_override_header_of_sglang_wins_over_the_body(self):
        assert wire.priority_for(wish({"priority": -5}), 4) == 4
        assert wire.priority_for(wish({"service_tier": "flex"}), 4) == wire.OFFLINE_PRIORITY

    @pytest.mark.parametrize("value", ["bulk", "BULK", "  Bulk "])
    def test_bulk_is_offline_whatever_the_body_says(self, value):
        for body in ({}, {"service_tier": "auto"}, {"priority": 3}, {"priority": -3}):
            assert request_class(body, x_smg_priority=value) is OFFLINE
        assert wire.priority_for(wish({"priority": -3}, x_smg_priority=value), -3) == -3

    @pytest.mark.parametrize("value", ["system", "interactive", "Default"])
    def test_other_classes_of_the_gateway_are_online(self, value):
        assert request_class({}, x_smg_priority=value) is ONLINE
        assert request_class({"priority": -1}, x_smg_priority=value) is OFFLINE

    @pytest.mark.parametrize("value", ["", "low", "-1"])
    def test_unknown_gateway_class(self, value):
        found = error({}, x_smg_priority=value)
        assert found.field == "x-smg-priority"
        assert "choose from bulk, default, interactive, system" in str(found)


class TestTargets:
    def test_headers(self):
        said = wish(None, x_slo_ttft_ms="500", x_slo_tpot_ms=" 20.5 ")
        assert said.slo == {"ttft_slo_ms": 500.0, "tpot_slo_ms": 20.5}

    @pytest.mark.parametrize("value", ["", "abc", "5ms", "1_000", "0", "-1", "nan", "inf", "1e999"])
    @pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
    def test_wrong_header(self, header, value):
        assert error({}, **{header.replace("-", "_"): value}).field == header

    @given(targets)
    def test_body_of_openai(self, params):
        assert wish({"custom_params": {"cosched": params, "other": 1}}).slo == params

    def test_body_wins_over_headers(self):
        body = {"custom_params": {"cosched": {"ttft_slo_ms": 9}}}
        said = wish(body, x_slo_ttft_ms="500", x_slo_tpot_ms="20")
        assert said.slo == {"ttft_slo_ms": 9, "tpot_slo_ms": 20.0}

    @pytest.mark.parametrize("key", sorted(wire.SLO_FIELDS))
    @pytest.mark.parametrize("value", [0, -1, "5", True, None, float("nan"), 10**400, [1]])
    def test_wrong_value_names_the_key(self, key, value):
        params = {"custom_params": {"cosched": {key: value}}}
        assert error(params).field == f"custom_params.cosched.{key}"
        field = error({"sampling_params": params}).field
        assert field == f"sampling_params.custom_params.cosched.{key}"
        field = error({"sampling_params": [{}, params]}).field
        assert field == f"sampling_params[1].custom_params.cosched.{key}"

    def test_unknown_key_shows_the_choices(self):
        found = error({"custom_params": {"cosched": {"ttft_ms": 5}}})
        assert found.field == "custom_params.cosched.ttft_ms"
        assert "deadline_s, tpot_slo_ms, ttft_slo_ms" in str(found)

    @pytest.mark.parametrize("value", [5, "x", [1], False])
    def test_objects_are_needed(self, value):
        assert error({"custom_params": value}).field == "custom_params"
        found = error({"custom_params": {"cosched": value}})
        assert found.field == "custom_params.cosched"

    def test_long_values_are_not_echoed_in_full(self):
        assert len(str(error({"custom_params": "x" * 10_000}))) < 200

    @given(
        st.none()
        | st.dictionaries(st.sampled_from(["temperature", "n"]), st.integers())
        | st.lists(targets.map(lambda own: {"custom_params": {"cosched": own, "k": 1}})),
        targets,
    )
    def test_merged_without_touching_anything(self, params, slo):
        before = copy.deepcopy(params)
        merged = wire.with_slo(params, slo)
        assert params == before
        if not slo:
            assert merged is params
            return
        ones = list(zip(params, merged, strict=True)) if isinstance(params, list) else None
        for own, one in ones if ones is not None else [(params or {}, merged)]:
            custom = one["custom_params"]
            own_targets = (own.get("custom_params") or {}).get("cosched") or {}
            assert custom["cosched"] == {**slo, **own_targets}
            assert {k: v for k, v in one.items() if k != "custom_params"} == {
                k: v for k, v in own.items() if k != "custom_params"
            }
            # What the scheduler makes of it.
            assert wire.slo_of_params(custom) == wire.parse_slo(custom["cosched"])

    def test_units(self):
        params = {"ttft_slo_ms": 500, "tpot_slo_ms": 20, "deadline_s": 60}
        assert wire.slo_of_params({"cosched": params}) == Slo(
            ttft_s=0.5, tpot_s=0.02, deadline_s=60.0
        )


@given(json_values, st.booleans())
def test_any_body_is_read_or_refused_by_name(body, openai):
    before = repr(body)
    try:
        wish(body, openai=openai)
    except RequestError as found:
        assert found.field.split(".")[0].split("[")[0] in {
            "custom_params",
            "priority",
            "sampling_params",
            "service_tier",
        }
    assert repr(body) == before


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "priority": json_values,
            "service_tier": json_values | st.sampled_from(sorted(wire.SERVICE_TIERS)),
            "custom_params": json_values,
            "sampling_params": json_values,
        },
    ),
    st.text(max_size=8) | st.sampled_from(sorted(wire.GATEWAY_PRIORITIES)),
    st.text(max_size=8) | st.floats().map(str),
)
def test_what_is_let_through_is_valid(body, gateway, target):
    try:
        said = wish(body, x_smg_priority=gateway, x_slo_ttft_ms=target)
    except RequestError:
        return
    assert said.priority is None or type(said.priority) is int
    wire.parse_slo(said.slo)
    assert json.loads(json.dumps(dict(said.slo))) == dict(said.slo)
    merged = wire.with_slo({}, said.slo)
    assert wire.slo_of_params(merged["custom_params"]).ttft_s > 0
