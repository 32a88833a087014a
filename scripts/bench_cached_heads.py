#!/usr/bin/env python3
"""What it is worth to serve prefixes next that online requests brought into the cache.

    .venv/bin/python scripts/bench_cached_heads.py

People ask about documents of which a batch job asks too: each of --documents documents has
--questions offline questions, all of them waiting from the start, and online questions on documents
of the job come at each of --rates. A document that somebody has just asked about is in the cache.
The pool serves its questions next (`PrefixPool.promote`), or, for comparison, when their turn
comes; policy `hygen`, the same arrivals, the virtual clock.

Shown: online requests that met both targets, the share of prompt tokens found cached of both
classes, served offline tokens per second.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from measuring import calls_of, end, parser_of, show_rows

from cosched.core.request import RequestClass, Slo
from cosched.offline.prefix_pool import PrefixPool
from cosched.simulation.machine import Machine
from cosched.simulation.run import CostSpec, RunSpec, execute_requests
from cosched.simulation.scenario import scenario
from cosched_traces.workload import Segment, TraceRequest


def requests_of(
    args: argparse.Namespace, rate: float
) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """(online, offline)."""
    rng = np.random.default_rng(args.seed)
    documents = [
        Segment(key=1 + d, num_tokens=int(n))
        for d, n in enumerate(rng.integers(1500, 4500, args.documents))
    ]

    def question(request_class: RequestClass, document: int, arrival_s: float) -> TraceRequest:
        key = int(rng.integers(1 << 40, 1 << 41))
        return TraceRequest(
            rid=f"{request_class.value}-{key}",
            request_class=request_class,
            arrival_s=arrival_s,
            num_output_tokens=int(rng.integers(50, 150)),
            segments=(documents[document], Segment(key=key, num_tokens=int(rng.integers(30, 60)))),
        )

    numbers = rng.permutation(np.repeat(np.arange(args.documents), args.questions))
    offline = [question(RequestClass.OFFLINE, d, 0.0) for d in numbers]
    online, now_s = [], 0.0
    while (now_s := now_s + rng.exponential(1 / rate)) < args.duration:
        online.append(question(RequestClass.ONLINE, rng.integers(args.documents), now_s))
    return online, offline


def measure(args: argparse.Namespace, rate: float, promotes: bool) -> dict[str, Any]:
    """One run."""
    if not promotes:
        PrefixPool.promote = lambda self, request: None  # type: ignore[method-assign]
    spec = RunSpec(
        scenario=scenario("hygen"),
        machine=Machine(kv_tokens=args.kv_tokens),
        cost=CostSpec(name="roofline"),
        slo=Slo(ttft_s=1.0, tpot_s=0.05),
        duration_s=args.duration,
        seed=args.seed,
    )
    summary = execute_requests(spec, *requests_of(args, rate)).summary
    return {
        "rate": rate,
        "promotes": promotes,
        "online_hit_ratio": summary.online.hit_ratio,
        "offline_hit_ratio": summary.offline.hit_ratio,
        "offline_tokens_per_s": summary.offline.tokens_per_s,
        "both_met": summary.online.attainment.joint.ratio,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows = calls_of(measure, args, [(rate, on) for rate in args.rates for on in (False, True)])
    show_rows(
        [
            {
                "online req/s": f"{row['rate']:g}",
                "next when cached": "yes" if row["promotes"] else "no",
                "both met %": f"{100 * row['both_met']:.1f}",
                "online hit %": f"{100 * row['online_hit_ratio']:.1f}",
                "offline hit %": f"{100 * row['offline_hit_ratio']:.1f}",
                "offline tokens/s": row["offline_tokens_per_s"],
            }
            for row in rows
        ]
    )
    return {"runs": rows}


def main() -> None:
    parser = parser_of(__file__, __doc__, jobs=1)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0], metavar="REQ/S"
    )
    parser.add_argument("--duration", type=float, default=120.0, help="[s] (%(default)s)")
    parser.add_argument("--documents", type=int, default=1500, help="(%(default)s)")
    parser.add_argument("--questions", type=int, default=5, help="of each (%(default)s)")
    parser.add_argument("--kv-tokens", type=int, default=150_000, help="(%(default)s)")
    end(parser, run)


if __name__ == "__main__":
    main()
