"""Workloads in numbers."""

import pytest

from cosched.core.request import RequestClass
from cosched_traces.summary import shared_ratio, summarize
from tests.traces.samples import evenly, request, workload


def test_numbers_of_a_workload():
    made = workload(
        request("a", 0.0, prompt=((1, 30), (2, 10)), output=4),
        request("b", 2.0, prompt=((1, 30), (3, 30)), output=6, request_class=RequestClass.OFFLINE),
    )
    summary = summarize(made)
    assert (summary.num_requests, summary.num_online) == (2, 1)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (100, 10)
    assert (summary.mean_prompt_tokens, summary.max_prompt_tokens) == (50, 60)
    assert (summary.span_s, summary.mean_rate) == (2, 0.5)
    assert summary.shared_ratio == pytest.approx(0.3)
    assert summary.name == "w"


def test_no_requests_and_no_rate():
    assert summarize(workload()).mean_prompt_tokens is None
    assert summarize(evenly(2, 0.0)).mean_rate is None


def test_sharing_follows_prompts_from_the_start():
    prompts = [
        ((1, 10), (2, 10)),
        ((9, 10), (2, 10)),  # another start: nothing shared
        ((1, 6),),  # a prefix of a segment
        ((1, 10), (2, 10), (3, 10)),
    ]
    made = workload(*(request(str(i), prompt=p) for i, p in enumerate(prompts)))
    assert shared_ratio(made) == pytest.approx((6 + 20) / 76)


def test_sharing_of_given_tokens():
    ids = tuple(range(64))
    made = workload(request("a", token_ids=ids), request("b", token_ids=(*ids[:40], 99)))
    assert shared_ratio(made) == pytest.approx(32 / 105)
