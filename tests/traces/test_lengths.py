"""Distributions stay in their bounds and have the means they claim."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosched_traces.datasets import DATASETS, Published
from cosched_traces.lengths import Fixed, LogNormal, Quantiles, Uniform, fit_lognormal
from cosched_traces.seeds import rng_of


@pytest.mark.parametrize(
    ("lengths", "low", "high"),
    [
        (Fixed(7), 7, 7),
        (Uniform(30, 60), 30, 60),
        (Quantiles(probabilities=(0, 0.9, 1), points=(10, 20, 1000)), 10, 1000),
        (LogNormal(mu=5, sigma=1, low=20, high=900), 20, 900),
        (LogNormal(mu=1, sigma=1, low=20, high=900), 20, 900),  # most draws fall outside
    ],
)
def test_samples_have_the_mean_and_the_bounds(lengths, low, high):
    sample = lengths.sample(rng_of(0, "test"), 20_000)
    assert sample.dtype == np.int64
    assert sample.min() >= low
    assert sample.max() <= high
    assert sample.mean() == pytest.approx(lengths.mean, rel=0.03)
    assert (sample == lengths.sample(rng_of(0, "test"), 20_000)).all()


@settings(max_examples=40, deadline=None)
@given(low=st.integers(1, 50), spread=st.floats(1.3, 20), high=st.integers(2000, 10**6))
def test_the_fit_has_the_mean_asked_for(low, spread, high):
    mean = low * spread
    fit = fit_lognormal(mean=mean, low=low, high=high)
    assert fit.mean == pytest.approx(mean, rel=1e-3)
    fit = fit_lognormal(mean=90.5, std=148.52, low=1, high=2048)
    assert (fit.mean, fit.std) == pytest.approx((90.5, 148.52), rel=1e-3)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_datasets_have_the_published_means(name):
    dataset = DATASETS[name]
    for published, lengths in (
        (dataset.prompt, dataset.prompt_lengths),
        (dataset.output, dataset.output_lengths),
    ):
        if not isinstance(published, Published):
            continue
        assert lengths.mean == pytest.approx(published.mean, rel=1e-3)
        sample = lengths.sample(rng_of(1, name), 50_000)
        assert sample.mean() == pytest.approx(published.mean, rel=0.02)
        assert published.low <= sample.min() <= sample.max() <= published.high
        if published.std is not None:
            assert sample.std() == pytest.approx(published.std, rel=0.03)
