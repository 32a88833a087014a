"""The command `lengths`."""

from __future__ import annotations

import json

import pytest

from cosched.lengths import main


def result_of(capsys, *arguments):
    main(arguments)
    *table, last = capsys.readouterr().out.splitlines()
    return table, json.loads(last)


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.jsonl"
    lines = [
        {"prompt": f"{'List' if i % 2 else 'Name'} {i}", "output_tokens": 200 if i % 2 else 10}
        for i in range(200)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_prompts_of_ones_own_are_judged_by_each_mode(own, capsys):
    table, result = result_of(
        capsys, "compare", "--file", str(own), "--modes", "limit,learned,oracle"
    )
    scores = result["scores"]["own.jsonl"]
    assert len(table) == 4
    assert scores["oracle"]["error"] == 0
    assert scores["limit"]["coverage"] == 1
    assert scores["learned"]["error"] < scores["limit"]["error"] / 2
    assert scores["learned"]["requests"] == 100


def test_generated_sets_need_no_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("COSCHED_DATA", raising=False)
    plot = tmp_path / "lengths.png"
    arguments = ("compare", "--sets", "words", "--modes", "limit,histogram", "--plot", str(plot))
    _, first = result_of(capsys, *arguments)
    _, again = result_of(capsys, *arguments)
    assert first == again
    assert 0.93 < first["scores"]["words"]["histogram"]["coverage"] < 0.97
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--modes", "guess"), "unknown 'guess': choose from histogram, learned, limit"),
        (("--sets", "azure-conv"), "azure-conv: needs arrivals/azure2023_conv.csv below"),
        (("--coverage", "0.3"), "--coverage"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("COSCHED_DATA", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(("compare", *arguments))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_too_few_prompts_are_told(tmp_path, capsys):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 3}\n')
    with pytest.raises(SystemExit):
        main(("compare", "--file", str(path)))
    assert "1 requests are too few" in capsys.readouterr().err


def test_times_are_told(capsys):
    _, result = result_of(capsys, "time", "--requests", "100")
    assert set(result["times"]) == {"histogram", "learned"}
    assert result["times"]["learned"]["lesson"]["median_us"] > 0
