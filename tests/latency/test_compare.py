"""The comparison of predictors and its command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cosched.core.batch import BatchShape, Prefill
from cosched.cost_models.noise import NoisyModel
from cosched.cost_models.registry import make_cost_model
from cosched.latency.compare import (
    KINDS,
    compare_predictors,
    kind_of,
    measure,
    scheduler_batches,
)
from cosched.latency.profile_file import Profile
from cosched.predictors import main

ROOFLINE = make_cost_model("roofline", model="Llama-3.1-8B", gpu="A100-80")


def measured(batches):
    return measure(ROOFLINE.iteration_s, batches)


def test_batches_are_of_every_kind_and_within_the_machine():
    batches = scheduler_batches(seed=0, num=400, max_kv_tokens=100_000, max_decodes=64)
    assert [kind_of(batch) for batch in batches[:4]] == list(KINDS)
    for batch in batches:
        assert 1 <= batch.num_tokens <= 8192
        assert len(batch.decodes) <= 64
        assert all(p.num_new >= 1 and p.num_cached <= 30_000 for p in batch.prefills)
    again = scheduler_batches(seed=0, num=400, max_kv_tokens=100_000, max_decodes=64)
    assert batches == again


def test_errors_are_told_by_kind():
    batches = scheduler_batches(seed=0, num=600, max_kv_tokens=400_000)
    results = compare_predictors(measured(batches[:400]), measured(batches[400:]))
    for result in results.values():
        assert set(result.errors) == {*KINDS, "all"}
        assert result.errors["all"].num_points == 200 == len(result.predicted_s)


def test_a_predictor_that_cannot_be_fitted_says_why():
    only = [BatchShape(prefills=[Prefill(n, 0)], decodes=[n] * 3) for n in range(1, 100)]
    results = compare_predictors(measured(only), measured(only[:5]))
    assert "at least 8 prefill-only batches" in results["echo"]
    assert set(results["hygen"].errors) == {"mixed", "all"}


class TestCommand:
    def run(self, capsys, *arguments):
        main(list(arguments))
        lines = capsys.readouterr().out.splitlines()
        return lines[:-1], json.loads(lines[-1])

    def test_compare(self, capsys, tmp_path):
        picture = tmp_path / "errors.png"
        table, result = self.run(
            capsys,
            *("compare", "--truth", "roofline", "--iterations", "400", "--noise", "0.05"),
            *("--plot", str(picture)),
        )
        assert any(line.startswith("cosched") for line in table)
        assert result["num_fitted"] + result["num_held_out"] == 400
        assert result["errors"]["cosched"]["all"]["mean"] < 0.08
        assert picture.stat().st_size > 10_000

    def test_compare_on_a_log(self, capsys, tmp_path):
        log = tmp_path / "log.jsonl"
        noisy = NoisyModel(ROOFLINE, seed=0, sigma=0.02)
        entries = [
            {
                "start_s": 0.0,
                "seconds": noisy.iteration_s(batch),
                "prefills": batch.prefills,
                "decodes": batch.decodes,
            }
            for batch in scheduler_batches(seed=0, num=300, max_kv_tokens=100_000)
        ]
        log.write_text("\n".join(map(json.dumps, entries)))
        _, result = self.run(capsys, "compare", "--log", str(log))
        assert result["errors"]["cosched"]["all"]["mean"] < 0.06

    def test_compare_on_a_profile(self, capsys, tmp_path):
        batches = scheduler_batches(seed=0, num=300, max_kv_tokens=100_000)
        points = measure(ROOFLINE.iteration_s, batches)
        Profile(points=points).save(tmp_path / "profile.json")
        _, result = self.run(capsys, "compare", "--log", str(tmp_path / "profile.json"))
        assert result["num_fitted"] + result["num_held_out"] == 300
        assert result["errors"]["cosched"]["all"]["mean"] < 0.05

    def test_held_out_in_order_are_the_last_ones(self, capsys, tmp_path):
        batches = scheduler_batches(seed=0, num=300, max_kv_tokens=100_000)
        points = measure(ROOFLINE.iteration_s, batches)
        slower = [replace(point, seconds=2 * point.seconds) for point in points[210:]]
        Profile(points=[*points[:210], *slower]).save(tmp_path / "profile.json")
        arguments = ("compare", "--log", str(tmp_path / "profile.json"))
        _, result = self.run(capsys, *arguments, "--in-order")
        assert (result["num_fitted"], result["num_held_out"]) == (210, 90)
        assert result["errors"]["cosched"]["all"]["mean"] == pytest.approx(0.5, abs=0.05)

    def test_calibrate(self, capsys):
        _, result = self.run(
            capsys, "calibrate", "--truth", "roofline", "--iterations", "1200", "--slower", "2"
        )
        ends = [(row["first"], row["last"]) for row in result["stretches"]]
        assert ends[0][0] == 0 and ends[-1][1] == 1200
        assert result["stretches"][-1]["estimate"]["mean"] < 0.05

    def test_wrong_arguments_end_in_one_sentence(self, capsys, tmp_path):
        for arguments, message in (
            (["--held-out", "2"], "--held-out: '2' is not a number above 0 and below 1"),
            (["--log", str(tmp_path / "none")], "--log: cannot read"),
            (["--truth", "roofline", "--noise", "3"], "--noise: '3' is not a number of at least 0"),
        ):
            with pytest.raises(SystemExit) as stopped:
                main(["compare", *arguments])
            assert stopped.value.code == 2
            assert message in capsys.readouterr().err
