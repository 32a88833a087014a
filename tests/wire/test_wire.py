"""Classes and targets on the wire: the pure part."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched import wire
from cosched.core.request import RequestClass, Slo
from cosched.errors import RequestError
from cosched.limits.sequences import asked

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
targets = st.dictionaries(st.sampled_from(sorted(wire.SLO_FIELDS)), st.integers(1, 10**6))


def wish(body=None, *, tiers=wire.SERVICE_TIERS, ignored=frozenset(), **headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return wire.parse_http(body, names, tiers=tiers, ignored=ignored)


def error(body=None, *, tiers=wire.SERVICE_TIERS, **headers) -> RequestError:
    with pytest.raises(RequestError) as caught:
        wish(body, tiers=tiers, **headers)
    assert str(caught.value).startswith(f"{caught.value.field}: ")
    return caught.value


def request_class(body, **kwargs) -> RequestClass:
    """As the scheduler sees it, for an endpoint that passes the body's priority on."""
    said = wish(body, **kwargs)
    return wire.class_of_priority(wire.priority_for(said, body.get("priority")))


ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


class TestClass:
    def test_default_is_online_and_leaves_the_priority_alone(self):
        assert wish({}) == wire.Wish()
        assert wire.priority_for(wire.Wish(), None) is None

    @pytest.mark.parametrize("tier", sorted(set(wire.SERVICE_TIERS) - {"flex"}))
    def test_a_tier_that_says_nothing_leaves_it_to_the_priority(self, tier):
        assert wire.SERVICE_TIERS[tier] is None
        assert request_class({"service_tier": tier, "priority": -2}) is OFFLINE
        assert wire.priority_for(wish({"service_tier": tier}), None) is None

    @pytest.mark.parametrize(
        ("body", "headers", "field"),
        [
            *(({"service_tier": t}, {}, "service_tier") for t in ("Flex", "", 5, True, ["flex"])),
            *(({"priority": p}, {}, "priority") for p in ("-5", -5.0, True, [-5], {"class": 1})),
            *(({}, {"x_smg_priority": v}, "x-smg-priority") for v in ("", "low", "-1")),
            *(
                ({}, {"x_vllm_priority": v}, "x-vllm-priority")
                for v in ("", "low", "1.5", "1_000", "٣", "1" * 19)
            ),
            *(({"custom_params": v}, {}, "custom_params") for v in (5, "x", [1], False)),
            ({"custom_params": {"cosched": 5}}, {}, "custom_params.cosched"),
        ],
    )
    def test_a_wrong_kind_of_value_is_refused_by_its_field(self, body, headers, field):
        assert error(body, **headers).field == field

    @given(st.integers())
    def test_sign_of_the_priority_is_the_class(self, priority):
        body = {"priority": priority}
        assert request_class(body) is (OFFLINE if priority < 0 else ONLINE)
        assert wire.priority_for(wish(body), priority) == priority

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

    @pytest.mark.parametrize(
        ("value", "priority"), [("0", 0), ("1", -1), ("10", -10), (" +3 ", -3), ("-5", 5)]
    )
    def test_vllms_priority_changes_its_sign_and_stands_before_the_bodys(self, value, priority):
        """There lower is earlier; llm-d's router negates priorities for vLLM alike."""
        for body in ({}, {"priority": 7}, {"priority": -7}, {"service_tier": "priority"}):
            said = wish(body, x_vllm_priority=value)
            assert wire.priority_for(said, body.get("priority")) == priority
            assert wire.priority_for(said, None) == priority and said.tier is None
        assert wire.parse_http(None, {"x-vllm-priority": value}).gateway_priority == priority

    def test_one_sign_of_offline_is_enough_beside_vllms_priority(self):
        for body, headers in (
            ({"service_tier": "flex"}, {}),
            ({"service_tier": "flex", "priority": 3}, {}),
            ({}, {"x_smg_priority": "bulk"}),
        ):
            assert request_class(body, x_vllm_priority="-1", **headers) is OFFLINE


class TestTargets:
    @pytest.mark.parametrize("value", ["", "abc", "5ms", "1_000", "0", "-1", "nan", "inf", "1e999"])
    @pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
    def test_wrong_header(self, header, value):
        assert error({}, **{header.replace("-", "_"): value}).field == header

    @given(targets)
    def test_body_of_openai(self, params):
        assert wish({"custom_params": {"cosched": params, "other": 1}}).slo == params

    @pytest.mark.parametrize("key", sorted(wire.SLO_FIELDS))
    @pytest.mark.parametrize("value", [0, -1, "5", True, None, float("nan"), 10**400, [1]])
    def test_wrong_value_names_the_key(self, key, value):
        params = {"custom_params": {"cosched": {key: value}}}
        assert error(params).field == f"custom_params.cosched.{key}"
        field = error({"sampling_params": params}).field
        assert field == f"sampling_params.custom_params.cosched.{key}"
        field = error({"sampling_params": [{}, params]}).field
        assert field == f"sampling_params[1].custom_params.cosched.{key}"

    @pytest.mark.parametrize("value", [0, -1, "5", True, None, 1.5, float("nan"), 2**31, [1]])
    def test_a_wrong_hint_is_named(self, value):
        params = {"custom_params": {"cosched": {"output_tokens_hint": value, "deadline_s": 5}}}
        assert error(params).field == "custom_params.cosched.output_tokens_hint"
        field = error({"sampling_params": params}).field
        assert field == "sampling_params.custom_params.cosched.output_tokens_hint"
        assert wire.hint_of_params(params["custom_params"]) is None

    def test_a_hint_is_read_and_is_no_target(self):
        custom = {"cosched": {"output_tokens_hint": 120, "ttft_slo_ms": 500}}
        assert wire.hint_of_params(custom) == 120
        assert wire.slo_of_params(custom) == Slo(ttft_s=0.5)
        targets = {"ttft_slo_ms": 500, "tpot_slo_ms": 20, "deadline_s": 60}
        expected = Slo(ttft_s=0.5, tpot_s=0.02, deadline_s=60.0)
        assert wire.slo_of_params({"cosched": targets}) == expected
        assert wish({"custom_params": custom}).slo == custom["cosched"]

    @pytest.mark.parametrize("custom", [None, {}, {"cosched": None}, {"cosched": 5}, 5, "x"])
    def test_no_hint_where_nothing_is_said(self, custom):
        assert wire.hint_of_params(custom) is None

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


WRONG = {
    "service_tier": ({"service_tier": "x"}, {}),
    "priority": ({"priority": "x"}, {}),
    "class_header": ({}, {"x_smg_priority": "x"}),
    "priority_header": ({}, {"x_vllm_priority": "x"}),
    "target_headers": ({}, {"x_slo_ttft_ms": "x", "x_slo_tpot_ms": "x"}),
    "body_targets": (
        {"custom_params": {"cosched": 1}, "sampling_params": {"custom_params": 1}},
        {},
    ),
}
OFFLINE_BY = {
    "service_tier": ({"service_tier": "flex"}, {}),
    "priority": ({"priority": -1}, {}),
    "class_header": ({}, {"x_smg_priority": "bulk"}),
    "priority_header": ({}, {"x_vllm_priority": "1"}),
}


class TestIgnoredSigns:
    """What is ignored is not even checked: to the client it is a server without it."""

    @pytest.mark.parametrize("sign", sorted(wire.SIGNS))
    def test_wrong_values(self, sign):
        body, headers = WRONG[sign]
        error(body, **headers)
        assert wish(body, ignored={sign}, **headers) == wire.Wish()

    @pytest.mark.parametrize("sign", sorted(OFFLINE_BY))
    def test_class(self, sign):
        body, headers = OFFLINE_BY[sign]
        assert wish(body, **headers).request_class is OFFLINE
        assert wish(body, ignored={sign}, **headers).request_class is ONLINE

    def test_the_others_are_read(self):
        body = {"service_tier": "flex", "priority": 3, "custom_params": {"cosched": {"x": 1}}}
        said = wish(body, ignored={"priority", "body_targets"}, x_slo_ttft_ms="5")
        assert said.request_class is OFFLINE and said.slo == {"ttft_slo_ms": 5.0}


class TestOneClassOnly:
    @pytest.mark.parametrize("priority", [None, -3, 0, 4])
    @pytest.mark.parametrize("offline", [False, True])
    @pytest.mark.parametrize("only", [ONLINE, OFFLINE])
    def test_whatever_it_says(self, only, offline, priority):
        said = wire.Wish(offline=offline, priority=priority, only=only)
        assert said.request_class is only
        sent = wire.priority_for(said, priority)
        assert wire.class_of_priority(sent) is only
        if priority is not None and not offline and wire.class_of_priority(priority) is only:
            assert sent == priority


class TestBounds:
    BOUNDS = wire.Bounds(floors=Slo(ttft_s=0.2, tpot_s=0.01), ceilings=Slo(ttft_s=5.0))

    def test_tighter_is_raised_and_looser_lowered(self):
        assert self.BOUNDS.clamp(Slo(ttft_s=0.001, tpot_s=1e-9)) == Slo(ttft_s=0.2, tpot_s=0.01)
        assert self.BOUNDS.clamp(Slo(ttft_s=1e9, tpot_s=1e9)) == Slo(ttft_s=5.0, tpot_s=1e9)

    @given(st.floats(0.2, 5), st.none() | st.floats(0.01, 1e9), st.none() | st.floats(1e-9, 1e9))
    def test_within_them_nothing_changes(self, ttft_s, tpot_s, deadline_s):
        slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s, deadline_s=deadline_s)
        assert self.BOUNDS.clamp(slo) == slo

    def test_what_is_not_named_stays_unnamed(self):
        assert self.BOUNDS.clamp(Slo()) == Slo()
        assert not wire.Bounds().is_bounding and self.BOUNDS.is_bounding


@given(json_values)
def test_any_body_is_read_or_refused_by_name(body):
    before = repr(body)
    assert all(asked(route, body) >= 1 for route in ("/generate", "/encode", "/v1/completions"))
    try:
        wish(body)
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
