"""Learning while the engine runs: safe when cold, quick when the machine changes, hard to fool."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import BatchShape, BatchTotals, Prefill
from cosched.errors import ConfigError
from cosched.lab.cost_models.noise import NoisyModel
from cosched.lab.cost_models.registry import make_cost_model
from cosched.predict import calibration, linear
from cosched.predict.calibration import Calibrator, cold_start_s
from cosched.predict.fitted import fit_predictor
from tests.predict.batches import scheduler_batches
from tests.predict.test_fitted import DECODES, PREFILLS

TRUTH = make_cost_model("roofline", model="Llama-3.1-8B", gpu="A100-80")


def batches(seed, num):
    some = scheduler_batches(seed=seed, num=num, max_kv_tokens=400_000)
    return [some[i] for i in np.random.default_rng(seed).permutation(num)]


def small(batch):
    """At most 64 new tokens, 16 decodes and 2000 tokens of context each."""
    prefills = [Prefill(min(p.num_new, 64), min(p.num_cached, 2000)) for p in batch.prefills[:1]]
    return BatchShape(prefills=prefills, decodes=[min(c, 2000) for c in batch.decodes[:16]])


def learned(model=TRUTH, *, seed=1, num=600, calibrator=None):
    calibrator = calibrator or Calibrator()
    for batch in batches(seed, num):
        calibrator.observe(batch, model.iteration_s(batch))
    return calibrator


def given_shape():
    some = batches(1, 800)
    return fit_predictor("cosched", some, [TRUTH.iteration_s(batch) for batch in some])


def estimate_errors(calibrator, some):
    return np.array(
        [calibrator.estimate_s(BatchTotals.of(b)) / TRUTH.iteration_s(b) - 1 for b in some]
    )


class TestCold:
    def test_iterations_with_prefills_are_known_before_decodes_alone(self):
        """Beside a batch all iterations may have prefills, for as long as it runs."""
        calibrator = Calibrator()
        mixed = [batch for batch in batches(1, 600) if batch.prefills and batch.decodes]
        assert not calibrator.knows_prefills
        for batch in mixed:
            calibrator.observe(batch, TRUTH.iteration_s(batch))
        assert calibrator.knows_prefills and not calibrator.is_known
        decodes = BatchShape(decodes=[1000] * 8)
        estimate_s = calibrator.estimate_s(BatchTotals.of(decodes))
        assert TRUTH.iteration_s(decodes) < estimate_s < 1.5 * TRUTH.iteration_s(decodes)

    def test_a_slower_machine_is_believed_at_once(self):
        calibrator = Calibrator()
        batch = BatchShape(prefills=[Prefill(10, 0)])
        slow_s = 50 * cold_start_s(BatchTotals.of(batch))
        calibrator.observe(batch, slow_s)
        assert calibrator.predict_s(BatchTotals.of(batch)) >= slow_s

    def test_kernels_that_compile_in_the_first_iterations_are_not_the_machine(self):
        """Seconds in some of the first iterations of a phase, as Triton's kernels take on a GPU."""
        calibrator = Calibrator()
        batch = BatchShape(prefills=[Prefill(64, 0)])
        totals = BatchTotals.of(batch)
        for compiles in [True, False, True, False, False, True, False, False, True] + 40 * [False]:
            calibrator.observe(batch, 2.0 if compiles else TRUTH.iteration_s(batch))
            if calibrator.num_observed > 4:
                assert calibrator.estimate_s(totals) <= cold_start_s(totals)

    @pytest.mark.parametrize("seed", range(3))
    def test_what_is_larger_than_anything_seen_is_not_promised(self, seed):
        calibrator = Calibrator()
        for batch in map(small, batches(seed, 300)):
            calibrator.observe(batch, TRUTH.iteration_s(batch))
        for batch in batches(seed + 10, 300):
            totals = BatchTotals.of(batch)
            larger = totals.num_new > 128 or totals.num_decodes > 32
            if larger:
                assert calibrator.predict_s(totals) > 0.97 * TRUTH.iteration_s(batch)

    def test_only_sizes_that_were_seen_are_known(self):
        calibrator = Calibrator()
        small_batch, large = (
            BatchTotals.of(BatchShape(prefills=[Prefill(n, 0)])) for n in (30, 3000)
        )
        assert not calibrator.knows(small_batch)
        for batch in map(small, batches(0, 300)):
            calibrator.observe(batch, TRUTH.iteration_s(batch))
        assert calibrator.knows(small_batch) and not calibrator.knows(large)
        assert Calibrator(given_shape()).knows(large)

    @pytest.mark.parametrize("limit_s", [0.03, 0.05, 0.1])
    @pytest.mark.parametrize("num_decodes", [0, 20])
    def test_it_does_not_stay_at_tiny_chunks(self, limit_s, num_decodes):
        """Prompts of 4000 tokens in chunks as large as the estimate allows."""
        noisy = NoisyModel(TRUTH, seed=0, sigma=0.03, outlier_ratio=0.01, outlier_factor=10.0)
        calibrator = Calibrator()
        decodes = [800] * num_decodes
        done, chunks, too_long = 0, [], 0
        for _ in range(300):
            totals = BatchTotals.of(BatchShape(decodes=decodes))
            chunk = calibrator.max_prefill(totals, done, limit_s, 4000 - done)
            if not chunk and not decodes:
                chunk = 1  # an engine with nothing else to do runs something
            batch = BatchShape(prefills=[Prefill(chunk, done)] if chunk else [], decodes=decodes)
            too_long += chunk > 1 and TRUTH.iteration_s(batch) > 1.05 * limit_s
            calibrator.observe(batch, noisy.iteration_s(batch))
            chunks.append((chunk, done))
            done = (done + chunk) % 4000
        assert too_long <= 3
        # Chunks that the end of a prompt did not cut short, against the largest that fit.
        shares = []
        for chunk, at in chunks[200:]:
            best = max(
                (
                    n
                    for n in range(16, 4001 - at, 16)
                    if TRUTH.iteration_s(BatchShape(prefills=[Prefill(n, at)], decodes=decodes))
                    <= limit_s
                ),
                default=0,
            )
            if best:
                shares.append(chunk / best)
        assert np.median(shares) > 0.85

    def test_a_phase_that_never_runs_does_not_hold_up_the_other(self):
        calibrator = Calibrator()
        mixed = [b for b in batches(3, 1200) if b.prefills and b.decodes]
        for batch in mixed[:200]:
            calibrator.observe(batch, TRUTH.iteration_s(batch))
        assert np.abs(estimate_errors(calibrator, mixed[200:])).mean() < 0.1


class TestWarm:
    def test_it_learns_the_machine(self):
        noisy = NoisyModel(TRUTH, seed=0, sigma=0.05, outlier_ratio=0.01, outlier_factor=10.0)
        calibrator = learned(noisy, num=1500)
        assert np.abs(estimate_errors(calibrator, batches(9, 300))).mean() < 0.03

    @pytest.mark.parametrize("shape", [None, "given"])
    def test_one_disturbed_iteration_does_not_move_it(self, shape):
        calibrator = learned(calibrator=Calibrator(given_shape() if shape else None))
        probes = [BatchTotals.of(batch) for batch in batches(9, 50)]
        before = np.array([calibrator.estimate_s(totals) for totals in probes])
        batch, *later = batches(10, 3)
        calibrator.observe(batch, 10 * TRUTH.iteration_s(batch))
        after = np.array([calibrator.estimate_s(totals) for totals in probes])
        assert np.abs(after / before - 1).max() < 0.02
        for batch in later:
            calibrator.observe(batch, TRUTH.iteration_s(batch))
        assert calibrator.margin < 0.3

    @pytest.mark.parametrize("shape", [None, "given"])
    @pytest.mark.parametrize("sigma", [0.0, 0.05])
    def test_a_machine_that_becomes_slower_and_faster_again(self, shape, sigma):
        noisy = NoisyModel(TRUTH, seed=0, sigma=sigma)
        calibrator = learned(noisy, calibrator=Calibrator(given_shape() if shape else None))
        for factor in (2.0, 1.0):
            estimate, predicted = [], []
            for batch in batches(11, 60):
                totals = BatchTotals.of(batch)
                true_s = factor * TRUTH.iteration_s(batch)
                estimate.append(calibrator.estimate_s(totals) / true_s)
                predicted.append(calibrator.predict_s(totals) / true_s)
                calibrator.observe(batch, factor * noisy.iteration_s(batch))
            # One slow iteration may be a disturbance. After the second predictions are not too
            # short, and after 20 the estimate itself is right.
            assert min(predicted[2:]) > 0.9
            assert np.median(np.abs(np.array(estimate[20:]) - 1)) < 0.05
            assert np.quantile(np.abs(np.array(estimate[20:]) - 1), 0.9) < 0.1

    @pytest.mark.parametrize("num_alike", [0, 1, 2])
    def test_plans_that_change_with_the_machine(self, num_alike):
        """Where iterations take longer, plans make them smaller: nothing like them was seen."""
        calibrator = learned(calibrator=Calibrator(given_shape()), num=200)
        usual = BatchShape(prefills=[Prefill(480, 512)], decodes=[3000] * 32)
        changed = [
            BatchShape(prefills=[Prefill(num_new, 0)], decodes=[1200] * num_decodes)
            for num_new, num_decodes in zip((90, 200, 330) * 20, (5, 6, 7) * 20, strict=True)
        ]
        for _ in range(50):
            calibrator.observe(usual, TRUTH.iteration_s(usual))
        for _ in range(num_alike):
            calibrator.observe(usual, 2 * TRUTH.iteration_s(usual))
        predicted = []
        for batch in changed:
            seconds = 2 * TRUTH.iteration_s(batch)
            predicted.append(calibrator.predict_s(BatchTotals.of(batch)) / seconds)
            calibrator.observe(batch, seconds)
        # Without two like those before it is the scale of the phase that learns it, by half of its
        # window.
        soon = predicted[5:] if num_alike == 2 else predicted[20:]
        assert min(soon) > 0.9
        assert max(soon) < 1.2
        assert max(predicted) < 1.5

    @pytest.mark.parametrize(("token_s", "each_s"), [(24e-6, 0.0), (0.0, 5e-3)])
    def test_what_media_take_is_learned_and_does_not_bend_the_rest(self, token_s, each_s):
        """An A100 encodes a token of an image in 24 us (Qwen2.5-VL); Qwen2-Audio computes 30 s for
        the shortest sound. Until then they count for nothing."""
        calibrator = learned()

        def seconds(batch):
            num_encodings = np.count_nonzero(batch.encoded)
            encoding_s = token_s * sum(batch.encoded) + each_s * num_encodings
            return TRUTH.iteration_s(batch) + encoding_s

        with_prefills = [batch for batch in batches(5, 300) if batch.prefills]
        images = [
            replace(batch, encoded=[min(4 * p.num_new, 3000) for p in batch.prefills])
            for batch in with_prefills
        ]
        assert estimate_errors(calibrator, images[:1]) == pytest.approx(0, abs=0.02)
        for batch in images[:40]:
            calibrator.observe(batch, seconds(batch))
            assert np.abs(estimate_errors(calibrator, with_prefills[:20])).max() < 0.05
        totals = [*map(BatchTotals.of, images[40:])]
        estimates = [calibrator.estimate_s(each) for each in totals]
        errors = np.array(estimates) / [*map(seconds, images[40:])] - 1
        assert np.abs(errors).mean() < 0.01

    def test_new_kinds_of_batches_are_no_drift(self):
        calibrator = Calibrator()
        for batch in map(small, batches(0, 300)):
            calibrator.observe(batch, TRUTH.iteration_s(batch))
        for batch in batches(1, 200):
            calibrator.observe(batch, TRUTH.iteration_s(batch))
        assert calibrator.scale == pytest.approx(1.0, abs=0.15)

    def test_a_shape_that_is_wrong_for_new_kinds_does_not_change_times_of_earlier_ones(self):
        """Chat alone, then prompts over long prefixes beside it, which take longer than a fit to
        few of them says: the machine is the same."""

        def seconds(batch):
            is_long = any(p.num_cached > 3000 for p in batch.prefills)
            return TRUTH.iteration_s(batch) * (1.6 if is_long else 1.0)

        random = np.random.default_rng(0)

        def batch(num_cached):
            num_new = int(random.integers(64, 512))
            prefills = () if num_cached is None else [Prefill(num_new, num_cached)]
            decodes = random.integers(200, 2000, random.integers(4, 16)).tolist()
            return BatchShape(prefills=prefills, decodes=decodes)

        chat = [batch(None) for _ in range(100)]
        short, long = ([batch(num_cached) for _ in range(200)] for num_cached in (0, 4000))
        calibrator = Calibrator()
        for each in [*chat, *short, *long]:
            calibrator.observe(each, seconds(each))
        assert np.abs(estimate_errors(calibrator, chat)).mean() < 0.02

    def test_two_iterations_of_known_kinds_show_that_the_machine_changed(self):
        """Plans change with it: what runs from then on is of new kinds."""
        calibrator = learned(num=300)
        known = [batch for batch in batches(1, 300) if batch.prefills and batch.decodes]
        new = [
            BatchShape(prefills=[Prefill(90 + i, 0)], decodes=[6000] * (150 + i)) for i in range(40)
        ]
        for batch in known[:40]:
            calibrator.observe(batch, TRUTH.iteration_s(batch))
        for batch in (*known[:2], *new):
            calibrator.observe(batch, 2 * TRUTH.iteration_s(batch))
        errors = (1 + estimate_errors(calibrator, batches(9, 200))) / 2 - 1
        assert np.abs(errors).mean() < 0.1

    @pytest.mark.parametrize("shape", [None, "given"])
    def test_what_was_not_seen_since_the_machine_changed_is_as_much_slower(self, shape):
        calibrator = learned(calibrator=Calibrator(given_shape() if shape else None))
        usual = BatchShape(prefills=[Prefill(480, 512)], decodes=[3000] * 32)
        for _ in range(200):
            calibrator.observe(usual, 2 * TRUTH.iteration_s(usual))
        errors = (1 + estimate_errors(calibrator, batches(9, 200))) / 2 - 1
        assert np.abs(errors).mean() < 0.1

    def test_the_same_observations_give_the_same_estimate(self):
        assert learned(num=300).describe() == learned(num=300).describe()

    def test_a_given_shape_that_is_right_is_kept(self):
        shape = given_shape()
        calibrator = learned(num=300, calibrator=Calibrator(shape))
        for batch in batches(9, 50):
            totals = BatchTotals.of(batch)
            assert calibrator.estimate_s(totals) == pytest.approx(shape.predict_s(totals), rel=0.02)

    def test_a_profile_that_is_wrong_for_what_runs_leaves_the_rest_as_it_is(self):
        """Decodes take a seventh less than in the profile, prefills as long: one scale for all
        would make prefills too short."""
        some = batches(1, 800)
        points = [(b, TRUTH.iteration_s(b) * (1.0 if b.prefills else 7 / 6)) for b in some]
        calibrator = Calibrator(fit_predictor("cosched", *zip(*points, strict=True)), points=points)
        decodes, prefills = (
            [b for b in batches(9, 600) if bool(b.prefills) is wanted] for wanted in (False, True)
        )
        for batch in 3 * decodes:
            calibrator.observe(batch, TRUTH.iteration_s(batch))
        for others in (decodes, prefills):
            assert np.abs(estimate_errors(calibrator, others)).mean() < 0.03

    def test_the_description_is_json(self):
        for calibrator in (Calibrator(), Calibrator(given_shape()), learned(num=200)):
            described = json.loads(json.dumps(calibrator.describe(), allow_nan=False))
            assert described["predictor"] == "calibrated"


ONE = BatchShape(decodes=[5])
CALIBRATORS = {
    "cold": Calibrator(),
    "small": learned(num=60),
    "learned": learned(),
    "given": learned(num=100, calibrator=Calibrator(given_shape())),
}


@pytest.mark.parametrize("name", sorted(CALIBRATORS))
@given(PREFILLS, DECODES, st.integers(0, 20000), st.integers(1, 300), st.integers(1, 400))
def test_the_inverse_is_that_of_brute_force(name, prefills, decodes, cached, near, most):
    calibrator = CALIBRATORS[name]
    assert calibrator.predict_s(BatchTotals()) == 0.0
    totals = BatchTotals.of(BatchShape(prefills=prefills, decodes=decodes))

    def seconds(n):
        more = totals.copy()
        more.add_prefill(n, cached)
        return calibrator.predict_s(more)

    limit_s = seconds(near)
    fits = [n for n in range(1, most + 1) if seconds(n) <= limit_s]
    assert calibrator.max_prefill(totals, cached, limit_s, most) == max(fits, default=0)


@pytest.mark.parametrize(
    ("batch", "seconds", "message"),
    [
        (ONE, 0.0, "an iteration of 0.0 s"),
        (ONE, -1.0, "an iteration of -1.0 s"),
        (ONE, float("nan"), "an iteration of nan s"),
        (ONE, float("inf"), "an iteration of inf s"),
        (BatchShape(), 1.0, "num_decodes=0"),
    ],
)
def test_a_measurement_that_is_none_is_refused(batch, seconds, message):
    with pytest.raises(ConfigError, match=message):
        Calibrator().observe(batch, seconds)


class TestSteps:
    def test_no_iteration_waits_for_a_fit_to_many(self, monkeypatch):
        solved = []
        nnls = linear.nnls
        monkeypatch.setattr(linear, "nnls", lambda *args: solved.append(1) or nnls(*args))
        monkeypatch.setattr(calibration, "FIT_AT_ONCE", 100)
        calibrator, most = Calibrator(), 0
        for number, batch in enumerate(batches(1, 600)):
            before = len(solved)
            calibrator.observe(batch, TRUTH.iteration_s(batch))
            if number > 100:
                most = max(most, len(solved) - before)
        assert most == 1

    def test_steps_find_what_one_fit_finds(self, monkeypatch):
        def found(most_at_once):
            monkeypatch.setattr(calibration, "FIT_AT_ONCE", most_at_once)
            return learned(num=600)

        in_steps, at_once = found(0), found(10_000)
        assert in_steps.num_fits > 3
        for batch in batches(2, 50):
            totals = BatchTotals.of(batch)
            expected_s = at_once.estimate_s(totals)
            assert in_steps.estimate_s(totals) == pytest.approx(expected_s, rel=0.05)
