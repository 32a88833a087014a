"""The script of EcoServe's figures, on runs that are made up."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import parse_config
from cosched.errors import ConfigError
from cosched.policy.registry import policy_names
from cosched.simulation.run import RunResult, config_of, engine_flags, summarize_run
from tests.metrics.samples import iterations, request
from tests.scripts import script

BENCH = script("bench_ecoserve")
CAPACITY = 10.0


def make_bench(*options):
    return BENCH.Bench(BENCH.build_parser().parse_args(options))


def made_up(spec):
    """20 s of four tokens at 0.1 s each, at the capacity twice that; beyond it four times, and a
    queue."""
    rate, num_requests = spec.online.rate, max(round(20 * spec.online.rate), 2)
    slow = 4.0 if rate > CAPACITY else 1.0 + rate / CAPACITY
    served = min(rate, CAPACITY)
    records = [
        request(
            i / rate, tuple(i / served + slow * 0.1 * n for n in range(1, 5)), admitted_s=i / served
        )
        for i in range(num_requests)
    ]
    log = iterations({"start_s": 0.0, "duration_s": 1.0, "num_online_decodes": 1})
    return RunResult(
        spec=spec,
        summary=summarize_run(spec, records, log, end_s=spec.end_s),
        records=records,
        iterations=log,
        kv=None,
        end_s=spec.end_s,
        wall_s=0.0,
        cost_model={},
        cosched=None,
    )


@pytest.fixture
def all_made_up(monkeypatch):
    asked = []

    def run(self, label, specs):
        asked.extend(specs)
        return [made_up(spec) for spec in specs]

    monkeypatch.setattr(BENCH.Bench, "run", run)
    return asked


@pytest.mark.parametrize("lengths", BENCH.LENGTHS)
@pytest.mark.parametrize("data", BENCH.DATA_SETS)
def test_what_is_known_of_lengths_is_a_configuration(lengths, data):
    bench = make_bench()
    spec = bench.spec(BENCH.ROWS["hygen"], data, 32, lengths)
    assert config_of(spec).length.mode == lengths
    known = BENCH.LENGTHS[lengths](BENCH.DATA_SETS[data])
    parse_config(json.dumps({"length": known}), source="a test")


def test_rows_are_as_the_specification_has_them():
    bench = make_bench()
    for figure, names in BENCH.FIGURE_ROWS.items():
        assert {*names} <= {*BENCH.ROWS, "sglang-tuned"}, figure
    flags = " ".join(engine_flags(bench.spec(BENCH.STOCK, "sharegpt", 32)))
    for flag in ("--max-total-tokens 14624", "--page-size 32", "--max-running-requests 512"):
        assert flag in flags
    assert "--disable-radix-cache" in flags
    assert "--disable-radix-cache" not in engine_flags(bench.spec(BENCH.ROWS["hygen"], "alpaca", 1))
    sizes = {name: machine.capacity() for name, machine in BENCH.MACHINES.items()}
    assert sizes == {"opt-13b": 14_648, "llama-33b": 12_019, "opt-175b": 55_949}


def test_the_largest_machine_has_a_larger_flood_and_an_orca_of_its_own():
    def orca_of(machine):
        bench = make_bench("--machine", machine)
        spec = bench.spec(BENCH.ROWS["eco-orca"], "sharegpt", 32)
        return spec.scenario.policy, bench.flooded(spec, "sharegpt").online.rate

    policy, rate = orca_of("opt-13b")
    assert policy == "eco-orca"
    assert orca_of("opt-175b") == ("cosched.policy.coupled:orca_of_16", 4 * rate)


def test_rows_that_are_not_there_are_named_and_left_out(monkeypatch, all_made_up, capsys):
    bench = make_bench("--quick")
    monkeypatch.setitem(BENCH.ROWS, "nobody", BENCH.Row(scenario="eco-nobody"))
    monkeypatch.setitem(BENCH.FIGURE_ROWS, "table", ("sglang", "nobody", "hygen"))
    assert list(bench.rows("table", "alpaca", 32, 1.0)) == ["sglang", "hygen"]
    assert "nobody is left out: unknown scenario 'eco-nobody'" in capsys.readouterr().err
    names = {row.scenario for row in BENCH.ROWS.values()}
    for name in names & set(policy_names()):
        config_of(bench.spec(BENCH.Row(scenario=name), "alpaca", 32))


def test_each_figure_of_rates_has_a_line_for_each_row_and_load(monkeypatch, all_made_up, capsys):
    options = "--figures stock 10 --only sglang sglang-tuned --loads 0.5 1.5".split()
    few = ["--data-sets", "alpaca", "--pages", "32", "--duration", "4", "--quick"]
    monkeypatch.setattr(sys, "argv", ["bench_ecoserve.py", *options, *few])
    BENCH.main()
    *_, last = capsys.readouterr().out.splitlines()
    said = json.loads(last)
    stock, rates, sustained = said["figures"]["stock"][0], *said["figures"]["10"]
    for lines in (stock, rates):
        assert [(line["load"], line["row"]) for line in lines] == [
            (load, row) for load in (0.5, 1.5) for row in ("sglang", "sglang-tuned")
        ]
        assert all(
            low["JCT s"] < high["JCT s"] for low, high in zip(lines[:2], lines[2:], strict=True)
        )
    [base] = said["bases"]
    assert base["capacity requests/s"] == pytest.approx(CAPACITY, rel=0.1)
    # Up to the capacity a reply takes at most twice as long as alone; beyond, over four times.
    for line in sustained:
        assert f"{line['sustained rate']:g}: " in line["tried"]
        assert 0.93 * CAPACITY < line["sustained rate"] <= CAPACITY
    timed = [spec for spec in all_made_up if spec.jct is not None]
    assert timed and {spec.jct.scale for spec in timed} == {2.0}
    assert said["versions"]["sglang"]


def test_the_search_of_sustained_rates_is_a_figure_of_its_own(all_made_up):
    few = "--data-sets alpaca --pages 32 --duration 4 --quick --only sglang --tolerance 0.1".split()
    args = BENCH.build_parser().parse_args(["--figures", "sustained", *few])
    [[line]] = BENCH.run(args)["figures"]["sustained"]
    tried = [float(text.partition(":")[0]) for text in line["tried"].split(", ")]
    asked = sorted({spec.online.rate for spec in all_made_up if spec.jct is not None})
    assert tried == pytest.approx(asked)
    rate = line["sustained rate"]
    assert rate in tried and tried[tried.index(rate) + 1] <= 1.11 * rate


def test_the_forward_size_is_that_of_the_machine():
    args = BENCH.build_parser().parse_args(["--figures", "forward"])
    args.data_dir = None
    [[line]] = BENCH.run(args)["figures"]["forward"]
    rates = {int(n.partition(" ")[0]): r for n, r in line.items() if n.endswith("tokens/s")}
    assert line["saturates"] % 128 == 0 and line["saturates"] in rates
    assert rates[line["saturates"]] >= 0.95 * max(rates.values())


@pytest.mark.parametrize("name", ["ecoserve", "ecoserve-sdo"])
def test_a_row_may_choose_at_the_end_of_each_request(name):
    bench = make_bench()
    specs = [
        bench.spec(BENCH.ROWS[row], "sharegpt", 32, "oracle") for row in (name, f"{name}-request")
    ]
    by_group, by_request = (config_of(spec).ecoserve for spec in specs)
    assert (by_group.replan_on, by_request.replan_on) == ("group", "request")
    assert by_group.reserve == by_request.reserve == 0.03
    assert {spec.scenario.policy for spec in specs} == {name}


def test_a_flood_that_is_served_is_refused(monkeypatch, all_made_up):
    bench = make_bench("--duration", "4")
    monkeypatch.setitem(
        BENCH.DATA_SETS, "alpaca", replace(BENCH.DATA_SETS["alpaca"], flood=1.1 * CAPACITY)
    )
    with pytest.raises(ConfigError, match=r"raise DataSet\.flood"):
        bench.base("alpaca", 32)


def test_sweeps_vary_one_thing(all_made_up):
    bench = make_bench()
    hygen = bench.spec(BENCH.ROWS["hygen"], "bookcorpus", 32, "oracle-noise")
    length = config_of(BENCH.SWEEPS["padding"].at(hygen, 0.3)).length
    assert (length.mode, length.sigma, length.padding) == ("oracle-noise", 0.35, 0.3)
    spec = hygen.configured(ecoserve={"reserve": 0.04, "buffer": 0.1})
    varied = dict(BENCH.SWEEPS["buffer"].at(spec, 0.2).config)
    assert varied == dict(spec.config) | {"ecoserve": {"reserve": 0.04, "buffer": 0.2}}
    offload, free = (BENCH.SWEEPS["overrun"].at(spec, name) for name in ("offload", "free"))
    assert offload.machine.host_kv_tokens > 0 == free.machine.host_kv_tokens
    loaded = bench.loaded(spec, bench.base("alpaca", 32), 1.0)
    assert BENCH.SWEEPS["slo scale"].at(loaded, 0.5).jct.limit_s(10) == pytest.approx(
        loaded.jct.limit_s(10) / 4
    )
    assert {name for names in BENCH.FIGURE_SWEEPS.values() for name in names} == {*BENCH.SWEEPS}


def test_a_picture_shows_each_sweep_over_numbers_once(all_made_up, capsys, tmp_path):
    few = ["--data-sets", "alpaca", "--pages", "32", "--duration", "4", "--quick"]
    args = BENCH.build_parser().parse_args(["--figures", "12", "4", "5", *few])
    panels = BENCH.panels(BENCH.run(args)["figures"])
    assert [panel.x for panel in panels] == ["padding", "slo scale", "reserve", "buffer"]
    for panel in panels:
        assert {*panel.lines} == {*BENCH.DRAWN}
        xs, ys = zip(*panel.lines["JCT s"], strict=True)
        assert xs == BENCH.SWEEPS[panel.x].values and max(ys) == 100


@pytest.mark.parametrize(
    "options",
    [("--between", "0", "1"), ("--between", "2", "1"), ("--tolerance", "0"), ("--plot", "x.png")],
)
def test_options_are_checked_before_anything_runs(options):
    with pytest.raises(ConfigError, match=options[0]):
        BENCH.run(BENCH.build_parser().parse_args(options))


def test_figures_2_and_6_are_one_measurement(monkeypatch, all_made_up):
    pages = []
    monkeypatch.setattr(
        BENCH, "figure_groups", lambda _, page: pages.append(page) or [[{"row": "ecoserve"}]]
    )
    args = BENCH.build_parser().parse_args(["--figures", "2", "6", "--pages", "32", "1"])
    tables = BENCH.run(args)["figures"]
    assert pages == [32, 1]
    assert tables["2"] == tables["6"]
