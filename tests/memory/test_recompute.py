"""What may be computed anew of what stops have lost."""

from hypothesis import given
from hypothesis import strategies as st

from cosched.memory.recompute import RecomputeBudget


def test_a_debt_is_paid_off_at_the_share_of_time():
    budget = RecomputeBudget(share=0.1, most_s=2.0)
    budget.pay(2.0, 10.0)
    assert budget.debt_s(10.0) == 0.0
    budget.pay(3.0, 10.0)
    assert budget.debt_s(10.0) == 3.0
    assert abs(budget.debt_s(25.0) - 1.5) < 1e-9
    assert budget.debt_s(45.0) == 0.0
    budget.pay(4.0, 1000.0)
    assert budget.debt_s(1000.0) == 2.0, "what was not used is saved up to the most"


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 3.0)), max_size=60),
    st.floats(0.01, 1.0),
    st.floats(0.0, 10.0),
)
def test_who_pays_only_without_debt_never_spends_more_than_the_share(steps, share, most_s):
    budget = RecomputeBudget(share=share, most_s=most_s)
    now_s = paid_s = 0.0
    for wait_s, seconds in steps:
        now_s += wait_s
        if budget.debt_s(now_s) == 0.0:
            budget.pay(seconds, now_s)
            paid_s += seconds
            # One payment may overdraw it.
            assert paid_s <= most_s + share * now_s + seconds + 1e-6
