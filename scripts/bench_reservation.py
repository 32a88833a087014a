#!/usr/bin/env python3
"""How well the KV kept for online requests bounds what they need (Echo Fig. 11).

    .venv/bin/python scripts/bench_reservation.py --data-dir DIR --write docs/images/reservation.png

The KV demand of a trace, second by second, from its arrivals and lengths alone: a request holds its
prompt from its arrival on and a token more for each --tpot seconds, until its reply is complete. So
the demand does not depend on who schedules. `OnlineDemand` sees a sample a second. Shown for each
trace and number of deviations k, after the first minute:

    kept     mean of what is kept, in means of the demand
    N s      share of the seconds after which the demand stays below it for N seconds
    cold     the same for 10 s, of the first minute alone
    behind   the longest time for which the demand was above what was kept a second before [s]

and all of it for Echo's published form too: mean and deviations of the window, nothing more.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from measuring import end, parser_of, show_rows

from cosched.kv.demand import OnlineDemand
from cosched.metrics.figure import new_figure, save, tidy
from cosched.metrics.records import Floats
from cosched_traces.catalogue import load_workload

TRACES = (
    ("azure-conv", 2.5),
    ("azure-conv", None),
    ("mooncake-synthetic", None),
    ("azure-like", 2.5),
    ("burst", 2.0),
)
"""Workloads of the catalogue and their rates; None: the trace's own."""

AHEAD_S = (1, 10, 30)
WARM_S = 60
WINDOW_S = 300


def demand_of(args: argparse.Namespace, name: str, rate: float | None) -> Floats:
    """Tokens at each whole second."""
    workload = load_workload(
        name, seed=args.seed, data_dir=args.data_dir, rate=rate, duration_s=args.duration
    )
    demand = np.zeros(int(args.duration))
    for request in workload.requests:
        num_prompt = sum(segment.num_tokens for segment in request.segments)
        end_s = request.arrival_s + args.ttft + args.tpot * request.num_output_tokens
        seconds = np.arange(np.ceil(request.arrival_s), min(end_s, args.duration), dtype=int)
        decoded = (seconds - request.arrival_s - args.ttft) / args.tpot
        demand[seconds] += num_prompt + np.clip(decoded, 0, request.num_output_tokens)
    return demand


def kept_of(demand: Floats, deviations: float) -> Floats:
    """What is kept after each second's sample."""
    online = OnlineDemand(window_s=WINDOW_S, deviations=deviations)
    kept = np.zeros(len(demand))
    for second, tokens in enumerate(demand):
        online.sample(round(tokens), float(second))
        kept[second] = online.reserve
    return kept


def published(demand: Floats, deviations: float) -> Floats:
    """Echo §5.3: mean and deviations of the window."""
    windows = (demand[max(0, s + 1 - WINDOW_S) : s + 1] for s in range(len(demand)))
    return np.array([window.mean() + deviations * window.std() for window in windows])


def covered(demand: Floats, kept: Floats, ahead_s: int) -> Floats:
    """Of each second, whether what is kept suffices for so many seconds."""
    ahead = np.lib.stride_tricks.sliding_window_view(demand[1:], ahead_s).max(axis=1)
    return ahead <= kept[: len(ahead)]


def measure(demand: Floats, kept: Floats) -> dict[str, float]:
    longest = behind = 0
    for short in demand[WARM_S + 1 :] > kept[WARM_S:-1]:
        behind = behind + 1 if short else 0
        longest = max(longest, behind)
    return {
        "kept": float(kept[WARM_S:].mean() / demand[WARM_S:].mean()),
        **{f"{n} s": float(covered(demand, kept, n)[WARM_S:].mean()) for n in AHEAD_S},
        "cold": float(covered(demand, kept, 10)[:WARM_S].mean()),
        "behind": float(longest),
    }


def draw(demand: Floats, name: str, path: Path) -> None:
    figure = new_figure()
    axes = tidy(figure.subplots(), title=f"KV of {name}", x="time [s]", y="tokens")
    for deviations, colour in ((1, "#F5D48F"), (2, "#E69F00"), (3, "#8C2D04")):
        label = f"kept, k = {deviations}"
        axes.plot(kept_of(demand, deviations), lw=1.2, color=colour, label=label)
    axes.plot(demand, lw=0.9, color="#0072B2", label="needed")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=4, fontsize=9)
    save(figure, path)


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for name, rate in TRACES:
        demand = demand_of(args, name, rate)
        for k in (1, 2, 3):
            for form, kept in (("", kept_of(demand, k)), ("published", published(demand, k))):
                trace = name if rate is None else f"{name} at {rate:g}/s"
                rows.append({"trace": trace, "k": k, "form": form, **measure(demand, kept)})
        if args.write is not None and not rows[6:]:
            draw(demand, rows[0]["trace"], args.write)
    show_rows(rows)
    return {"rows": rows}


def main() -> None:
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with the traces")
    parser.add_argument("--duration", type=float, default=1000.0, help="[s] (%(default)s)")
    parser.add_argument("--ttft", type=float, default=0.2, help="[s] (%(default)s)")
    parser.add_argument("--tpot", type=float, default=0.025, help="[s] (%(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="draw the first trace there")
    end(parser, run)


if __name__ == "__main__":
    main()
