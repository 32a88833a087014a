"""Verdicts: met, missed, not yet decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import Slo
from cosched.lab.metrics.slo import Attainment, JctTarget, Verdict, judge, with_defaults
from tests.lab.metrics.samples import request, requests, slos

MET, MISSED, UNDECIDED = Verdict.MET, Verdict.MISSED, Verdict.UNDECIDED

# Three tokens after the first at 0.5 s: the fourth is due at 0.5 + 3 * 0.05 s.
OPEN = request(0.0, (0.5, 0.51, 0.52), finish_s=None)


@pytest.mark.parametrize(
    ("record", "now_s", "verdicts"),
    [
        (request(0.0, (1.0, 1.05)), 100.0, (MET, MET, MET)),  # a target that is just met is met
        (request(0.0, (1.25, 1.26)), 100.0, (MISSED, MET, MISSED)),
        (request(0.0, (0.5, 1.5)), 100.0, (MET, MISSED, MISSED)),
        (request(0.0, (0.5,)), 100.0, (MET, MET, MET)),
        # A failed request missed, whatever it got in time.
        (request(0.0, (0.5, 0.51), ok=False), 100.0, (MISSED, MISSED, MISSED)),
        (request(0.0, ok=False), 100.0, (MISSED, MISSED, MISSED)),
        # An unanswered one missed TTFT once it is late, an open reply TPOT once a token is.
        (request(0.0), 1.0, (UNDECIDED, UNDECIDED, UNDECIDED)),
        (request(0.0), 1.01, (MISSED, UNDECIDED, MISSED)),
        (OPEN, 0.65, (MET, UNDECIDED, UNDECIDED)),
        (OPEN, 0.66, (MET, MISSED, MISSED)),
    ],
)
def test_ttft_tpot_and_both(record, now_s, verdicts):
    judgement = judge(record, Slo(ttft_s=1.0, tpot_s=0.05), now_s=now_s)
    assert (judgement.ttft, judgement.tpot, judgement.joint) == verdicts


def test_rounding_does_not_miss_a_target():
    # 0.3 - 0.1 and 0.2 differ in their last bit.
    assert judge(request(0.1, (0.3,)), Slo(ttft_s=0.2), now_s=100.0).ttft is MET


@pytest.mark.parametrize(
    ("record", "now_s", "verdict"),
    [
        (request(5.0, (6.0, 15.0)), 99.0, MET),
        (request(5.0, (6.0, 15.5)), 99.0, MISSED),
        (request(5.0), 15.0, UNDECIDED),
        (request(5.0), 15.5, MISSED),
    ],
)
def test_deadline(record, now_s, verdict):
    assert judge(record, Slo(deadline_s=10.0), now_s=now_s).deadline is verdict


def test_jct_target_grows_with_the_reply():
    target = JctTarget(prompt_s=0.5, token_s=0.25, scale=2.0)
    assert target.limit_s(4) == 3.0
    two_tokens = request(0.0, (1.0, 2.0))
    assert judge(two_tokens, Slo(), now_s=99.0, jct_target=target).jct is MET
    assert judge(request(0.0, (1.0, 2.25)), Slo(), now_s=99.0, jct_target=target).jct is MISSED
    still_open = replace(two_tokens, finish_s=None)
    assert judge(still_open, Slo(), now_s=2.5, jct_target=target).jct is UNDECIDED
    assert judge(still_open, Slo(), now_s=2.75, jct_target=target).jct is MISSED


@given(requests(), slos, st.integers(0, 100))
def test_what_is_decided_stays_decided_and_without_targets_nothing_is(record, slo, later_s):
    now, later = (judge(record, slo, now_s=100.0 + s) for s in (0, later_s))
    without = judge(record, Slo(), now_s=100.0)
    for name in ("ttft", "tpot", "deadline", "joint"):
        if getattr(now, name) is not UNDECIDED:
            assert getattr(later, name) is getattr(now, name)
        assert getattr(without, name) is None


def test_defaults_fill_in_what_a_request_does_not_bring():
    own = Slo(ttft_s=2.0)
    assert with_defaults(own, Slo(ttft_s=1.0, tpot_s=0.1)) == Slo(ttft_s=2.0, tpot_s=0.1)


def test_attainment_leaves_out_the_undecided():
    attainment = Attainment.of([MET, MISSED, MISSED, MET, MET, UNDECIDED, None])
    assert attainment == Attainment(num_met=3, num_missed=2, num_undecided=1, ratio=0.6)
    assert Attainment.of([UNDECIDED, None]).ratio is None
