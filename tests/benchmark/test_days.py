"""Offline work beside days of chat."""

from __future__ import annotations

import gzip
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.benchmark.days import (
    DAY_S,
    Load,
    Point,
    day_by_day,
    plot_days,
    print_days,
    read_load,
    run_days,
)
from cosched.errors import ConfigError
from cosched.simulation.scenario import scenario

POINTS = (
    Point(online_rate=0.0, attainment=None, offline_tokens_per_s=100.0),
    Point(online_rate=1.0, attainment=1.0, offline_tokens_per_s=60.0),
    Point(online_rate=2.0, attainment=0.9, offline_tokens_per_s=0.0),
)


def test_a_day_is_the_mean_of_its_windows():
    load = Load(times_s=(0.0, 600.0, DAY_S), rates=(1.0, 2.0, 0.5))
    first, second = day_by_day(load, POINTS)
    assert (first.day, first.online_rate, first.offline_tokens_per_s) == (1, 1.5, 30.0)
    assert first.attainment == pytest.approx((1.0 * 1 + 0.9 * 2) / 3), "by request, not by window"
    assert (second.day, second.offline_tokens_per_s, second.attainment) == (2, 80.0, 1.0)


@given(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=50))
def test_all_days_lie_between_the_points(rates):
    load = Load(times_s=tuple(600.0 * i for i in range(len(rates))), rates=tuple(rates))
    for day in day_by_day(load, POINTS):
        assert 0.0 <= day.offline_tokens_per_s <= 100.0
        assert 0.9 <= day.attainment <= 1.0


@pytest.mark.parametrize("name", ["load.csv", "load.csv.gz"])
def test_holes_are_left_out_and_the_peak_is_as_told(tmp_path, name):
    text = b"t_s,rate_rps,other\n0,10,x\n600,0,x\n1200,40,x\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    load = read_load(path).scaled(2.0)
    assert load == Load(times_s=(0.0, 1200.0), rates=(0.5, 2.0), num_holes=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("t_s,rate\n0,1\n", "no column 'rate_rps'"),
        ("t_s,rate_rps\n0,many\n", "many"),
        ("t_s,rate_rps\n0,0\n", "no window with online requests"),
        ("t_s,rate_rps\n0\n", "no number"),
    ],
)
def test_a_file_that_is_no_load_is_refused(tmp_path, text, said):
    path = tmp_path / "load.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_load(path)


def test_what_a_load_leaves_is_simulated_at_a_few_rates(small_spec, ran, tmp_path, capsys):
    base = replace(small_spec, scenario=scenario("sarathi"), duration_s=2.0)
    load = Load(times_s=(0.0, DAY_S / 2, DAY_S), rates=(6.0, 3.0, 1.0))
    days = run_days(base, load, num_points=2, num_jobs=1, quiet=True, store=None)
    assert [point.online_rate for point in days.points] == [0.0, 3.0, 6.0]
    alone, *beside = [point.offline_tokens_per_s for point in days.points]
    assert all(0 < served < alone for served in beside)
    assert days.points[0].attainment is None and days.points[2].attainment is not None
    print_days(days)
    assert "Over all" in capsys.readouterr().out
    assert plot_days(days, tmp_path / "days.png").stat().st_size > 0
    assert 0 < days.to_dict()["share_of_alone"] < 1
