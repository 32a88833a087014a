"""Suites: what a file may say, what is run and kept, and what its page records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched import bench
from cosched.errors import ConfigError
from cosched.lab.metrics.job import JobSummary
from cosched.lab.metrics.summary import summarize
from cosched.lab.page import Key, Page, cells_of, read_page
from cosched.lab.suite import rows_of
from cosched.lab.suite_file import read_suite, suite_names
from tests.simulated import stay_in_process

QUICK = Path(__file__).parents[2] / "docs" / "results" / "quick.md"

SMALL = """
title = "Small"
about = "Two policies."
columns = ["both met %", "job done s", "offline tokens/s"]
options = { online = "alpaca", online-rate = 6, kv-tokens = 20000, duration = 4 }

[scenarios.few]
title = "few requests"
cheap = true
options = { offline = "bros-offline", offline-requests = [10, 20] }

[settings.sarathi]
[settings."hygen, budget"]
policy = "hygen"
options = { chunked-prefill-size = 512 }
config = { latency_budget_ms = 40 }
[settings.s0]

[[targets]]
setting = "hygen, budget"
column = "job done s"
at_most = 1.5
of = ["sarathi"]
"""

OPTIONS = [
    *("--online", "alpaca", "--online-rate", "6", "--offline", "bros-offline"),
    *("--offline-requests", "40", "--duration", "4", "--kv-tokens", "20000"),
    *("--chunked-prefill-size", "512", "--cost-model", "roofline", "--quiet"),
]


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("COSCHED_DATA", raising=False)


@pytest.fixture
def ran(monkeypatch):
    """Specifications that were really run, one after the other in this process."""
    return stay_in_process(monkeypatch)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_names_known_options_policies_and_columns(name, tmp_path):
    suite = read_suite(name)
    for data_dir in (None, tmp_path):
        for row in rows_of(suite, data_dir=data_dir):
            spec = row.specs[0]
            assert row.is_cheap or spec.data_dir == (data_dir and str(data_dir))
            assert len(row.specs) == suite.seeds


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("title =", "titel =", "unknown field `titel`"),
        ("cheap = true", "cheep = true", "unknown field `cheep`"),
        ('"job done s",', '"job dun",', "unknown column 'job dun'; choose from"),
        ('of = ["sarathi"]', 'of = ["saratoga"]', "unknown setting 'saratoga'; choose from"),
        ("at_most = 1.5", "", "either `at_most` or `at_least`"),
        ("kv-tokens = 20000", "kv-tokens = [1, 2]", "got `array` - at `$.options"),
        ("duration = 4", "duration = = 4", "Invalid value"),
        ("online-rate", "onlin-rate", "few, sarathi: Unknown option: --onlin-rate"),
        ("kv-tokens = 20000", "kv-tokens = 0", "for --kv-tokens. Must be >= 1"),
        ("latency_budget_ms", "latency_bujet_ms", "few, hygen, budget: --cosched-config: "),
        ('policy = "hygen"', 'policy = "hygien"', "unknown setting 'hygien'"),
        ("[settings.s0]", "[settings.s0]\nsearch.overlap = [true]", "but the suite has not"),
        ("[[targets]]", '[[claims]]\nfigure = "1"\nsays = ""\n[[targets]]', "or `why_not`"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_before_anything_runs(small, old, new, said):
    assert old in SMALL
    small.write_text(SMALL.replace(old, new))
    with pytest.raises(ConfigError) as error:
        rows_of(read_suite(str(small)))
    assert said in str(error.value)


def test_an_unknown_suite_scenario_or_setting_is_named(small):
    with pytest.raises(ConfigError, match=r"no suite 'quik' .*choose from .*quick"):
        read_suite("quik")
    suite = read_suite(str(small))
    with pytest.raises(ConfigError, match="unknown scenario 'fev'; choose from few"):
        rows_of(suite, scenarios=["fev"])
    with pytest.raises(ConfigError, match="unknown setting 's1'; choose from"):
        rows_of(suite, settings=["s1"])


def test_a_row_is_what_simulate_runs_with_the_same_options(small):
    rows = {Key.of(row): row for row in rows_of(read_suite(str(small)), num_seeds=2)}
    row = rows[Key("few", "20", "hygen, budget")]
    assert [spec.seed for spec in row.specs] == [0, 1]
    spec = row.specs[0]
    assert spec.setting.policy == "hygen"
    assert spec.offline.num_requests == 20 and spec.online.rate == 6.0
    assert spec.machine.chunk_tokens == 512 and spec.machine.kv_tokens == 20_000
    assert dict(spec.config) == {"latency_budget_ms": 40}
    assert spec.cost.name == "roofline"


def test_a_page_is_written_resumed_and_keeps_rows_that_are_not_run_again(
    small, tmp_path, ran, capsys
):
    page, results = tmp_path / "small.md", tmp_path / "results"
    command = ["suite", str(small), "--write", str(page), "--results", str(results), "--quiet"]
    bench.main([*command, "--settings", "sarathi,s0"])
    assert len(ran) == 3, "chat alone is the same beside 10 and 20 requests"
    recorded = read_page(page).rows
    assert len(recorded) == 4
    cells = recorded[Key("few", "20", "sarathi")]
    assert float(cells["job done s"]) > 0 and cells["seeds"] == "0" and cells["commit"]
    assert recorded[Key("few", "20", "s0")]["job done s"] == ""
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["rows"][0]["cells"] == recorded[Key("few", "10", "sarathi")]

    page.write_text(page.read_text().replace(cells["commit"], "earlier"))
    bench.main(command)
    assert len(ran) == 5, "only what was not run yet"
    now = read_page(page).rows
    assert len(now) == 6 and {row["commit"] for row in now.values()} == {cells["commit"]}
    page.write_text(page.read_text().replace(cells["commit"], "earlier"))
    bench.main([*command, "--settings", "s0"])
    commits = {key.setting: row["commit"] for key, row in read_page(page).rows.items()}
    kept = page.read_text()
    bench.main([*command, "--missing", "--seeds", "2"])
    assert len(ran) == 5 and page.read_text() == kept, "the page has all rows"
    assert commits == {"sarathi": "earlier", "hygen, budget": "earlier", "s0": cells["commit"]}
    text = page.read_text()
    assert "`hygen, budget`: job done s ≤ 1.5 times the best of `sarathi` | few 10 (" in text
    assert "--online alpaca --online-rate 6" in text


def test_check_says_which_rows_no_longer_hold(small, tmp_path, ran, capsys):
    page = tmp_path / "small.md"
    common = ["--settings", "sarathi", "--quiet"]
    bench.main(["suite", str(small), *common, "--write", str(page), "--results", str(tmp_path)])
    check = ["check", str(small), *common, "--page", str(page)]
    bench.main(check)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_rows"] == 2
    cells = read_page(page).rows[Key("few", "20", "sarathi")]
    tokens = cells["offline tokens/s"]
    wrong = f"{1.02 * float(tokens.replace(',', '')):,.0f}"
    page.write_text(page.read_text().replace(f"| {tokens} |", f"| {wrong} |"))
    with pytest.raises(SystemExit) as ended:
        bench.main(check)
    assert ended.value.code == 1
    assert (
        f"few 20 sarathi: offline tokens/s was {wrong} at {cells['commit']}, now {tokens}"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit) as ended:
        bench.main([*check, "--page", str(tmp_path / "absent.md")])
    assert ended.value.code == 2


def test_recorded_results_hold_at_this_code(ran, capsys):
    """If a change of decisions is intended: `cosched bench suite quick --write
    docs/results/quick.md`."""
    some = ["--scenarios", "questions,fast-card", "--settings", "hygen,cosched"]
    bench.main(["check", "quick", *some, "--page", str(QUICK), "--quiet"])
    assert len(ran) == 3


def test_targets_are_bounds_by_case():
    suite = read_suite("quick")
    page = Page(
        {
            Key("questions", "", name): {"job done s": seconds, "both met %": "99.0 ± 1.0"}
            for name, seconds in (("cosched", "12.0"), ("hygen", "10.0"), ("bros", "> 40"))
        }
    )
    text = page.text(suite, "command")
    assert "times the best of `hygen`, `echo-bs+e+s`, `bros` |  | questions (1.2) |" in text
    assert "both met % ≥ 95 | questions (99) |  |" in text


def test_claims_of_a_paper_stand_beside_the_same_of_these_rows(small, tmp_path):
    small.write_text(
        SMALL
        + """
[[claims]]
figure = "Fig. 1"
says = "the job against stock"
reported = "half as long"
setting = "hygen, budget"
column = "job done s"
of = "sarathi"
[[claims]]
figure = "Fig. 1"
says = "the smaller job, as a change"
setting = "hygen, budget"
column = "job done s"
of = "sarathi"
values = [10]
form = "change"
[[claims]]
figure = "Fig. 2"
says = "chats in time"
setting = "s0"
column = "both met %"
[[claims]]
figure = "Fig. 3"
says = "on four GPUs"
why_not = "no table of their kernels"
"""
    )
    suite = read_suite(str(small))
    seconds = {("10", "sarathi"): "20.0", ("10", "hygen, budget"): "10.0 ± 2.0"}
    seconds |= {("20", "sarathi"): "40.0", ("20", "hygen, budget"): "5.0"}
    page = Page({Key("few", *at): {"job done s": text} for at, text in seconds.items()})
    text = page.text(suite, "command", "../images/small.png")
    assert "| Fig. 1 | the job against stock | half as long | 0.25 x (0.125 to 0.5) |" in text
    assert "| Fig. 1 | the smaller job, as a change |  | -50 % |" in text
    assert "| Fig. 2 | chats in time |  | not run |" in text
    assert "| Fig. 3 | on four GPUs |  | no table of their kernels |" in text
    assert "![Small](../images/small.png)" in text
    path = tmp_path / "page.md"
    path.write_text(text)
    assert read_page(path).rows.keys() == page.rows.keys(), "claims are no rows"


CARDS = """
title = "Cards"
about = "Two cards."
columns = ["both met %", "job done s", "% of offline-only", "TPOT p50 ms"]
options = { online = "alpaca", online-rate = 6, kv-tokens = 20000, duration = 4 }
beside = { setting = "s0", columns = ["TPOT p50 ms"] }
spread = "range"

[machines.old]
title = "An old card"
options = { gpu = "A100-80" }
scenarios.few = { offline-requests = 10 }
[machines.new]
options = { gpu = "H100" }

[scenarios.few]
title = "few requests"
options = { offline = "bros-offline", offline-requests = 40 }
[scenarios.many]
options = { offline = "bros-offline", offline-requests = 90 }
settings = ["s0", "tuned"]

[settings.s0]
[settings.offline-fcfs]
only = ["old/*"]
[settings.tuned]
policy = "s1"
search = { chunked-prefill-size = [2048, 512], mixed-chunk = [true, false] }
[settings.cosched]

[search]
alone = "s0"
options = { duration = 2 }

[ratios."% of offline-only"]
column = "job done s"
of = ["offline-fcfs"]

[[targets]]
setting = "cosched"
column = "job done s"
overall = true
at_most = 0.9
of = ["tuned", "offline-fcfs"]
keeps = { column = "both met %", of = "s0", within = 1 }
"""


@pytest.fixture
def cards(tmp_path):
    path = tmp_path / "cards.toml"
    path.write_text(CARDS)
    return read_suite(str(path))


def test_each_scenario_is_run_on_each_machine(cards):
    rows = {(row.scenario, row.setting): row.specs[0] for row in rows_of(cards)}
    assert [name for name, setting in rows if setting == "s0"] == [
        *("old/few", "old/many", "new/few", "new/many")
    ]
    sizes = {name: spec.offline.num_requests for (name, s), spec in rows.items() if s == "tuned"}
    assert sizes == {"old/few": 10, "old/many": 90, "new/few": 40, "new/many": 90}
    assert rows["new/many", "tuned"].machine.gpu == "H100"
    assert ("old/few", "offline-fcfs") in rows and ("new/few", "offline-fcfs") not in rows
    assert ("old/many", "cosched") not in rows
    assert rows["old/few", "s0"] == rows["old/many", "s0"], "chat alone is one run"
    some = rows_of(cards, scenarios=["new/*"], settings=["s0"])
    assert [row.scenario for row in some] == ["new/few", "new/many"]
    with pytest.raises(ConfigError, match=r"unknown scenario 'n/\*'; choose from new/few, "):
        rows_of(cards, scenarios=["n/*"])


def test_a_search_keeps_chat_in_time_and_then_serves_most_offline_work(cards):
    (row,) = rows_of(cards, scenarios=["old/few"], settings=["tuned"])
    ran = []

    def execute(specs):
        ran.extend(specs)
        return [result_of(spec) for spec in specs]

    def result_of(spec):
        machine = spec.machine
        is_slow = spec.setting.has_offline and machine.chunk_tokens == 2048
        joint = SimpleNamespace(ratio=0.5 if is_slow else 1.0, num_met=100, num_missed=0)
        online = SimpleNamespace(attainment=SimpleNamespace(joint=joint))
        offline = SimpleNamespace(tokens_per_s=900 if machine.mixed_chunk else 1000)
        summary = SimpleNamespace(online=online, offline=offline)
        return SimpleNamespace(summary=summary, gave_up=is_slow)

    assert row.search.best(execute) == {"chunked-prefill-size": 512, "mixed-chunk": False}
    assert len(ran) == row.search.num_runs and {spec.duration_s for spec in ran} == {2.0}
    assert ran[0].offline is None and {spec.most_misses for spec in ran[1:]} == {1}
    chosen = row.search.at({"chunked-prefill-size": 512, "mixed-chunk": False})
    assert chosen.duration_s == 4.0 and chosen.machine.chunk_tokens == 512


def test_a_page_compares_rows_and_stays_the_same_when_it_is_read_again(cards, tmp_path):
    def row(met, done, pace):
        cells = {"both met %": met, "job done s": done, "TPOT p50 ms": pace}
        return {name: cell for name, cell in cells.items() if cell}

    page = Page(
        {
            Key("old/few", "", "s0"): row("99.0", "", "8.0 (7.9 to 8.1)"),
            Key("old/few", "", "offline-fcfs"): row("", "50.0", ""),
            Key("old/few", "", "tuned"): row("97.0", "60.0", "30.0"),
            Key("old/few", "", "cosched"): row("98.5", "80.0", "20.0"),
            Key("new/few", "", "s0"): row("99.0", "", "4.0"),
            Key("new/few", "", "tuned"): row("98.5", "90.0", "30.0")
            | {"chosen": "mixed-chunk True"},
            Key("new/few", "", "cosched"): row("98.5", "> 45", "20.0"),
        }
    )
    text = page.text(cards, "command")
    assert "## old/few: An old card, few requests" in text
    assert "| `cosched` | 98.5 | 80.0 | 62 | 20.0 / 8.0 |" in text
    assert "| `offline-fcfs` |  | 50.0 | 100 |" in text
    # On the old card the tuned row does not keep chat in time, so it is no other to beat.
    assert "`offline-fcfs` with both met % at least that of `s0` - 1 | all (0.5) |" in text
    assert "| `tuned` | 0.750 |  | 0.750 | 0 of 1 |" in text
    path = tmp_path / "page.md"
    path.write_text(text)
    again = read_page(path)
    assert again.text(cards, "command") == text
    assert again.rows[Key("new/few", "", "cosched")]["TPOT p50 ms"] == "20.0"
    assert again.rows[Key("new/few", "", "tuned")]["chosen"] == "mixed-chunk True"


def test_several_seeds_show_their_mean_and_range(small):
    row, *_ = rows_of(read_suite(str(small)), settings=["s0"])
    outcomes = [SimpleNamespace(spec=replace(row.specs[0], seed=seed)) for seed in range(3)]
    for one, done in zip(outcomes, (80.0, 82.0, 90.0), strict=True):
        one.summary = replace(summarize([]), job=JobSummary(num_lines=1, makespan_s=done))
    cells = cells_of(["job done s"], outcomes, spread="range")
    assert cells["job done s"] == "84.0 (80.0 to 90.0)" and cells["seeds"] == "0-2"


def test_columns_are_drawn_against_the_varied_option(small, tmp_path):
    rows = {
        Key("few", value, "sarathi"): {"job done s": f"{value}.5", "both met %": ""}
        for value in ("10", "20")
    }
    small.write_text(SMALL.replace("cheap = true\n", ""))
    Page(rows).plot(read_suite(str(small)), tmp_path / "sweep.png")
    assert is_png(tmp_path / "sweep.png")
    with pytest.raises(ConfigError, match="no scenario of this suite varies an option"):
        Page(rows).plot(read_suite("quick"), tmp_path / "none.png")


def test_run_prints_a_table_and_one_json_line(capsys, tmp_path, ran):
    results = ["--results", str(tmp_path / "results"), "--plot", str(tmp_path / "plots")]
    bench.main(["run", "--settings", "s0,sarathi", "--seeds", "2", *results, *OPTIONS])
    assert is_png(tmp_path / "plots" / "tradeoff.png")
    shown = capsys.readouterr().out
    assert "| `sarathi` |" in shown and "±" in shown
    result = json.loads(shown.splitlines()[-1])
    assert list(result["scenarios"]) == ["s0", "sarathi"]
    assert len(ran) == 4
    assert result["versions"]["sglang"]


def test_unknown_settings_are_refused_by_name(capsys):
    for command, said in (
        (["run", "--settings", "ehco", *OPTIONS], "unknown setting 'ehco'; choose from"),
        (["suite"], "name a suite"),
    ):
        with pytest.raises(SystemExit) as ended:
            bench.main(command)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
