"""``cosched tune``: what is left to choose, chosen by simulation and written down."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import Config, parse_config
from cosched.lab import tune
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import execute
from cosched.lab.simulation.run_spec import RunSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from cosched.lab.simulation.sweep import LEAST_GAIN, TOLERANCE, best_of, sweep
from cosched.lab.tune import KNOBS
from cosched.schedule.base import Budgets
from tests.simulated import make_spec, stay_in_process

SPEC = RunSpec(setting=setting_of("cosched"), machine=Machine(chunk_tokens=2048))


def test_each_knob_sets_what_it_names():
    for knob in KNOBS.values():
        for value in knob.values:
            assert knob.of(knob.set(SPEC, value)) == value
    spec = KNOBS["burst"].set(KNOBS["aim"].set(SPEC, 0.9), 2.0)
    assert dict(spec.config) == {"budgets": {"aim": 0.9, "burst": 2.0}}
    assert KNOBS["aim"].of(SPEC) == Budgets().aim
    assert KNOBS["chunk_tokens"].of(SPEC) == 2048


@given(st.dictionaries(st.sampled_from([*KNOBS]), st.floats(0.5, 2.0)), st.data())
def test_a_value_stays_where_it_serves_more_and_chat_as_well(gains, data):
    """Each knob has one value that changes the offline rate by a factor, and maybe harms chat."""
    special = {name: data.draw(st.sampled_from(KNOBS[name].values)) for name in gains}
    harm = {name: data.draw(st.sampled_from([0.0, 0.005, 0.5])) for name in gains}
    asked = []

    def run(specs):
        asked.extend(specs)
        found = {}
        for name, spec in specs.items():
            met, rate = 1.0, 1000.0
            for knob, value in special.items():
                if KNOBS[knob].of(spec) == value:
                    met, rate = met - harm[knob] * (met > 0.99), rate * gains[knob]
            found[name] = SimpleNamespace(
                attainment=met,
                offline_tokens_per_s=rate,
                baseline_attainment=1.0,
                gave_up=False,
            )
        return found

    swept = sweep(SPEC, [*KNOBS.values()], run)
    assert len(asked) == len(set(asked)), "nothing is run twice"
    (best,) = run({"best": swept.best}).values()
    (before,) = run({"before": SPEC}).values()
    if 1 - before.attainment <= TOLERANCE:
        assert 1 - best.attainment <= TOLERANCE
        assert best.offline_tokens_per_s >= before.offline_tokens_per_s
    else:
        assert best.attainment >= before.attainment
    for name, knob in KNOBS.items():
        if knob.of(swept.best) != knob.of(SPEC) and 1 - before.attainment <= TOLERANCE:
            now = swept.tried[name][knob.of(swept.best)].offline_tokens_per_s
            assert now > (1 + LEAST_GAIN) * swept.tried[name][knob.of(SPEC)].offline_tokens_per_s


def test_where_none_keeps_chat_in_time_the_one_that_held_out_longest_is_best():
    def tried(attainment, *, gave_up):
        return SimpleNamespace(
            attainment=attainment,
            baseline_attainment=1.0,
            offline_tokens_per_s=1.0,
            gave_up=gave_up,
        )

    some = {"first": tried(0.2, gave_up=True), "later": tried(0.9, gave_up=True)}
    assert best_of(some) == "later"
    assert best_of(some | {"to the end": tried(0.9, gave_up=False)}) == "to the end"


def arguments(folder, *more, knobs="chunk_tokens"):
    return [
        *("--online", "alpaca", "--online-rate", "6", "--offline", "bros-offline"),
        *("--offline-requests", "80", "--duration", "2", "--cost-model", "roofline"),
        *("--kv-tokens", "20000", "--max-running-requests", "32", "--slo-tpot", "0.015"),
        *("--chunked-prefill-size", "2048"),
        *("--knobs", knobs, "--out", str(folder / "cosched.json"), "--quiet"),
        *("--results", str(folder / "results"), *more),
    ]


@pytest.fixture
def ran(monkeypatch):
    """Specifications that were run."""
    return stay_in_process(monkeypatch)


def test_a_small_workload(ran, tmp_path, capsys):
    tune.main(arguments(tmp_path, knobs="crowded_share"))
    *shown, last = capsys.readouterr().out.strip().splitlines()
    told = json.loads(last)
    text = (tmp_path / "cosched.json").read_text()
    config = parse_config(text, source="the file")
    assert isinstance(config, Config) and config.policy == "cosched"
    assert config.slo.ttft_ms == 1000 and config.slo.tpot_ms == 15
    figures = json.loads((tmp_path / "cosched.figures.json").read_text())
    assert figures["predicted"] == told["predicted"] and figures["changed"] == told["changed"]
    assert figures["sglang_flags"]["--max-running-requests"] == 32
    assert set(told["tried"]) == {"crowded_share"}
    assert set(told["tried"]["crowded_share"]) == {"0.1", "0.2", "0.4"}
    assert {spec.seed for spec in ran} == {0, 1}, "the last are with another seed"
    assert any("both met %" in line for line in shown)
    num_run = len(ran)
    tune.main(arguments(tmp_path, knobs="crowded_share"))
    assert len(ran) == num_run, "the second call runs nothing again"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--knobs", "aim,speed"], "no knob 'speed'; choose from aim, burst"),
        (["--policy", "sarathi"], "'sarathi' has no budget of time; choose from"),
    ],
)
def test_bad_arguments(tmp_path, capsys, more, named):
    with pytest.raises(SystemExit) as ended:
        tune.main(arguments(tmp_path, *more))
    assert ended.value.code == 2 and named in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tune.main(["--online", "alpaca", "--out", str(tmp_path / "c.json")])
    assert "name --online and --offline" in capsys.readouterr().err


def test_a_choice_that_is_no_better_elsewhere_is_not_taken(tmp_path, monkeypatch, capsys):
    """A made-up machine on which a longer burst pays with the first seed alone."""
    result = execute(
        make_spec("cosched", online=WorkloadSpec(name="alpaca", rate=6.0), duration_s=2.0)
    )

    def execute_all(specs, *, num_jobs, store):
        for index, spec in enumerate(specs):
            factor = 1.0
            if KNOBS["burst"].of(spec) == 3.0:
                factor = 2.0 if spec.seed == 0 else 0.5
            offline = replace(
                result.summary.offline,
                tokens_per_s=factor * (result.summary.offline.tokens_per_s or 1.0),
            )
            summary = replace(result.summary, offline=offline)
            yield index, replace(result, spec=spec, summary=summary)

    monkeypatch.setattr(tune, "execute_all", execute_all)
    tune.main(arguments(tmp_path, knobs="burst"))
    shown = capsys.readouterr().out
    assert "the defaults stay: with another seed the choice was no better" in shown
    assert "budgets" not in json.loads((tmp_path / "cosched.json").read_text())
