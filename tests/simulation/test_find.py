"""Searching for a boundary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.errors import ConfigError
from cosched.simulation.find import QUESTIONS, find, search
from cosched.simulation.run import RunSpec
from cosched.simulation.scenario import scenario


@given(
    boundary=st.floats(1.5, 900),
    least=st.booleans(),
    at_once=st.integers(1, 4),
    tolerance=st.sampled_from([0.01, 0.1]),
)
def test_the_boundary_is_found_to_the_tolerance(boundary, least, at_once, tolerance):
    tried = []

    def probe(values):
        tried.extend(values)
        return [value >= boundary if least else value <= boundary for value in values]

    found = search(
        probe, 1.0, 1000.0, least=least, is_integer=False, tolerance=tolerance, num_at_once=at_once
    )
    assert probe([found]) == [True]
    assert abs(found - boundary) <= tolerance * max(found, boundary) * 1.01
    assert len(tried) < 80


@given(boundary=st.integers(1, 64), at_once=st.integers(1, 3))
def test_counts_are_found_exactly(boundary, at_once):
    def probe(values):
        assert all(value == int(value) for value in values)
        return [value >= boundary for value in values]

    found = search(
        probe, 1.0, 64.0, least=True, is_integer=True, tolerance=1e-9, num_at_once=at_once
    )
    assert found == boundary


def test_no_answer_and_any_answer():
    def search_with(answer):
        return search(
            lambda values: [answer] * len(values),
            1.0,
            10.0,
            least=True,
            is_integer=False,
            tolerance=0.1,
        )

    assert search_with(False) is None
    assert search_with(True) == 1.0


def test_bad_questions_are_refused_before_anything_runs():
    spec = RunSpec(scenario=scenario("s0"))
    with pytest.raises(ConfigError, match=r"unknown question 'x'; choose from max-offline"):
        find("x", spec)
    with pytest.raises(ConfigError, match="name --online"):
        find("max-online-rate", spec)
    with pytest.raises(ConfigError, match=r"attainment is 1\.5"):
        find("min-kv", spec, attainment=1.5)
    assert set(QUESTIONS) == {"min-kv", "min-gpus", "max-offline", "max-online-rate"}
