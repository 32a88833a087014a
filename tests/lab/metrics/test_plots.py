"""Pictures: written, not empty, the same for the same run; and the numbers in them."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from cosched.core.request import Slo
from cosched.lab.metrics import plots
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


def test_pictures_are_written_and_the_same_for_the_same_run(tmp_path):
    records, log = small_run(0)
    run = Run(records=records, iterations=log, default_slo=SLO)
    first, second = (write_run_plots(tmp_path / name, run) for name in "ab")
    runs = {f"run {seed}": Run(records=small_run(seed)[0]) for seed in range(3)}
    summaries = {name: summarize(run.records) for name, run in runs.items()}
    compared = write_comparison_plots(tmp_path, summaries=summaries, runs=runs)
    assert (len(first), len(compared)) == (3, 3)
    assert all(is_png(path) for path in (*first, *compared))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


@pytest.mark.filterwarnings("error")
def test_an_empty_run_is_drawn_without_an_error(tmp_path):
    write_run_plots(tmp_path, Run(records=[], iterations=IterationLog()))
    write_comparison_plots(tmp_path, summaries={}, runs={})
    nothing = {"nothing": Run(records=[])}
    write_comparison_plots(tmp_path, summaries={"nothing": summarize([])}, runs=nothing)
    assert len(list(tmp_path.iterdir())) == 6


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


def test_kv_memory_over_time_is_drawn_as_it_was(tmp_path, monkeypatch):
    """One row a second for 80 s; half of the run has other values than the other half."""
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure) or path)
    counted = ("evicted_online", "evicted_offline", "recomputed_online", "recomputed_offline")
    kv = ColumnLog(("time_s", *KV_USES, "kept", *counted, *HOST_USES))
    for second in range(80):
        uses, kept = ([40, 0, 20, 0, 10, 30], 30) if second < 40 else ([10, 0, 60, 0, 20, 10], 90)
        kv.append((second, *uses, kept, 1000, 0, 500, 0, *[30] * 4))
    run = Run(records=small_run(0)[0], kv=kv, window=Window(start_s=0.0, end_s=80.0))
    plots.plot_kv_memory(run, tmp_path / "kv.png")
    memory, _, hits = figures[0].axes
    handles, names = memory.get_legend_handles_labels()
    drawn = {name: handle.get_data().values for handle, name in zip(handles, names, strict=True)}
    tops = [drawn[name] for name, _ in KV_USES.values()]
    assert [top[0] for top in tops] == [40, 40, 60, 60, 70, 100]
    assert [top[-1] for top in tops] == [10, 10, 70, 70, 90, 100]
    kept = drawn["online reservation"]
    assert (kept[0], kept[-1]) == (30, 90)
    assert drawn["on host"][0] == 120, "of the device's memory"
    assert len(hits.lines) == 2
