#!/usr/bin/env python
"""Host time of planning shared prefixes: what the backend `cosched_shared_prefix` adds to an
iteration before its first kernel.

    scripts/bench_shared_prefix.py --running 256 --documents 16

Processor time of this thread, best and median of many, with groups, plan and picker. *steady*: the
same requests decode on; *changed*: one request has ended and another has come; *new*: nobody was
there before. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from cosched_kernels.groups import PrefixForest, Shared
from cosched_kernels.picker import DeviceModel, gain_s
from cosched_kernels.plan import HeadShape, Plan, Tiling, make_plan


def timed(repeat: int, action: Callable[[], object]) -> dict[str, float]:
    """Best and median [us]."""
    times = []
    for _ in range(repeat):
        begin = time.thread_time_ns()
        action()
        times.append((time.thread_time_ns() - begin) / 1e3)
    return {"best_us": min(times), "median_us": statistics.median(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=10_000)
    parser.add_argument("--question", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    documents = rng.integers(0, 30_000, (args.documents, args.prefix))
    heads = HeadShape(num_q_heads=32, num_kv_heads=8, head_dim=128)
    length = args.prefix + args.question

    tiling, device = Tiling(), DeviceModel()

    def request(index: int) -> Shared:
        own = rng.integers(0, 30_000, args.question)
        tokens = np.concatenate((documents[index % args.documents], own))
        return Shared(namespace=None, tokens=tokens, length=length)

    requests = [request(index) for index in range(args.running)]
    forest = PrefixForest()
    members = [forest.put(request) for request in requests]
    lengths = {
        "num_queries": np.ones(args.running, dtype=np.int64),
        "seq_lens": np.full(args.running, length + 100),
    }

    def plan() -> Plan:
        groups = forest.groups(members, min_saved=512)
        made = make_plan(groups, heads=heads, tiling=tiling, **lengths)
        gain_s(groups, made, heads=heads, device=device, **lengths)
        return made

    def new() -> object:
        for index, request in enumerate(requests):
            forest.remove(members[index])
            members[index] = forest.put(request)
        return plan()

    def changed() -> object:
        forest.remove(members[0])
        del members[0]
        requests.append(requests.pop(0))
        members.append(forest.put(requests[-1]))
        return plan()

    results = {"new": timed(max(3, args.repeat // 20), new), "changed": timed(args.repeat, changed)}
    made = plan()

    def steady() -> object:
        forest.groups(members, min_saved=512)
        return made.grown(lengths["seq_lens"])

    results["steady"] = timed(args.repeat, steady)
    for name, row in results.items():
        print(f"{name:<8} best {row['best_us']:8.0f} us, median {row['median_us']:8.0f} us")
    print(json.dumps({"config": vars(args), "results": results, "items": len(made.items)}))


if __name__ == "__main__":
    main()
