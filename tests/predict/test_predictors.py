"""Every predictor: monotone, inverted exactly, fitted to what it was told; and how well they do."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import BatchShape, BatchTotals, Prefill
from cosched.errors import ConfigError
from cosched.lab.cost_models.noise import NoisyModel
from cosched.lab.cost_models.registry import make_cost_model
from cosched.lab.cost_models.sglang_defaults import default_graph_sizes
from cosched.lab.cost_models.specs import GPUS
from cosched.papers.bros.predictor import BrosPredictor
from cosched.papers.echo.predictor import EchoPredictor
from cosched.papers.hygen.predictor import HygenPredictor
from cosched.predict.fitted import PREDICTORS, GraphSizes, fit_predictor, predictor_from_dict
from tests.predict.batches import scheduler_batches
from tests.predict.test_fitted import DECODES, PREFILLS

NAMES = sorted(PREDICTORS)
GRAPHS = default_graph_sizes(GPUS["A100-80"], 1)
TRAINING = scheduler_batches(seed=1, num=1200, max_kv_tokens=400_000)
HELD_OUT = scheduler_batches(seed=2, num=400, max_kv_tokens=400_000)


def roofline(gpu="A100-80"):
    return make_cost_model("roofline", model="Llama-3.1-8B", gpu=gpu)


def fit(name, model, batches=TRAINING, **options):
    return fit_predictor(name, batches, [model.iteration_s(batch) for batch in batches], **options)


FITTED = {name: fit(name, roofline()) for name in NAMES}
# Padded to graph sizes, the prediction goes in steps.
FITTED["cosched, graphs"] = fit("cosched", roofline(), graphs=GRAPHS)


@pytest.fixture(scope="module", params=sorted(FITTED))
def predictor(request):
    return FITTED[request.param]


def totals_of(prefills, decodes):
    return BatchTotals.of(BatchShape(prefills=prefills, decodes=decodes))


def with_prefill(totals, new, cached):
    more = totals.copy()
    more.add_prefill(new, cached)
    return more


def errors(predictor, model, batches=HELD_OUT):
    return np.array(
        [predictor.predict_s(BatchTotals.of(b)) / model.iteration_s(b) - 1 for b in batches]
    )


class TestEveryPredictor:
    def test_nothing_takes_no_time(self, predictor):
        assert predictor.predict_s(BatchTotals()) == 0.0

    @given(PREFILLS, DECODES, st.integers(1, 20_000), st.integers(1, 20_000), st.integers(0, 40000))
    def test_more_prompt_tokens_are_never_cheaper(self, predictor, prefills, decodes, a, b, cached):
        totals = totals_of(prefills, decodes)
        fewer, more = (with_prefill(totals, n, cached) for n in sorted((a, b)))
        assert 0 < predictor.predict_s(fewer) <= predictor.predict_s(more)

    @given(
        PREFILLS,
        DECODES,
        st.integers(0, 40000),
        st.integers(0, 300),
        st.integers(1, 400),
        st.sampled_from([0.0, 0.5, 1 - 1e-12, 1.0, 1 + 1e-12, 1.03]),
    )
    def test_the_inverse_is_that_of_brute_force(
        self, predictor, prefills, decodes, cached, limit_tokens, near, factor
    ):
        totals = totals_of(prefills, decodes)
        before = totals.copy()
        limit_s = factor * predictor.predict_s(with_prefill(totals, near, cached))
        fits = [
            n
            for n in range(1, limit_tokens + 1)
            if predictor.predict_s(with_prefill(totals, n, cached)) <= limit_s
        ]
        assert predictor.max_prefill(totals, cached, limit_s, limit_tokens) == max(fits, default=0)
        assert totals == before

    @given(st.integers(1, 16_000), st.integers(0, 40000))
    def test_the_inverse_of_a_prediction_is_the_last_chunk_that_takes_as_long(
        self, predictor, new, cached
    ):
        totals = totals_of([Prefill(77, 5)], [700] * 30)
        limit_s = predictor.predict_s(with_prefill(totals, new, cached))
        found = predictor.max_prefill(totals, cached, limit_s, 20_000)
        assert found >= new
        assert predictor.predict_s(with_prefill(totals, found, cached)) == limit_s
        if found < 20_000:
            assert predictor.predict_s(with_prefill(totals, found + 1, cached)) > limit_s

    def test_json_gives_the_same_predictor_back(self, predictor):
        again = predictor_from_dict(json.loads(json.dumps(predictor.to_dict())))
        assert again.to_dict() == predictor.to_dict() == predictor.describe()
        for batch in HELD_OUT[:50]:
            totals = BatchTotals.of(batch)
            assert again.predict_s(totals) == predictor.predict_s(totals)

    def test_the_same_batches_fit_the_same_predictor(self, predictor):
        graphs = GRAPHS if predictor is FITTED["cosched, graphs"] else None
        assert fit(predictor.name, roofline(), graphs=graphs).to_dict() == predictor.to_dict()


@pytest.mark.parametrize(
    ("own", "tolerance"),
    [
        (HygenPredictor(coefficients=(5e-3, 3e-5, 2e-8, 1e-9, 1e-14, 4e-5, 1e-5)), 1e-3),
        (BrosPredictor(prefill=(6e-5, 1e-9, 9e-3), decode=(2e-5, 2e-10, 8e-3)), 1e-3),
        # Of the lengths between which the floor may end, none need be its very end.
        (
            EchoPredictor(prefill=(1e-9, 6e-5, 12e-3), decode=(2e-7, 3e-7, 9e-3), overlap=0.3),
            0.05,
        ),
    ],
)
def test_the_coefficients_of_generated_times_are_found(own, tolerance):
    seconds = [own.predict_s(BatchTotals.of(batch)) for batch in TRAINING]
    found = fit_predictor(own.name, TRAINING, seconds).to_dict()
    for name, value in own.to_dict().items():
        if name != "predictor":
            assert found[name] == pytest.approx(value, rel=tolerance), name


@pytest.mark.parametrize("graphs", [None, GRAPHS])
def test_times_that_it_generated_itself_are_found(graphs):
    """Levels and corners trade off against each other where few batches tell them apart, so the
    times are compared."""
    own = FITTED["cosched, graphs" if graphs else "cosched"]
    seconds = [own.predict_s(BatchTotals.of(batch)) for batch in TRAINING]
    found = fit_predictor("cosched", TRAINING, seconds, graphs=graphs)
    totals = [BatchTotals.of(batch) for batch in HELD_OUT]
    relative = [found.predict_s(t) / own.predict_s(t) - 1 for t in totals]
    assert np.abs(relative).mean() < 0.005


def test_an_iteration_of_bros_takes_at_least_its_loading():
    predictor = BrosPredictor(
        prefill=(6e-5, 1e-9, 9e-3), decode=(2e-5, 2e-10, 8e-3), load_s_per_token=1e-5
    )
    totals = totals_of([Prefill(10, 0)], [])
    alone_s = predictor.predict_s(totals)
    totals.add_load(100)
    assert predictor.predict_s(totals) == alone_s
    totals.add_load(9900)
    assert predictor.predict_s(totals) == pytest.approx(0.1)


class TestAccuracy:
    """Relative errors on batches that were not fitted to."""

    @pytest.mark.parametrize("gpu", ["A100-80", "H100", "H200"])
    def test_ours_is_the_best_on_the_roofline(self, gpu):
        means = {
            name: np.abs(errors(fit(name, roofline(gpu)), roofline(gpu))).mean() for name in NAMES
        }
        assert means.pop("cosched") < min(0.01, 0.3 * min(means.values()))

    def test_noise_and_outliers_average_out(self):
        noisy = NoisyModel(roofline(), seed=0, sigma=0.1, outlier_ratio=0.02, outlier_factor=10.0)
        relative = errors(fit("cosched", noisy), roofline())
        assert np.abs(relative).mean() < 0.03
        assert abs(relative.mean()) < 0.01

    def test_iterations_that_were_measured_as_next_to_nothing_do_not_count(self):
        """One in 50: their results were seen late, together with those before them."""
        truth = roofline()
        seconds = [truth.iteration_s(batch) for batch in TRAINING]
        seconds[::50] = [2e-4] * len(seconds[::50])
        found = fit_predictor("cosched", TRAINING, seconds)
        assert np.abs(errors(found, truth)).mean() < 0.01

    @pytest.mark.parametrize("graphs", [None, GRAPHS])
    def test_batches_that_are_all_alike_do(self, graphs):
        mixed = BatchShape(prefills=[Prefill(300, 50)], decodes=[700] * 20)
        decode = BatchShape(decodes=[700] * 20)
        predictor = fit("cosched", roofline(), [mixed, decode] * 40, graphs=graphs)
        assert np.abs(errors(predictor, roofline(), [mixed, decode])).max() < 0.02
        assert all(predictor.predict_s(BatchTotals.of(batch)) > 0 for batch in HELD_OUT)

    @pytest.mark.parametrize(
        ("model", "gpu", "tp"),
        [
            ("Llama-3.1-8B", "A100-80", 1),
            ("Llama-3.1-8B", "H100", 1),
            ("Qwen2.5-14B", "H200", 1),
            ("Llama-3-70B", "H100", 8),
        ],
    )
    def test_one_percent_on_the_kernel_tables(self, real_tables, model, gpu, tp):
        truth = make_cost_model("kernel-table", model=model, gpu=gpu, tp=tp, data_dir=real_tables)
        batches = scheduler_batches(seed=3, num=4000, max_kv_tokens=400_000)
        graphs = default_graph_sizes(GPUS[gpu], tp)
        relative = errors(fit("cosched", truth, batches, graphs=graphs), truth)
        assert np.abs(relative).mean() < 0.01

    def test_graph_sizes_help_where_batches_are_padded(self, toy):
        graphs = default_graph_sizes(toy.gpu, 1)
        padded = errors(fit("cosched", toy, graphs=graphs), toy)
        straight = errors(fit("cosched", toy), toy)
        assert np.abs(padded).mean() < np.abs(straight).mean()

    def test_beyond_the_last_graph_nothing_is_padded(self):
        truth = make_cost_model("roofline", model="Llama-3.1-8B", gpu="A100-40")
        graphs = GraphSizes(prefill=(64, 1024, 4096), decode=(8, 32))
        relative = errors(fit("cosched", truth, graphs=graphs), truth)
        decodes = [i for i, b in enumerate(HELD_OUT) if not b.prefills and len(b.decodes) > 32]
        assert np.abs(relative[decodes]).mean() < 0.02

    def test_beyond_the_last_size_time_grows_in_proportion(self):
        predictor = FITTED["cosched, graphs"]
        last, twice = (predictor.predict_s(totals_of([Prefill(n, 0)], [])) for n in (8192, 16384))
        assert twice > 1.9 * last

    def test_a_size_of_a_batch_that_is_left_out_alone_is_no_nan(self):
        """It is too short. No other batch has so many new tokens, or a tile of them more."""
        usual = BatchShape(prefills=[Prefill(16, 0)], decodes=[100])
        batches = [usual] * 40 + [ONE] * 40 + [BatchShape(prefills=[Prefill(300, 0)])]
        predictor = fit_predictor("cosched", batches, [1.0] * 80 + [1e-9])
        for batch in batches[:80]:
            assert predictor.predict_s(BatchTotals.of(batch)) == pytest.approx(1.0, rel=0.1)
        assert 1.0 <= predictor.predict_s(BatchTotals.of(batches[80])) < 100.0


ONE, EMPTY = BatchShape(decodes=[5]), BatchShape()
PREFILL = BatchShape(prefills=[Prefill(9, 0)])


@pytest.mark.parametrize(
    ("name", "batches", "seconds", "message"),
    [
        ("hygn", [], [], r"unknown predictor 'hygn'; choose from bros, cosch"),
        ("hygen", [ONE], [1.0, 2.0], "1 batches, but 2 times"),
        ("hygen", [ONE, ONE], [1.0, 0.0], r"seconds\[1\] is 0.0; it must be above 0"),
        ("hygen", [ONE, ONE], [1.0, float("nan")], r"seconds\[1\] is nan; it must be above 0"),
        ("hygen", [ONE, EMPTY], [1.0, 1.0], r"batches\[1\] has neither prefills nor decodes"),
        ("echo", [ONE] * 50, [1.0] * 50, "'echo' .* 8 prefill-only batches .* are 0"),
        ("bros", [ONE] * 50, [1.0] * 50, "'bros' .* 8 prefill-only batches .* are 0"),
        ("cosched", [PREFILL] * 50 + [ONE], [1.0] * 51, "16 decode-only batches to fit; .* are 1"),
    ],
)
def test_what_cannot_be_fitted_is_refused(name, batches, seconds, message):
    with pytest.raises(ConfigError, match=message):
        fit_predictor(name, batches, seconds)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("hygen", {"predictor": "oracle"}, "unknown predictor 'oracle'; choose from bros"),
        ("hygen", {"predictor": None}, "unknown predictor None"),
        ("hygen", {"coefficients": [1.0]}, r"is \[1\.0\]; it must be a list of 7 numbers"),
        ("hygen", {"coefficients": [1, 2, 3, -4, 5, 6, 7]}, r"coefficients\[3\] is -4"),
        ("hygen", {"coefficients": [1, "2", 3, 4, 5, 6, 7]}, r"coefficients\[1\] is '2'"),
        ("cosched", {"decode": 7}, "decode is 7; it must have graphs, level and costs"),
        ("cosched", {"prefill": {"graphs": [], "level": [1.0], "costs": []}}, "level is"),
        ("cosched", {"decode": {"graphs": [-1], "level": [], "costs": []}}, r"graphs\[0\] is -1"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(name, change, message):
    with pytest.raises(ConfigError, match=message):
        predictor_from_dict({**FITTED[name].to_dict(), **change})
