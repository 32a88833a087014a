"""Pictures: written, not empty, the same for the same run; and the numbers in them."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array

import numpy as np
import pytest

from cosched.core.request import Slo
from cosched.lab.metrics import plots
from cosched.lab.metrics.figure import Bins
from cosched.lab.metrics.plots import (
    HOST_USES,
    KV_USES,
    Run,
    write_comparison_plots,
    write_run_plots,
)
from cosched.lab.metrics.records import ColumnLog, IterationLog, IterationRecord
from cosched.lab.metrics.stats import Window
from cosched.lab.metrics.summary import summarize
from tests.lab.metrics.samples import OFFLINE, ONLINE, request

SLO = Slo(ttft_s=1.0, tpot_s=0.05)


def small_run(seed: int):
    rng = random.Random(seed)
    records, log = [], IterationLog()
    for index in range(60):
        arrival_s = float(index)
        times = np.cumsum([arrival_s + rng.expovariate(2.0), *rng.choices((0.03, 0.06), k=9)])
        records.append(
            request(
                arrival_s,
                tuple(times),
                token_times=array("d", times),
                request_class=rng.choice((ONLINE, OFFLINE)),
                num_cached_tokens=rng.randrange(100),
                ok=index != 7,
                slo=SLO,
            )
        )
        held = {"kv_online_tokens": index, "kv_offline_tokens": 20, "kv_cached_tokens": 10}
        log.append(
            IterationRecord(
                start_s=arrival_s,
                duration_s=0.5,
                num_online_decodes=index,
                kv_free_tokens=9,
                **held,
            )
        )
    return records, log


def is_png(path) -> bool:
    data = path.read_bytes()
    return data.startswith(b"\x89PNG") and len(data) > 5000


def test_the_pictures_of_a_run(tmp_path):
    records, log = small_run(0)
    run = Run(records=records, iterations=log, default_slo=SLO)
    first = write_run_plots(tmp_path / "a", run)
    assert len(first) == 3
    assert all(is_png(path) for path in first)
    second = write_run_plots(tmp_path / "b", run)
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_the_pictures_of_several_runs(tmp_path):
    runs = {f"run {seed}": Run(records=small_run(seed)[0]) for seed in range(3)}
    summaries = {name: summarize(run.records) for name, run in runs.items()}
    written = write_comparison_plots(tmp_path, summaries=summaries, runs=runs)
    assert len(written) == 3
    assert all(is_png(path) for path in written)


def test_who_was_served_when_is_drawn_as_it_was(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure) or path)
    _, log = small_run(0)
    records = [
        request(1.0, (1.5,), slo=SLO),
        request(2.0, (3.0, 3.5), slo=SLO),  # at its target, and then too slow
        request(3.0, (9.0,), slo=SLO),
        request(4.0, (), slo=SLO),
        request(1.0, (30.0,), request_class=OFFLINE),
    ]
    runs = {
        "first": Run(records=records, iterations=log),
        "second": Run(records=records[:2], window=Window(start_s=0.0, end_s=60.0)),
    }
    plots.plot_served(runs, tmp_path / "served.png")
    first, second, memory, _ = figures[0].axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in first.lines}
    assert drawn["both targets met"] == [[1.0, 0.5]]
    assert drawn["TTFT met, TPOT missed"] == [[2.0, 1.0]]
    assert drawn["TTFT missed"] == [[3.0, 6.0]]
    assert [x for x, _ in drawn["no token"]] == [4.0]
    assert first.get_title("left") == "first: 25 % met"
    assert second.get_title("left") == "second: 50 % met"
    assert memory.patches, "the KV cache by class"
    assert first.get_ylim()[1] >= 6.0


def kv_log(rows, *, host=0):
    """One second a row: running online, returning, dead, kept, evicted and recomputed online."""
    counted = [
        f"{what}_{who}" for what in ("evicted", "recomputed") for who in ("online", "offline")
    ]
    log = ColumnLog(("time_s", *KV_USES, "kept", *counted, *HOST_USES))
    for second, (online, returning, dead, kept, evicted, recomputed) in enumerate(rows):
        free = 100 - online - returning - dead
        log.append(
            (
                second,
                online,
                0,
                returning,
                0,
                dead,
                free,
                kept,
                evicted,
                0,
                recomputed,
                0,
                *[host] * 4,
            )
        )
    return log


def test_kv_memory_over_time_is_drawn_as_it_was(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure) or path)
    early, late = (40, 20, 10, 30, 1000, 200), (10, 60, 20, 90, 1600, 500)
    kv = kv_log([early] * 40 + [late] * 40)
    window = Window(start_s=0.0, end_s=80.0)
    plots.plot_kv_memory(Run(records=small_run(0)[0], kv=kv, window=window), tmp_path / "kv.png")
    memory, evicted, hits = figures[0].axes

    def drawn(axes, name):
        named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        return named[name].get_data().values

    tops = {name: drawn(memory, name) for name, _ in KV_USES.values()}
    assert [tops[name][0] for name in tops] == [40, 40, 60, 60, 70, 100]
    assert [tops[name][-1] for name in tops] == [10, 10, 70, 70, 90, 100]
    kept = drawn(memory, "online reservation")
    assert (kept[0], kept[-1]) == (30, 90)
    # What was counted before the first row, and 600 and 300 tokens in the middle.
    width_s = 80 / len(kept)
    assert drawn(evicted, "evicted online").sum() * width_s == pytest.approx(1600)
    assert drawn(evicted, "recomputed online").max() * width_s == pytest.approx(300)
    assert not drawn(evicted, "evicted offline").any()
    assert "on host" not in memory.get_legend_handles_labels()[1]
    hosted = kv_log([early] * 40, host=30)
    run = Run(records=[], kv=hosted, window=Window(start_s=0, end_s=40))
    plots.plot_kv_memory(run, tmp_path / "kv.png")
    assert drawn(figures[1].axes[0], "on host")[0] == 120, "of the device's memory"
    assert len(hits.lines) == 2


def test_bins_keep_sums_and_means():
    bins = Bins(Window(start_s=0.0, end_s=8.0), num_events=0)
    times = np.array([0.5, 0.6, 3.0])
    assert bins.total(times, np.array([1.0, 2.0, 4.0]))[:4].tolist() == [3.0, 0.0, 0.0, 4.0]
    mean = bins.mean(times, np.array([1.0, 4.0, 5.0]), np.array([2.0, 1.0, 1.0]))
    assert (mean[0], mean[3]) == (2.0, 5.0)
    assert np.isnan(mean[1])
    p50 = bins.percentiles(times, np.array([1.0, 4.0, 5.0]), (50,))[0]
    assert (p50[0], p50[3]) == (2.5, 5.0)


@pytest.mark.filterwarnings("error")
def test_an_empty_run_is_drawn_without_an_error(tmp_path):
    write_run_plots(tmp_path, Run(records=[], iterations=IterationLog()))
    write_comparison_plots(tmp_path, summaries={}, runs={})
    nothing = {"nothing": Run(records=[])}
    write_comparison_plots(tmp_path, summaries={"nothing": summarize([])}, runs=nothing)
    assert len(list(tmp_path.iterdir())) == 6


def test_matplotlib_is_imported_only_to_draw():
    code = (
        "import sys, cosched.lab.metrics.plots\n"
        "assert not {'matplotlib', 'pandas', 'rich'} & sys.modules.keys()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
