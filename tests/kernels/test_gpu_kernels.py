"""The measurement on a card, as far as it goes without one."""

import json
import sys

from tests.scripts import script


def test_it_checks_in_the_interpreter_and_counts_bytes(monkeypatch, tmp_path, capsys):
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
