"""Results kept on disk."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

import cosched
from cosched.errors import ConfigError
from cosched.lab.metrics.records import write_records
from cosched.lab.simulation import result_store as store_module
from cosched.lab.simulation.parallel import execute_all
from cosched.lab.simulation.result_store import ResultStore
from cosched.lab.simulation.run import execute
from cosched.lab.simulation.run_spec import WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from tests.simulated import make_spec

SPEC = make_spec(
    "s1",
    machine={"kv_tokens": 2000, "chunk_tokens": 256},
    online=None,
    offline=WorkloadSpec(name="bros-offline", num_requests=3),
    duration_s=5.0,
)


@pytest.fixture(scope="module")
def result():
    return execute(SPEC)


def test_a_run_that_is_there_is_not_run_again(result, tmp_path, monkeypatch):
    store = ResultStore(tmp_path)
    store.put(result)

    def fail(*args, **kwargs):
        raise AssertionError("it was run again")

    monkeypatch.setattr("cosched.lab.simulation.parallel._start", fail)
    [(index, again)] = execute_all([SPEC], num_jobs=1, store=store)
    assert index == 0
    assert again.to_dict() == result.to_dict()
    with pytest.raises(AssertionError):
        list(execute_all([replace(SPEC, seed=1)], num_jobs=1, store=store))


@pytest.mark.parametrize("name", ["priority/lru", "hygen@echo", "hygen/lru"])
def test_a_scenario_of_any_name_is_kept(result, tmp_path, name):
    kept = replace(result, spec=replace(SPEC, setting=setting_of(name)))
    store = ResultStore(tmp_path)
    store.put(kept)
    assert store.get(kept.spec) is not None and store.get(SPEC) is None


def test_a_whole_run_answers_for_one_that_may_give_up(result, tmp_path):
    patient, impatient = SPEC, replace(SPEC, most_misses=3)
    store = ResultStore(tmp_path)
    store.put(replace(result, spec=impatient, gave_up=True))
    assert store.get(patient) is None and store.get(impatient).gave_up
    assert store.get(replace(SPEC, most_misses=4)) is None, "it may have gone on"
    store.put(replace(result, spec=impatient))
    for spec in (patient, impatient, replace(SPEC, most_misses=4)):
        assert not store.get(spec).gave_up and store.get(spec).spec == spec


def test_only_what_decides_the_result_is_part_of_the_key(result, tmp_path, monkeypatch):
    store = ResultStore(tmp_path)
    store.put(result)
    renamed = replace(SPEC, setting=replace(SPEC.setting, summary="told otherwise"))
    assert store.get(renamed) is not None
    for other in (
        replace(SPEC, duration_s=6.0),
        replace(SPEC, host_time="2"),
        replace(SPEC, machine=replace(SPEC.machine, kv_tokens=3000)),
        replace(SPEC, setting=setting_of("priority")),
    ):
        assert store.get(other) is None
    own = replace(result, spec=replace(SPEC, setting=setting_of("sarathi")))
    store.put(own)
    assert ResultStore(tmp_path).get(own.spec) is not None
    monkeypatch.setattr(store_module, "_IRRELEVANT", ())
    for changed in (own.spec, SPEC):
        assert ResultStore(tmp_path).get(changed) is None, "its code is not the same"


def test_a_broken_file_counts_as_no_result(result, tmp_path):
    store = ResultStore(tmp_path)
    store.put(result)
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert store.get(SPEC) is None


def test_code_that_simulations_import_is_part_of_the_key():
    room = Path(store_module.__file__).parent
    nodes = [node for path in room.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "cosched.batch.store" in imported
    for folder in store_module._IRRELEVANT:
        package = f"cosched.{folder.replace('/', '.')}"
        assert not [name for name in imported if f"{name}.".startswith(f"{package}.")]


def test_results_are_a_table_with_a_row_per_run_or_per_request(result, tmp_path):
    store = ResultStore(tmp_path)
    store.put(result)
    store.put(replace(result, spec=replace(SPEC, seed=1)))
    runs = cosched.results(tmp_path)
    assert list(runs.setting) == ["s1", "s1"] and sorted(runs["spec.seed"]) == [0, 1]
    assert runs["summary.offline.num_finished"].tolist() == [3, 3]
    write_records(result.records, tmp_path / "records.jsonl")
    assert len(cosched.results(str(tmp_path / "records.jsonl"))) == 3
    (tmp_path / "run.json").write_text("a table\n" + json.dumps(result.to_dict()) + "\n")
    assert cosched.results(tmp_path / "run.json")["summary.offline.num_finished"].item() == 3
    (tmp_path / "empty").mkdir()
    for wrong, message in (("empty", "has no results"), ("none.json", "cannot read")):
        with pytest.raises(ConfigError, match=message):
            cosched.results(tmp_path / wrong)
