#!/usr/bin/env python3
"""What freshness costs and what it buys: offline requests that share nothing among many that do.

    .venv/bin/python scripts/bench_fairness.py --write docs/images/fairness.png

A job keeps sending questions on --documents documents, some far more popular than others (Zipf),
faster than the engine answers them; one request in a hundred shares its prompt with nobody. Prefix
order alone would always find one more question on a document that is cached. Each run serves the
same arrivals offline only, under the virtual clock, with another `utility_ratio` and with
`patience` or without (`cosched.offline.prefix_pool.PoolConfig`).

Shown: served tokens per second, the share of prompt tokens found cached, how long requests waited
for their first token (those still waiting at the end count with the time so far), and how many
admissions of others went before the one that was passed over most, as a share of its bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import calls_of, end, parser_of, show_rows

from cosched.core.request import RequestClass
from cosched.metrics.figure import new_figure, save, tidy
from cosched.metrics.records import RequestRecord
from cosched.offline.freshness import UtilityMix
from cosched.offline.prefix_pool import PoolConfig
from cosched.simulation.machine import Machine
from cosched.simulation.run import CostSpec, RunSpec, execute_requests
from cosched.simulation.scenario import scenario
from cosched_traces.workload import Segment, TraceRequest

RATIOS = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
ALONE = "alone"


def arrivals(args: argparse.Namespace) -> list[TraceRequest]:
    """Poisson arrivals; the rid of a request that shares nothing begins with `ALONE`."""
    rng = np.random.default_rng(args.seed)
    popularity = 1 / np.arange(1, args.documents + 1)
    popularity /= popularity.sum()
    heads = [
        Segment(key=1 + d, num_tokens=int(n))
        for d, n in enumerate(rng.integers(4000, 8000, args.documents))
    ]
    requests: list[TraceRequest] = []
    now_s = 0.0
    while (now_s := now_s + rng.exponential(1 / args.rate)) < args.duration:
        number = len(requests)
        question = Segment(key=1_000_000 + number, num_tokens=int(rng.integers(30, 60)))
        if rng.random() < args.unsharing:
            own = Segment(key=2_000_000 + number, num_tokens=int(rng.integers(4000, 8000)))
            rid, segments = f"{ALONE}-{number}", (own, question)
        else:
            head = heads[rng.choice(args.documents, p=popularity)]
            rid, segments = f"question-{number}", (head, question)
        requests.append(
            TraceRequest(
                rid=rid,
                request_class=RequestClass.OFFLINE,
                arrival_s=now_s,
                num_output_tokens=int(rng.integers(50, 150)),
                segments=segments,
            )
        )
    return requests


def measure(args: argparse.Namespace, ratio: float, patience: int) -> dict[str, Any]:
    """One run."""
    requests = arrivals(args)
    spec = RunSpec(
        scenario=scenario("offline-hygen"),
        machine=Machine(kv_tokens=args.kv_tokens),
        cost=CostSpec(name="roofline"),
        duration_s=args.duration,
        seed=args.seed,
        config=(("pool", {"utility_ratio": ratio, "patience": patience}),),
    )
    result = execute_requests(spec, [], requests)
    records = {record.rid: record for record in result.records}
    alone = [r for rid, r in records.items() if rid.startswith(ALONE)]
    others = [r for rid, r in records.items() if not rid.startswith(ALONE)]
    offline = result.summary.offline
    return {
        "utility_ratio": ratio,
        "patience": patience,
        "tokens_per_s": offline.tokens_per_s,
        "hit_ratio": offline.hit_ratio,
        "wait_p99_s": {
            ALONE: _p99_wait_s(alone, result.end_s),
            "others": _p99_wait_s(others, result.end_s),
        },
        "num_alone": len(alone),
        "num_alone_waiting": sum(r.first_token_s is None for r in alone),
        "most_of_bound": most_of_bound(
            result.records,
            ratio,
            patience,
            unseen_s=2 * max(row.duration_s for row in result.iterations),
        ),
    }


def most_of_bound(
    records: Sequence[RequestRecord], ratio: float, patience: int, *, unseen_s: float
) -> float | None:
    """Of the share of its bound that each request was passed over, the largest; None: no bound.

    unseen_s  how long after its arrival a plan may be launched that was made without it [s]
    """
    mix = UtilityMix(ratio, patience=patience)
    if mix.max_passed_over(0) is None:
        return None
    admitted = sorted(r.admitted_s for r in records if r.admitted_s is not None)
    by_age = sorted(records, key=lambda r: r.arrival_s)
    gone_s = np.array([np.inf if r.admitted_s is None else r.admitted_s for r in by_age])
    most = 0.0
    for index, record in enumerate(by_age):
        # Those admitted in the same iteration may have gone before or after: not counted.
        first = np.searchsorted(admitted, record.arrival_s + unseen_s, side="right")
        passed = np.searchsorted(admitted, gone_s[index]) - first
        bound = mix.max_passed_over(int((gone_s[:index] > record.arrival_s).sum()))
        assert bound is not None
        most = max(most, float(passed) / max(bound, 1))
    return most


def _p99_wait_s(records: Sequence[RequestRecord], end_s: float) -> float:
    waits = [(end_s if r.first_token_s is None else r.first_token_s) - r.arrival_s for r in records]
    return float(np.percentile(waits, 99)) if waits else 0.0


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    figure = new_figure(width=9.0, height=3.4)
    left, right = figure.subplots(1, 2)
    for patience, style in ((0, "o--"), (max(r["patience"] for r in rows), "s-")):
        own = [r for r in rows if r["patience"] == patience]
        x = range(len(own))
        label = f"patience {patience}"
        left.plot(x, [r["tokens_per_s"] / 1e3 for r in own], style, label=label)
        right.plot(x, [r["wait_p99_s"][ALONE] for r in own], style, label=f"alone, {label}")
    right.plot(x, [r["wait_p99_s"]["others"] for r in own], "^:", label=f"others, {label}")
    for axes in (left, right):
        axes.set_xticks(list(x), [f"{r['utility_ratio']:g}" for r in own])
        axes.legend(frameon=False, fontsize=8)
    tidy(left, title="Served offline tokens", x="utility ratio", y="1,000 tokens/s")
    tidy(right, title="Wait for the first token, p99", x="utility ratio", y="s")
    save(figure, path)


def run(args: argparse.Namespace) -> dict[str, Any]:
    cases = [(ratio, patience) for patience in (0, args.patience) for ratio in RATIOS]
    rows = calls_of(measure, args, cases)
    show_rows(
        [
            {
                "utility ratio": f"{row['utility_ratio']:g}",
                "patience": row["patience"],
                "tokens/s": row["tokens_per_s"],
                "hit %": f"{100 * row['hit_ratio']:.1f}",
                "p99 wait alone s": f"{row['wait_p99_s'][ALONE]:.0f}",
                "p99 wait others s": f"{row['wait_p99_s']['others']:.0f}",
                "alone still waiting": f"{row['num_alone_waiting']}/{row['num_alone']}",
                "most of bound %": "no bound" if bound is None else f"{100 * bound:.0f}",
            }
            for row in rows
            for bound in (row["most_of_bound"],)
        ]
    )
    if args.write is not None:
        plot(rows, args.write)
    return {"runs": rows}


def main() -> None:
    parser = parser_of(__file__, __doc__, jobs=1)
    config = PoolConfig()
    parser.add_argument("--rate", type=float, default=14.0, help="[requests/s] (%(default)s)")
    parser.add_argument("--duration", type=float, default=200.0, help="[s] (%(default)s)")
    parser.add_argument("--documents", type=int, default=120, help="(%(default)s)")
    parser.add_argument("--unsharing", type=float, default=0.01, help="part (%(default)s)")
    parser.add_argument("--kv-tokens", type=int, default=150_000, help="(%(default)s)")
    parser.add_argument("--patience", type=int, default=config.patience, help="(%(default)s)")
    parser.add_argument("--write", type=Path, metavar="PNG", help="draw it into this file")
    end(parser, run)


if __name__ == "__main__":
    main()
