"""The measurements on a card, as far as they go without one."""

import json
import sys

import pytest
import torch

from cosched.lab.cost_models.cost_model import L2_SPEEDUP, ONCE_OVERHEAD, PrefixReads
from tests.scripts import script


def test_gpu_kernels_checks_in_the_interpreter_and_counts_bytes(monkeypatch, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    monkeypatch.setattr(sys, "argv", ["gpu_kernels", "--on", "cpu", "--out", str(log)])
    script("gpu_kernels").main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert result["rows"] == rows
    assert [row["step"] for row in rows] == ["check", "check", "time"]
    assert rows[-1]["kv_bytes"] == (40 + 3 * 5) * 2 * 64 * 2


def test_the_crossover_is_where_ours_stays_faster():
    def row(prefix, ours):
        return {
            "batch": 8,
            "documents": 1,
            "prefix": prefix,
            "ours_us": ours,
            "stock_shared_us": 10,
        }

    found = script("gpu_kernels").crossover(
        [row(500, 9), row(1000, 11), row(2000, 9), row(4000, 2)]
    )
    assert found["prefix"] == {"8 over 1": 2000}
    assert script("gpu_kernels").crossover([row(500, 9), row(1000, 11)])["prefix"] == {
        "8 over 1": None
    }


@pytest.mark.parametrize("name", ["gpu_kernels", "gpu_profile", "gpu_loop"])
def test_without_a_card_it_says_what_goes(monkeypatch, tmp_path, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=f"{name}: torch sees no CUDA GPU; --(on|device) cpu"):
        script(name).main()
    assert not (tmp_path / "out").exists()


def test_gpu_profile_times_tiny_shapes_and_writes_its_files(monkeypatch, tmp_path, capsys):
    """Without SGLang's kernels: those need an interpreter that is chosen at import."""
    command = ["gpu_profile", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    script("gpu_profile").main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [json.loads(line) for line in (tmp_path / "profile.jsonl").read_text().splitlines()]
    assert result["rows"] == rows == json.loads((tmp_path / "profile.json").read_text())["rows"]
    decode, mixed = rows
    assert decode["bound_bytes"] == (24 + 2 * 5) * 2 * 64 * 4
    assert min(decode[name] for name in ("ours_us", "attend_us", "reduce_us")) > 0
    assert mixed["ours_us"] > 0 and "stock_us" not in mixed
    table = (tmp_path / "profile.md").read_text()
    assert table.count("\n| 2 | 1 | 24 |") == table.count("\n| 5 | 2 | 20 | yes |") == 1


def test_the_cost_models_attention_is_that_of_a_layer():
    module = script("gpu_profile")
    shape = module.Shape(batch=32, documents=1, prefix=10_000)
    each, cached, once = (module.modelled_s(shape, "H200", reads) for reads in PrefixReads)
    # 32 contexts of 10,200 tokens of 4 KB, at some of 4.8 TB/s; all but one share 10,000 of them.
    assert 32 * 10_200 * 4096 / 4.8e12 < each < 2 * 32 * 10_200 * 4096 / 4.8e12
    distinct = (10_000 + 32 * 200) / (32 * 10_200)
    assert once == pytest.approx(ONCE_OVERHEAD * distinct * each, rel=0.01)
    assert cached == pytest.approx((distinct + (1 - distinct) / L2_SPEEDUP) * each, rel=0.01)


def test_gpu_loop_measures_the_host_and_writes_a_row_for_each_result(monkeypatch, tmp_path):
    module = script("gpu_loop")
    command = ["gpu_loop", "host", "--in-process", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert module.main() == 0
    rows = [json.loads(line) for line in (tmp_path / "loop.jsonl").read_text().splitlines()]
    *copies, fit = rows
    assert {row["step"] for row in copies} == {"copy_behind"} and fit["fits"] > 0
    assert module.markdown(rows).count("\n| pinned | 4096 |") == 1


def test_gpu_loop_times_what_the_device_did_between_two_launches():
    engines = script("gpu_engines")
    probe = engines.Probe.__new__(engines.Probe)
    first = {"decodes": 2, "new": 8, "begun": 0.0, "entered": 0.5, "start": 1.0, "end": 3.0}
    first |= {"left": 1.5, "returned": 2.0}
    second = first | {"new": 0, "replayed": 3.25, "start": 3.5, "end": 4.0, "left": 3.5}
    probe.rows = [first, second | {"begun": 3.0, "returned": 3.75}]
    _, row = probe.take()
    assert (row["launch"], row["forward"], row["device"]) == (250.0, 250.0, 500.0)
    assert (row["idle"], row["apart"], row["after"]) == (500.0, 1000.0, "mixed")
    assert engines.summary([row])["busy"] == 0.5
