"""The target forward size of predictors whose best rate is known."""

from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import BatchTotals
from cosched.papers.ecoserve.forward_size import LEAST, TILE, target_forward_size
from cosched.papers.hygen.predictor import HygenPredictor
from cosched.predict.calibration import Calibrator
from tests.factories import Linear


def rate(predictor, num_tokens):
    totals = BatchTotals()
    totals.add_prefill(num_tokens, 0)
    return num_tokens / predictor.predict_s(totals)


@given(fixed_s=st.floats(0.0, 0.5), token_s=st.floats(1e-5, 1e-3), longest_s=st.floats(0, 1e-4))
def test_it_is_the_least_size_that_is_nearly_as_fast_as_the_best(fixed_s, token_s, longest_s):
    predictor = Linear(fixed_s, token_s, longest_s)
    size = target_forward_size(predictor)
    enough = 0.95 * rate(predictor, 8192)
    assert size % TILE == 0 and rate(predictor, size) >= enough * (1 - 1e-9)
    assert size == LEAST or rate(predictor, size - TILE) < enough * (1 + 1e-9)


def test_without_a_fixed_cost_the_least_will_do_and_with_one_alone_only_the_largest():
    assert target_forward_size(Linear(0.0, 1e-4)) == LEAST
    assert target_forward_size(Linear(0.01, 0.0)) == 61 * TILE


def test_attention_makes_long_prompts_slower_and_the_best_is_before_that():
    slow = HygenPredictor(coefficients=(0.1, 1e-4, 0.0, 1e-7, 0.0, 0.0, 0.0))
    assert LEAST < target_forward_size(slow) < 1024


def test_a_machine_that_nobody_has_measured_has_one_too():
    assert target_forward_size(Calibrator()) == LEAST
