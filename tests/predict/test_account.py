"""What requests cost: shares of the measured time of iterations."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import BatchShape, BatchTotals, Prefill
from cosched.core.request import PLAIN, RequestClass
from cosched.predict.calibration import cold_start_s
from cosched.predict.cost_account import MOST_DEBTS, MOST_NAMES, Account


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


@pytest.mark.parametrize(("token_s", "each_s"), [(2e-3, 0.0), (0.0, 0.1)])
def test_an_image_is_paid_for_by_its_request(token_s, each_s):
    def predict_s(t):
        tokens_s = 1e-3 * (t.num_new + t.num_decodes)
        return tokens_s + token_s * t.num_encoded + each_s * t.num_encodings

    shape = BatchShape(prefills=[Prefill(100, 0)] * 2, decodes=[7], encoded=[0, 50])
    shares, _ = charge(shape, 3.01, predict_s=predict_s)
    assert shares == pytest.approx([1.0, 2.0, 0.01])


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
    """Those without a new request for longest are counted with their key, which loses nothing."""
    account = Account(cold_start_s)
    payers = []
    for i in range(3 * MOST_NAMES):
        payers.append(account.payer(f"acme/{i}", RequestClass.OFFLINE))
        payers[-1].pay(1.0)
        account.payer("bob/kept", RequestClass.OFFLINE).pay(1.0)
    payers[0].pay(5.0)  # of a request that still runs
    assert len(account.payers) <= MOST_NAMES + 1
    found = account.by_class()["offline"]
    assert found["acme"] == 2 * MOST_NAMES + 6 and found[f"acme/{3 * MOST_NAMES - 1}"] == 1.0
    assert found["bob/kept"] == 3 * MOST_NAMES
    assert sum(found.values()) == 6 * MOST_NAMES + 5


# --- Cached prefixes ---


def linear(totals):
    return 0.01 + 0.001 * totals.num_new + 0.002 * totals.num_decodes


class Prefix(SimpleNamespace):
    """Nodes of 500 tokens each, as a radix tree keeps them."""

    def __init__(self, num_nodes):
        nodes = [
            SimpleNamespace(start=500 * i, end=500 * i + 500, keys=frozenset())
            for i in range(num_nodes)
        ]
        super().__init__(nodes=nodes, path=nodes[::-1])


def decode_together(account, names, seconds):
    requests = requests_of(account, BatchShape(decodes=[9] * len(names)), names=names)
    account.charge(requests, BatchShape(decodes=[9] * len(names)), seconds)
    return [request.device_s for request in requests]


def costs_of(account):
    return {name: payer.device_s for (name, _), payer in account.payers.items()}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 4))
        | st.lists(st.sampled_from(["a", "b", "b/x", "c"]), min_size=1, max_size=6),
        max_size=40,
    ),
    st.booleans(),
)
def test_whoever_shares_prefixes_shares_add_up_and_no_counter_falls(steps, is_one_key):
    account, alone, prefix = Account(linear), Account(linear), Prefix(4)
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            key = "a" if is_one_key else step[0]
            path = prefix.nodes[: step[1]][::-1]
            account.reused(key, path)
            account.computed(key, path)
            continue
        names, before = ["a"] * len(step) if is_one_key else step, costs_of(account)
        shares = decode_together(account, names, 0.1 * number)
        assert min(shares) >= 0
        assert math.isclose(sum(shares), 0.1 * number, rel_tol=1e-9)
        assert all(s >= before.get(name, 0) for name, s in costs_of(account).items())
        equal = decode_together(alone, names, 0.1 * number)
        if is_one_key:
            assert shares == equal
    total_s = sum(costs_of(account).values())
    assert math.isclose(total_s, sum(costs_of(alone).values()), rel_tol=1e-9)
    assert all(owed_s > 0 for owed_s in account._debts.values())
    assert not any(pair[::-1] in account._debts for pair in account._debts)


@pytest.mark.parametrize("first", "ab")
@pytest.mark.parametrize("num_nodes", [1, 4])
def test_two_keys_pay_half_of_a_prefix_each_whoever_came_first(first, num_nodes):
    second = "b" if first == "a" else "a"
    account, prefix = Account(linear), Prefix(num_nodes)
    shape = BatchShape(prefills=[Prefill(500 * num_nodes, 0)])
    account.charge(requests_of(account, shape, names=[first]), shape, linear(BatchTotals.of(shape)))
    account.computed(first, prefix.path)
    for _ in range(3):  # what a key has paid for once costs it nothing later
        account.reused(second, prefix.path)
        account.reused(first, prefix.path)
    for _ in range(200):
        decode_together(account, [first, second], 0.015)
    costs = costs_of(account)
    assert costs["a"] == pytest.approx(costs["b"], rel=0.01)
    assert not account._debts


def test_each_further_key_pays_as_much_as_those_before_it():
    account, prefix = Account(linear), Prefix(2)
    account.computed("a", prefix.path)
    for name in "bcd":
        account.reused(name, prefix.path)
        for _ in range(20):
            decode_together(account, "abcd", 1.0)
    spent = costs_of(account)
    prefix_s = 1.0 - 0.001
    assert spent["a"] == pytest.approx(20 * 3 / 4 - prefix_s * 3 / 4, rel=1e-3)
    assert spent["b"] == pytest.approx(spent["d"], rel=1e-3)


def test_mutual_debts_cancel_and_the_ledger_is_bounded():
    account, one, other = Account(linear), Prefix(1), Prefix(1)
    account.computed("a", one.path)
    account.computed("b", other.path)
    account.reused("a", other.path)
    account.reused("b", one.path)
    assert not account._debts
    for i in range(MOST_DEBTS + 50):
        fresh = Prefix(1)
        account.computed("a", fresh.path)
        account.reused(f"k{i}", fresh.path)
    assert len(account._debts) == MOST_DEBTS
