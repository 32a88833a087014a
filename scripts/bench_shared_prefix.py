#!/usr/bin/env python
"""Host time of planning shared prefixes: what the backend `cosched_shared_prefix` adds to an
iteration before its first kernel.

    scripts/bench_shared_prefix.py --running 256 --documents 16

Processor time of this thread, best and median of many, with groups, plan and picker. *steady*: the
same requests decode on; *changed*: one request has ended and one about any of the documents has
come; *mixed*: so it is, and a chunk of 512 tokens is computed beside the decodes; *new*: nobody was
there before. *cold*: with 32 MB read before each, which is what comes next to a server that does
other things between its plans. --arrays: without compiled code, as where there is no compiler.

    scripts/bench_shared_prefix.py --scheduler

The same in SGLang's own scheduler, median and 99th percentile of all iterations that run at least
nine tenths of --running: what the backend takes for its plan before an iteration of a tiny model,
which itself is left out. *decodes, same*: those of the iteration before; *decodes, others*: some
have ended; *mixed*: prompts are computed beside decodes; *again*: the same plan made for the fourth
time in a row. Four times --running questions are asked, each for 30 to 120 tokens. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cosched.versions import versions
from cosched_kernels import groups as groups_module
from cosched_kernels import plan as plan_module
from cosched_kernels.groups import IntArray, PrefixForest, Shared
from cosched_kernels.picker import DeviceModel, gain_s
from cosched_kernels.plan import HeadShape, Plan, Tiling, make_plan


def timed(
    repeat: int, action: Callable[[], object], before: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Best and median [us], without what is done before each."""
    times = []
    for _ in range(repeat):
        before()
        begin = time.thread_time_ns()
        action()
        times.append((time.thread_time_ns() - begin) / 1e3)
    return {"best_us": min(times), "median_us": statistics.median(times)}


def in_scheduler(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What the backend takes in a real scheduler, by kind of iteration [us]."""
    import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from cosched.config import Config, SharedPrefixConfig, configured
    from cosched.engine.port.local import LocalEngine
    from cosched.lab.demo_model import ensure_demo_model

    rng = np.random.default_rng(args.seed)
    documents = rng.integers(10, 1900, (args.documents, args.prefix)).tolist()
    num_kv = args.documents * args.prefix + args.running * (args.question + 130)
    flags = {
        "--model-path": str(ensure_demo_model(size="tiny", dtype="float32")),
        "--device": "cpu",
        "--dtype": "float32",
        "--attention-backend": "cosched_shared_prefix",
        "--max-total-tokens": str(num_kv),
        "--max-running-requests": str(args.running),
        "--context-length": str(args.prefix + args.question + 130),
        "--chunked-prefill-size": "2048",
        "--log-level": "error",
    }
    arguments = [text for flag in flags.items() for text in flag]
    arguments += ["--enable-mixed-chunk", "--disable-overlap-schedule"]
    times: dict[str, list[float]] = {}
    before: list[str] = []
    config = Config(shared_prefix=SharedPrefixConfig())
    with configured(config), LocalEngine(arguments) as engine:
        runner = engine.scheduler.tp_worker.model_runner
        shared = runner.attn_backend.cosched_shared
        shared._device_model = DeviceModel(launch_s=0.0, cache_bytes=0.0)  # tiny KV, and it pays
        prefixes, plan_of = shared._prefixes, shared.plan_of
        if args.arrays:
            prefixes._forest._host = None

        def timed_plan_of(forward_batch: Any) -> Any:
            nonlocal before
            begin = time.thread_time_ns()
            plan = plan_of(forward_batch)
            took_us = (time.thread_time_ns() - begin) / 1e3
            rids = forward_batch.rids
            kind = "decodes, same" if rids == before else "decodes, others"
            if not forward_batch.forward_mode.is_decode():
                kind = "mixed"
            before = rids
            if plan is not None and len(rids) >= 0.9 * args.running:
                times.setdefault(kind, []).append(took_us)
                for _ in range(3):
                    shared._planned = prefixes._answered.groups = None
                    prefixes._forest._made.clear()
                    begin = time.thread_time_ns()
                    plan = plan_of(forward_batch)
                    took_us = (time.thread_time_ns() - begin) / 1e3
                times.setdefault(f"{kind}, again", []).append(took_us)
            return plan

        def no_model(input_ids: Any, positions: Any, forward_batch: Any, **_: Any) -> Any:
            return LogitsProcessorOutput(
                next_token_logits=torch.zeros(forward_batch.batch_size, 2000)
            )

        shared.plan_of, runner.model.forward = timed_plan_of, no_model
        for index, document in enumerate(documents):
            engine.submit(f"d{index}", document, max_new_tokens=1, priority=-1)
        engine.run_until_idle()
        for index in range(4 * args.running):
            own = rng.integers(10, 1900, args.question).tolist()
            num_new = int(rng.integers(30, 121))
            tokens = documents[index % args.documents] + own
            engine.submit(f"q{index}", tokens, max_new_tokens=num_new, priority=-1)
        engine.run_until_idle()
    return {
        kind: {
            "iterations": len(found),
            "median_us": float(np.percentile(found, 50)),
            "p99_us": float(np.percentile(found, 99)),
        }
        for kind, found in sorted(times.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=10_000)
    parser.add_argument("--question", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scheduler", action="store_true", help="in a real scheduler")
    parser.add_argument("--arrays", action="store_true", help="without compiled code")
    args = parser.parse_args()
    if args.arrays:
        groups_module.compiled_host = plan_module.compiled_host = lambda: None
    if args.scheduler:
        rows = in_scheduler(args)
        for kind, row in rows.items():
            print(f"{kind:<22}" + "".join(f"{name} {value:8.0f}  " for name, value in row.items()))
        print(json.dumps({"config": vars(args), "versions": versions("numpy"), "results": rows}))
        return
    results, num_items = by_itself(args)
    for name, row in results.items():
        print(f"{name:<14} best {row['best_us']:8.0f} us, median {row['median_us']:8.0f} us")
    last = {"config": vars(args), "versions": versions("numpy"), "results": results}
    print(json.dumps(last | {"items": num_items}))


def by_itself(args: argparse.Namespace) -> tuple[dict[str, dict[str, float]], int]:
    """What planning takes, by what has changed, and the items of the last plan."""
    rng = np.random.default_rng(args.seed)
    documents = rng.integers(0, 30_000, (args.documents, args.prefix))
    heads = HeadShape(num_q_heads=32, num_kv_heads=8, head_dim=128)
    length = args.prefix + args.question
    tiling, device = Tiling(), DeviceModel()

    def request(document: int) -> Shared:
        own = rng.integers(0, 30_000, args.question)
        tokens = np.concatenate((documents[document], own))
        return Shared(namespace=None, tokens=tokens, length=length)

    requests = [request(index % args.documents) for index in range(args.running)]
    waiting = [request(index) for index in rng.integers(args.documents, size=args.running)]
    forest = PrefixForest()
    members = [forest.put(request) for request in requests]
    ones = np.ones(args.running, dtype=np.int64)
    decodes = {"num_queries": ones, "seq_lens": np.full(args.running, length + 100)}
    chunk = ones.copy()
    chunk[-1] = 512
    mixed = {"num_queries": chunk, "seq_lens": decodes["seq_lens"] + chunk - 1}

    def plan(lengths: dict[str, IntArray]) -> Plan:
        groups = forest.groups(members, min_saved=512)
        made = make_plan(groups, heads=heads, tiling=tiling, **lengths)
        gain_s(groups, made, heads=heads, device=device, **lengths)
        return made

    def new() -> object:
        for index, request in enumerate(requests):
            forest.remove(members[index])
            members[index] = forest.put(request)
        return plan(decodes)

    def replace() -> None:
        forest.remove(members.pop(0))
        waiting.append(requests.pop(0))
        requests.append(waiting.pop(0))
        members.append(forest.put(requests[-1]))

    def changed() -> object:
        replace()
        return plan(decodes)

    def with_chunk() -> object:
        replace()
        return plan(mixed)

    made = plan(decodes)

    def steady() -> object:
        forest.groups(members, min_saved=512)
        return made.grown(decodes["seq_lens"])

    elsewhere = np.zeros(4 << 20)
    results = {
        "new": timed(max(3, args.repeat // 20), new),
        "changed": timed(args.repeat, changed),
        "changed, cold": timed(args.repeat, changed, elsewhere.sum),
        "mixed": timed(args.repeat, with_chunk),
        "mixed, cold": timed(args.repeat, with_chunk, elsewhere.sum),
    }
    made = plan(decodes)
    results["steady"] = timed(args.repeat, steady)
    return results, len(made.items)


if __name__ == "__main__":
    main()
