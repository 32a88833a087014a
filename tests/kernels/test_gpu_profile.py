"""The profile of a card, as far as it goes without one."""

import json
import sys

import pytest

from cosched.lab.cost_models.base import PrefixReads
from cosched_kernels.picker import read_model
from tests.scripts import script


def test_it_times_tiny_shapes_and_writes_its_files(monkeypatch, tmp_path, capsys):
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


def test_what_stock_takes_becomes_the_pickers_file(monkeypatch, tmp_path):
    """With times as a card might give them: ours by the bytes, and stock by what it reads again."""
    module = script("gpu_profile")
    shapes = [module.Shape(batch=b, documents=1, prefix=p) for b in (2, 6) for p in (20, 700)]
    rows = []
    profile = module.Profile(module.Card("cpu"), num_layers=1, note=rows.append)
    profile.has_stock = True
    per_token = profile.heads.kv_bytes_per_token
    rate, us = 1e9, 0.0

    def stock(work, *, only_reduce=False):
        shape = work.shape
        read = shape.batch * (shape.prefix + shape.suffix) * per_token
        return lambda: ("stock", read / rate)

    def seconds(run):
        found = run()
        return found[1] if found else us

    monkeypatch.setattr(module.Work, "run_stock", stock)
    for name in ("run", "attend", "reduce"):
        monkeypatch.setattr(module.Work, name, lambda work, plan: None)
    monkeypatch.setattr(module, "seconds", seconds)
    for shape in shapes:
        moved = (shape.prefix + shape.batch * shape.suffix) * per_token
        us = 1e-4 + moved / rate
        profile.decodes(shape)
    profile.picker(tmp_path / "picker.json")
    profile.latency("H200")
    picker, latency = rows[-2:]
    found = read_model(tmp_path / "picker.json", device_name="CPU")
    assert found.memory_bandwidth == pytest.approx(rate)
    # Nothing was faster than memory, so nothing is taken to be cached.
    assert found.cache_bytes == 0
    assert found.launch_s < 1.1e-4
    assert picker["fitted_right"] >= 3 and picker["shapes"] == 4
    assert latency["once_overhead"]["measured"] > 1
    assert latency["l2_speedup"]["measured"] == pytest.approx(1.0)
    assert set(latency["measured_over_roofline"]) == set(PrefixReads)
    assert "once_overhead" in module.markdown(rows, "CPU")


def test_the_cost_models_attention_is_that_of_a_layer():
    module = script("gpu_profile")
    shape = module.Shape(batch=32, documents=1, prefix=10_000)
    each, cached, once = (module.modelled_s(shape, "H200", reads) for reads in PrefixReads)
    # 32 contexts of 10,200 tokens of 4 KB, at some of 4.8 TB/s; all but one share 10,000 of them.
    assert 32 * 10_200 * 4096 / 4.8e12 < each < 2 * 32 * 10_200 * 4096 / 4.8e12
    distinct = (10_000 + 32 * 200) / (32 * 10_200)
    assert once == pytest.approx(1.1 * distinct * each, rel=0.01)
    assert cached == pytest.approx((1 + distinct) / 2 * each, rel=0.01)
