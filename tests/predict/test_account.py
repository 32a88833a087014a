"""What requests cost: shares of the measured time of iterations."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import BatchShape, Prefill
from cosched.core.request import PLAIN, RequestClass
from cosched.predict.account import MOST_NAMES, Account
from cosched.predict.calibration import cold_start_s


def requests_of(account, shape, *, names=("a", "b"), ended=()):
    num = len(shape.prefills) + len(shape.decodes)
    return [
        SimpleNamespace(
            device_s=0.0,
            payer=account.payer(names[i % len(names)], RequestClass.OFFLINE),
            is_ended=i in ended,
            traits=PLAIN,
        )
        for i in range(num)
    ]


def charge(shape, seconds=1.0, *, predict_s=cold_start_s, **options):
    account = Account(predict_s)
    requests = requests_of(account, shape, **options)
    account.charge(requests, shape, seconds)
    return [request.device_s for request in requests], account


prefills = st.lists(st.builds(Prefill, st.integers(1, 9000), st.integers(0, 30_000)), max_size=6)
decodes = st.lists(st.integers(1, 40_000), max_size=40)
coefficients = st.lists(st.floats(-1e-3, 1e-3), min_size=7, max_size=7)


@given(
    prefills,
    decodes,
    coefficients,
    st.just(0.0) | st.floats(1e-9, 100),
    st.sets(st.integers(0, 45)),
)
def test_whatever_is_predicted_the_shares_add_up_to_the_measured_time(
    prefills, decodes, coefficients, seconds, ended
):
    def predict_s(t):
        totals = (t.num_prefills, t.num_new, t.num_cached, t.double_pairs, t.double_tail_pairs)
        values = (*totals, t.num_decodes, t.decode_context)
        return 1e-2 + sum(c * v for c, v in zip(coefficients, values, strict=True))

    shape = BatchShape(prefills=prefills, decodes=decodes)
    shares, account = charge(shape, seconds, predict_s=predict_s, ended=ended)
    if not shares:
        return
    assert min(shares) >= 0
    assert math.isclose(sum(shares), seconds, rel_tol=1e-12)
    assert math.isclose(sum(p.device_s for p in account.payers.values()), seconds, rel_tol=1e-12)


def test_of_a_linear_prediction_each_pays_in_proportion_to_its_marginal_cost():
    def predict_s(t):
        return 5.0 + 3.0 * t.num_prefills + 1e-3 * t.num_new + 2.0 * t.num_decodes

    shape = BatchShape(prefills=[Prefill(1000, 0), Prefill(3000, 50)], decodes=[7, 9])
    shares, _ = charge(shape, 28.0, predict_s=predict_s)
    assert shares == pytest.approx([8.0, 12.0, 4.0, 4.0])


def test_without_a_predictor_tokens_decide():
    shares, _ = charge(BatchShape(prefills=[Prefill(90, 0)], decodes=[5] * 10), predict_s=len_less)
    assert shares == pytest.approx([0.9] + [0.01] * 10)


def len_less(totals):
    return 1.0


def test_a_request_that_has_ended_pays_only_where_no_other_runs():
    shape = BatchShape(decodes=[100, 100, 100])
    assert charge(shape, ended={1})[0] == pytest.approx([0.5, 0.0, 0.5])
    assert charge(shape, ended={0, 1, 2})[0] == pytest.approx([1 / 3] * 3)


def test_long_contexts_cost_more():
    (short, long), _ = charge(BatchShape(decodes=[100, 20_000]))
    assert long > 5 * short


def test_tenants_that_clients_make_up_do_not_fill_the_memory():
    account = Account(cold_start_s)
    for i in range(3 * MOST_NAMES):
        account.payer(f"acme/{i}", RequestClass.OFFLINE).device_s += 1.0
    assert len(account.payers) <= MOST_NAMES + 1
    assert sum(account.by_class()["offline"].values()) == 3 * MOST_NAMES
