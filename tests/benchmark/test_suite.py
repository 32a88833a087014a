"""Scenarios side by side, really run."""

import json
import os

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched import bench
from cosched.benchmark.report import markdown_table
from cosched.benchmark.suite import run_suite
from cosched.config import ENV_VAR
from cosched.errors import ConfigError
from cosched.simulation.machine import Machine
from cosched.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.simulation.scenario import scenario

SMALL = [
    *("--online", "alpaca", "--online-rate", "6", "--offline", "bros-offline"),
    *("--offline-requests", "40", "--duration", "4", "--kv-tokens", "20000"),
    *("--chunked-prefill-size", "512", "--cost-model", "roofline", "--quiet"),
]


def test_run_prints_a_table_and_one_json_line_and_compare_reads_it(capsys, tmp_path, ran):
    bench.main(["run", "--scenarios", "s0,offline-fcfs,sarathi", *SMALL])
    shown = capsys.readouterr().out
    assert "sarathi" in shown
    result = json.loads(shown.splitlines()[-1])
    rows = result["scenarios"]
    assert list(rows) == ["offline-fcfs", "s0", "sarathi"]
    assert len(ran) == len(rows)
    assert rows["sarathi"]["ceiling_ratio"] == pytest.approx(
        rows["sarathi"]["offline_tokens_per_s"] / rows["offline-fcfs"]["offline_tokens_per_s"],
        rel=1e-4,
    )
    assert rows["s0"]["baseline_attainment"] == rows["s0"]["attainment"]
    assert result["versions"]["sglang"]

    path = tmp_path / "result.json"
    path.write_text(shown)
    bench.main(["compare", str(path)])
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])["compared"]
    assert compared["s0"]["attainment_ratio"] == 1.0


def test_seeds_are_run_side_by_side_and_what_was_found_is_kept(small_spec, ran, store):
    suite = run_suite(
        small_spec,
        ["offline-fcfs", "sarathi", "aimd-tuned"],
        num_jobs=1,
        num_seeds=3,
        quiet=True,
        store=store,
    )
    by_seed = {seed: [s for s in ran if s.seed == seed] for seed in range(3)}
    assert len(by_seed[0]) > len(by_seed[1]) == len(by_seed[2]) == 3, "the last two search nothing"
    assert {s.scenario.name for s in by_seed[2]} == {"s0", "sarathi", "aimd"}
    rows = suite.seeds["aimd-tuned"]
    assert [row.result.spec.seed for row in rows] == [0, 1, 2]
    assert len({row.result.spec.machine for row in rows}) == 1
    assert len(suite.seeds["offline-fcfs"]) == 1, "a ceiling needs no interval"
    served = [row.offline_tokens_per_s for row in suite.seeds["sarathi"]]
    over = suite.to_dict()["sarathi"]["over_seeds"]["offline_tokens_per_s"]
    assert over["values"] == served and over["mean"] == pytest.approx(sum(served) / 3)
    assert over["half_width"] > 0
    line = markdown_table(suite.rows, suite.seeds).splitlines()[3]
    assert line.startswith("| sarathi |") and line.count("±") == 5


def test_no_order_is_above_that_of_who_knows_all(small_spec, ran, store):
    names = ["offline-fcfs", "offline-sorted", "offline-clairvoyant", "offline-hygen"]
    suite = run_suite(small_spec, names, num_jobs=1, quiet=True, store=store)
    best = suite.rows["offline-clairvoyant"].offline_tokens_per_s
    tried = suite.sweeps["offline-clairvoyant"]
    assert {*names, "offline-clairvoyant prefixes-ahead"} <= set(tried)
    assert best == max(row.offline_tokens_per_s for row in tried.values())
    assert suite.rows["offline-clairvoyant"].summary.ceiling.ratio == 1.0
    assert suite.rows["offline-clairvoyant"].name.startswith("offline-clairvoyant (")
    assert "s0" not in suite.rows


def test_unknown_scenarios_and_files_are_refused_by_name(tmp_path, capsys):
    spec = RunSpec(
        scenario=scenario("s1"),
        machine=Machine(kv_tokens=1000),
        offline=WorkloadSpec(name="bros-offline", num_requests=1),
        cost=CostSpec(name="roofline"),
    )
    with pytest.raises(ConfigError, match=r"unknown scenario 'ehco'; choose from .*priority-tuned"):
        run_suite(spec, ["ehco"], num_jobs=1, quiet=True)
    with pytest.raises(SystemExit) as ended:
        bench.main(["compare", str(tmp_path / "absent.json")])
    assert ended.value.code == 2
    assert "absent.json" in capsys.readouterr().err


@pytest.mark.parametrize(("one", "other"), [("sarathi", "echo-bs"), ("hygen-fcfs", "echo-bs+e")])
def test_the_same_run_under_two_names_is_simulated_once(capsys, ran, one, other):
    bench.main(["run", "--scenarios", f"{one},{other}/value,{other},s0", *SMALL])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["scenarios"]
    assert list(rows) == sorted([one, other, f"{other}/value", "s0"])
    assert len(ran) == 3
    assert rows[one]["summary"] == rows[other]["summary"] != rows["s0"]["summary"]
    assert rows[other]["spec"]["scenario"] == other
    bench.main(["run", "--scenarios", other, *SMALL])
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])["scenarios"][other]["summary"]
    assert alone["online"] == rows[one]["summary"]["online"]
    assert alone["offline"] == rows[one]["summary"]["offline"]


def test_a_run_leaves_the_configuration_of_the_process_as_it_was(monkeypatch):
    spec = RunSpec(
        scenario=scenario("hygen"),
        machine=Machine(kv_tokens=4000),
        offline=WorkloadSpec(name="bros-offline", num_requests=1),
        cost=CostSpec(name="roofline"),
        duration_s=1.0,
    )
    monkeypatch.delenv(ENV_VAR, raising=False)
    assert execute(spec).cosched["policy"] == "hygen"
    assert ENV_VAR not in os.environ
    monkeypatch.setenv(ENV_VAR, '{"policy": "priority"}')
    assert execute(spec).cosched["policy"] == "hygen"
    assert os.environ[ENV_VAR] == '{"policy": "priority"}'
