"""Verdicts: met, missed, not yet decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import Slo
from cosched.lab.metrics.slo import (
    Attainment,
    JctTarget,
    Verdict,
    judge,
    with_defaults,
)
from tests.lab.metrics.samples import request, requests, slos

MET, MISSED, UNDECIDED = Verdict.MET, Verdict.MISSED, Verdict.UNDECIDED
BOTH = Slo(ttft_s=1.0, tpot_s=0.05)


def verdicts(record, slo=BOTH, now_s=100.0, **more):
    judgement = judge(record, slo, now_s=now_s, **more)
    return judgement.ttft, judgement.tpot, judgement.joint


def test_a_target_that_is_just_met_is_met():
    assert verdicts(request(0.0, (1.0, 1.05))) == (MET, MET, MET)
    # 0.3 - 0.1 and 0.2 differ in their last bit.
    assert verdicts(request(0.1, (0.3,)), Slo(ttft_s=0.2))[0] is MET


def test_joint_needs_all():
    assert verdicts(request(0.0, (1.25, 1.26))) == (MISSED, MET, MISSED)
    assert verdicts(request(0.0, (0.5, 1.5))) == (MET, MISSED, MISSED)


def test_a_single_token_meets_tpot():
    assert verdicts(request(0.0, (0.5,))) == (MET, MET, MET)


def test_a_failed_request_missed_whatever_it_got_in_time():
    assert verdicts(request(0.0, (0.5, 0.51), ok=False)) == (MISSED, MISSED, MISSED)
    assert verdicts(request(0.0, ok=False)) == (MISSED, MISSED, MISSED)


@pytest.mark.parametrize(("now_s", "verdict"), [(1.0, UNDECIDED), (1.01, MISSED)])
def test_an_unanswered_request_missed_ttft_once_it_is_late(now_s, verdict):
    assert verdicts(request(0.0), now_s=now_s) == (verdict, UNDECIDED, verdict)


@pytest.mark.parametrize(("now_s", "verdict"), [(0.65, UNDECIDED), (0.66, MISSED)])
def test_an_open_reply_missed_tpot_once_its_next_token_is_late(now_s, verdict):
    # Three tokens after the first at 0.5 s: the fourth is due at 0.5 + 3 * 0.05 s.
    record = request(0.0, (0.5, 0.51, 0.52), finish_s=None)
    assert verdicts(record, now_s=now_s) == (MET, verdict, verdict)


def test_deadline():
    slo = Slo(deadline_s=10.0)
    assert judge(request(5.0, (6.0, 15.0)), slo, now_s=99.0).deadline is MET
    assert judge(request(5.0, (6.0, 15.5)), slo, now_s=99.0).deadline is MISSED
    assert judge(request(5.0), slo, now_s=15.0).deadline is UNDECIDED
    assert judge(request(5.0), slo, now_s=15.5).deadline is MISSED


def test_jct_target_grows_with_the_reply():
    target = JctTarget(prompt_s=0.5, token_s=0.25, scale=2.0)
    assert target.limit_s(4) == 3.0
    two_tokens = request(0.0, (1.0, 2.0))
    assert judge(two_tokens, Slo(), now_s=99.0, jct_target=target).jct is MET
    assert judge(request(0.0, (1.0, 2.25)), Slo(), now_s=99.0, jct_target=target).jct is MISSED
    still_open = replace(two_tokens, finish_s=None)
    assert judge(still_open, Slo(), now_s=2.5, jct_target=target).jct is UNDECIDED
    assert judge(still_open, Slo(), now_s=2.75, jct_target=target).jct is MISSED


@given(requests())
def test_without_targets_there_is_no_verdict(record):
    judgement = judge(record, Slo(), now_s=100.0)
    assert {judgement.ttft, judgement.tpot, judgement.deadline, judgement.joint} == {None}


@given(requests(), slos, st.integers(0, 100))
def test_what_is_decided_stays_decided(record, slo, later_s):
    now, later = (judge(record, slo, now_s=100.0 + s) for s in (0, later_s))
    for name in ("ttft", "tpot", "deadline", "joint"):
        if getattr(now, name) is not UNDECIDED:
            assert getattr(later, name) is getattr(now, name)


def test_defaults_fill_in_what_a_request_does_not_bring():
    own = Slo(ttft_s=2.0)
    assert with_defaults(own, Slo(ttft_s=1.0, tpot_s=0.1)) == Slo(ttft_s=2.0, tpot_s=0.1)


def test_attainment_leaves_out_the_undecided():
    attainment = Attainment.of([MET, MISSED, MISSED, MET, MET, UNDECIDED, None])
    assert attainment == Attainment(num_met=3, num_missed=2, num_undecided=1, ratio=0.6)
    assert Attainment.of([UNDECIDED, None]).ratio is None
