"""``python -m cosched.profile``: engines measured in this process, profiles used and refused."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched import serve
from cosched.config import ENV_VAR, Config
from cosched.core.batch import BatchShape, BatchTotals, Prefill
from cosched.engine.identity import STANDS_FOR, calibrator_of
from cosched.errors import ConfigError
from cosched.lab import profile
from cosched.lab.cost_models.registry import make_cost_model
from cosched.lab.profiling.predictor_errors import kind_of
from cosched.lab.simulation.run import execute
from cosched.lab.simulation.setting import setting_of
from cosched.predict.fitted import PREDICTORS, fit_predictor
from cosched.predict.profile_file import Profile
from tests.predict.batches import scheduler_batches
from tests.simulated import make_spec, stay_in_process

MACHINE = ("--cost-model", "roofline", "--gpu", "H100")
FEW_TOKENS = ("--max-context", "4096", "--max-running-requests", "64")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv(ENV_VAR, "")


@pytest.fixture(scope="module")
def virtual(tmp_path_factory):
    """(path, last line) of a profile of the modelled H100."""
    path = tmp_path_factory.mktemp("profile") / "h100.json"
    return path, measure(
        "--write", str(path), "--virtual", *MACHINE, "--repeats", "1", "--batches", "200"
    )


def run_command(*argv):
    """The last line that it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_VAR, "")
        lines = []
        patch.setattr("builtins.print", lambda *a, **k: lines.append(a[0]))
        profile.main([*argv])
    return json.loads(lines[-1])


def measure(*argv):
    return run_command("measure", "--quiet", *argv)


def test_the_times_of_the_modelled_gpu_are_recovered(virtual):
    path, result = virtual
    assert result["num_points"] > 190 and result["about"]["num_discarded"] == 0
    assert result["held_out"]["errors"]["cosched"]["all"]["mean"] < 0.02
    loaded = Profile.load(path)
    assert {kind_of(p.batch) for p in loaded.points} == {
        "decode",
        "prefill",
        "cached prefill",
        "mixed",
    }
    truth = make_cost_model("roofline", model="Llama-3.1-8B", gpu="H100")
    for point in loaded.points:
        assert point.seconds == pytest.approx(truth.iteration_s(point.batch), rel=1e-6)
    unseen = scheduler_batches(seed=9, num=300, max_kv_tokens=300_000)
    errors = [
        loaded.predictor.predict_s(BatchTotals.of(b)) / truth.iteration_s(b) - 1 for b in unseen
    ]
    assert np.abs(errors).mean() < 0.04


def test_the_time_of_a_batch_does_not_depend_on_the_one_before_it(tmp_path):
    """The launch of a prefill takes longer than the device does for small batches."""
    path = tmp_path / "a.json"
    launches = ("--launch-ms", "1.5", "--eager-layer-ms", "0.25")
    options = ("--batches", "60", "--repeats", "1", *FEW_TOKENS)
    measure("--write", str(path), "--virtual", *MACHINE, *launches, *options)
    truth = make_cost_model("roofline", model="Llama-3.1-8B", gpu="H100")
    errors = []
    for point in Profile.load(path).points:
        least_s = 0.0095 if point.batch.prefills else 0.0
        errors.append(point.seconds / max(truth.iteration_s(point.batch), least_s) - 1)
    assert np.median(np.abs(errors)) < 1e-6 and np.mean(np.abs(errors)) < 0.02


def test_repeats_give_the_median_and_disagreement_is_discarded(tmp_path):
    noisy = measure(
        *("--write", str(tmp_path / "a.json"), "--virtual", *MACHINE, "--noise", "0.03"),
        *("--batches", "80", "--repeats", "3", *FEW_TOKENS),
    )
    assert noisy["num_points"] == 80
    truth = make_cost_model("roofline", model="Llama-3.1-8B", gpu="H100")
    points = Profile.load(tmp_path / "a.json").points
    errors = [abs(p.seconds / truth.iteration_s(p.batch) - 1) for p in points]
    assert np.mean(errors) < 0.02
    wild = measure(
        *("--write", str(tmp_path / "b.json"), "--virtual", *MACHINE, "--noise", "0.16"),
        *("--batches", "80", "--repeats", "3", *FEW_TOKENS),
    )
    assert wild["about"]["num_discarded"]
    assert wild["num_points"] + wild["about"]["num_discarded"] == 80


def test_a_live_engine_is_measured_and_starts_from_its_profile(tiny_model, tmp_path):
    path = tmp_path / "tiny.json"
    flags = ["--model-path", str(tiny_model), "--dtype", "float32", "--max-total-tokens", "6000"]
    result = measure(
        *("--write", str(path), "--batches", "60", "--repeats", "1", "--max-context", "512"),
        *flags,
    )
    engine = result["engine"]
    assert engine["num_layers"] == 2 and engine["dtype"] == "float32" and engine["tp"] == 1
    assert result["num_points"] > 45
    profiled = Profile.load(path)
    assert profiled.engine.num_cores >= 1 and profiled.engine.device

    from sglang.srt.server_args import prepare_server_args

    from cosched.engine.arguments import engine_arguments
    from cosched.lab.local_engine import LocalEngine

    config = Config(policy="hygen", latency_model=str(path))
    arguments = engine_arguments([*flags, "--log-level", "error"], config, mixed_chunk=True)
    serve.check_latency_model(prepare_server_args(arguments), config)
    other = replace(profiled, engine=replace(profiled.engine, device="NVIDIA H100", tp=2))
    other.save(tmp_path / "other.json")
    refused = Config(policy="hygen", latency_model=str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match=r"device is 'NVIDIA H100', expected .*; tp is 2, expec"):
        serve.check_latency_model(prepare_server_args(arguments), refused)
    ignored = Config(policy="sarathi", latency_model=str(tmp_path / "other.json"))
    serve.check_latency_model(prepare_server_args(arguments), ignored)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_VAR, config.to_json())
        with LocalEngine(arguments) as local:
            estimated = local.scheduler.cosched.predictor
            for point in profiled.points[:20]:
                totals = BatchTotals.of(point.batch)
                assert estimated.estimate_s(totals) == profiled.predictor.predict_s(totals)


def small_run(name="hygen", **changes):
    machine = {"gpu": "H100", **changes.pop("machine", {})}
    return make_spec(name, machine=machine, **{"duration_s": 3.0, **changes})


def test_a_simulation_starts_from_the_profile_of_its_machine_and_refuses_others(virtual):
    config = (("latency_model", str(virtual[0])),)
    result = execute(small_run(config=config))
    assert result.spec.describe()["config"] == {"latency_model": "h100.json"}
    assert result.summary.online.num_finished > 5
    with pytest.raises(ConfigError, match=r"device is 'virtual H100 \(roofline\)', expected"):
        execute(small_run(config=config, machine={"gpu": "A100-80"}))


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_a_policy_plans_with_a_papers_predictor_fitted_to_the_profile(virtual, name):
    path = virtual[0]
    loaded = Profile.load(path)
    found = Profile.of_engine(path, loaded.engine).predictor_named(name)
    totals = BatchTotals.of(BatchShape(prefills=[Prefill(300, 100)], decodes=[500] * 9))
    if name == "cosched":  # that of the file, which knows the sizes of the graphs
        expected = loaded.predictor
    else:
        points = loaded.points
        expected = fit_predictor(name, [p.batch for p in points], [p.seconds for p in points])
    assert found.name == name and found.predict_s(totals) == expected.predict_s(totals)
    spec = small_run(f"hygen@{name}", duration_s=1.0)
    result = execute(replace(spec, config=(("latency_model", str(path)),)))
    assert result.summary.online.num_finished > 0
    with pytest.raises(ConfigError, match="name latency_model"):
        execute(spec)


@pytest.mark.parametrize(("policy", "form"), [("hygen-literal", "hygen"), ("echo-literal", "echo")])
def test_a_literal_policy_plans_with_its_papers_predictor_as_it_was_fitted(virtual, policy, form):
    with pytest.raises(ValueError, match=f"predictor '{form}': .* name latency_model"):
        Config(policy=policy)
    loaded = Profile.load(virtual[0])
    stand_in = SimpleNamespace(hf_config=SimpleNamespace(**{STANDS_FOR: asdict(loaded.engine)}))
    config = Config(policy=policy, latency_model=str(virtual[0]))
    predictor = calibrator_of(None, lambda: stand_in, config)
    for point in loaded.points[:40]:
        predictor.observe(point.batch, 3 * point.seconds)
    fitted = loaded.predictor_named(form)
    for point in loaded.points[:40]:
        totals = BatchTotals.of(point.batch)
        assert predictor.predict_s(totals) == fitted.predict_s(totals)


def test_the_predictors_of_the_papers_are_compared_on_profiles(virtual, tmp_path):
    page = tmp_path / "errors.md"
    result = run_command("errors", str(virtual[0]), "--write", str(page))
    (of_engine,) = result["errors"].values()
    assert of_engine.keys() == PREDICTORS.keys()
    means = {name: errors["all"]["mean"] for name, errors in of_engine.items()}
    assert min(means, key=means.__getitem__) == "cosched" and means["cosched"] < 0.02
    rows = [line for line in page.read_text().splitlines() if line.startswith("| virtual H100")]
    assert len(rows) == len(PREDICTORS) and "HyGen" in rows[0] and " / " in rows[0]


def test_a_predictor_is_chosen_by_name_for_a_policy_that_predicts():
    with pytest.raises(ConfigError, match="unknown predictor 'x'; choose from bros, cosched"):
        setting_of("hygen@x")
    with pytest.raises(ConfigError, match="sarathi predicts nothing"):
        setting_of("sarathi@echo")
    assert setting_of("echo-bs+e@echo").predictor == "echo"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["measure", "--write", "p.json"], "name --virtual, or --model-path"),
        (["measure", "--write", "no/where/p.json", "--virtual"], "--write: cannot write"),
        (
            ["measure", "--write", "p.json", "--batches", "0"],
            '"0" for --batches. Must be >= 1',
        ),
        (
            ["measure", "--write", "p.json", "--virtual", "--held-out", "1"],
            '"1\\.0" for --held-out. Must be < 1',
        ),
        (["slo", "--slo", "p99<=1s", "--online", "alpaca"], "'p99<=1s' is not a goal"),
        (["slo", "--slo", "p99_ttft<=1s", "--online", "alpaca"], "needs both classes"),
        (["slo", "--slo", "p99_ttft<=1s", "--cosched-config", '{"policy": "x"}'], "nothing to run"),
        (
            ["slo", "--slo", "p99_ttft<=1s", "--online", "a", "--cosched-config", '{"policyy": 1}'],
            "--cosched-config: .*policyy",
        ),
        (
            ["slo", "--slo", "p99_ttft<=1s", "--online", "a", "--cosched-config", '{"slo": {}}'],
            "--cosched-config: 'slo' is set by --slo-ttft",
        ),
    ],
)
def test_wrong_arguments_end_with_one_sentence(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        profile.main(argv)
    assert ended.value.code == 2
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("cosched: ")]
    assert re.search(message, line)


def test_an_interrupted_measurement_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "fit_predictor", interrupt)
    with pytest.raises(SystemExit) as ended:
        measure(
            *("--write", str(tmp_path / "p.json"), "--virtual", *MACHINE),
            *("--batches", "4", "--repeats", "1", *FEW_TOKENS),
        )
    assert ended.value.code == 130
    assert list(tmp_path.iterdir()) == []


def test_a_search_writes_a_configuration(tmp_path, capsys, monkeypatch):
    stay_in_process(monkeypatch)
    path = tmp_path / "config.json"
    profile.main(
        [
            *("slo", "--slo", "p99_ttft<=5s", "--slo", "p99_tbt<=1s", "--quiet"),
            *("--online", "alpaca", "--online-rate", "8", "--offline", "bros-offline"),
            *("--offline-requests", "30", "--duration", "3", "--high", "100", "--write", str(path)),
            *("--cost-model", "roofline", "--kv-tokens", "20000"),
        ]
    )
    out = capsys.readouterr().out.splitlines()
    assert json.loads(out[-1])["value"] == 100.0
    assert out[-2] == "largest latency_budget_ms that meets all goals: 100"
    written = json.loads(path.read_text())
    assert written["policy"] == "hygen" and written["latency_budget_ms"] == 100.0
