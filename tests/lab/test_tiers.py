"""Tiers of the online requests of a run: drawn by parts, reported one by one."""

import pytest

from cosched.core.request import RequestClass, Slo
from cosched.lab.columns import COLUMNS
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.metrics.summary import summarize
from cosched.lab.simulation.requests import load_requests, tier_parts
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of


def test_each_request_is_of_a_tier_by_the_parts_of_the_tiers():
    online = WorkloadSpec(name="azure-like", rate=5.0, tiers="10:0.25:500:40 0:0.75")
    spec = RunSpec(setting=setting_of("cosched"), online=online, duration_s=200.0)
    requests, _ = load_requests(spec)
    high = [r for r in requests if r.priority == 10]
    assert 0.2 < len(high) / len(requests) < 0.3
    assert {r.slo for r in high} == {Slo(ttft_s=0.5, tpot_s=0.04)}
    assert {r.slo for r in requests if not r.priority} == {Slo()}
    assert load_requests(spec)[0] == requests


@pytest.mark.parametrize("text", ["10", "10:x", "10:0.5:100"])
def test_wrong_tiers(text):
    with pytest.raises(ValueError):
        tier_parts(text)


def test_attainment_of_each_tier():
    def record(rid, priority, first_s):
        return RequestRecord(
            rid=rid,
            request_class=RequestClass.ONLINE,
            arrival_s=0.0,
            num_prompt_tokens=5,
            num_output_tokens=1,
            first_token_s=first_s,
            finish_s=first_s,
            priority=priority,
        )

    slos = {RequestClass.ONLINE: Slo(ttft_s=1.0)}
    records = [record("a", 10, 0.5), record("b", 0, 0.5), record("c", 0, 2.0)]
    summary = summarize(records, default_slos=slos)
    assert [COLUMNS[f"tier {i} met %"].shown(summary) for i in (1, 2, 3)] == ["100.0", "50.0", ""]
    assert [*summary.to_dict()["tiers"]] == ["10", "0"]
    assert not summarize(records[1:], default_slos=slos).tiers
