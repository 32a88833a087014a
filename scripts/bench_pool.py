#!/usr/bin/env python3
"""How fast and how large the offline pool is, beside SGLang's own prefix orders.

    .venv/bin/python scripts/bench_pool.py
    .venv/bin/python scripts/bench_pool.py --requests 10000 --short-requests 0 --no-stock

For each shape of requests: all are put into the pool (insert rate, memory), then it is drained,
each time looking up the next candidate and taking it out (pick: median, p99, p99.9). Memory is what
the process grew by, resident, when the requests and their tokens were there already; the limit is
1.3 times the distinct tokens at 4 bytes plus 500 bytes a request.

Shapes, all of --tokens tokens: `heads`, 57 prefixes of nine tenths of the prompt, as MMLU's
subjects with five shots; `documents`, twenty requests each behind a document of nine tenths,
shuffled; `unique`, nothing shared. `short` is --short-requests unique ones of --short-tokens.

Stock: SGLang's `SchedulePolicy` orders the same requests (`lpm`, which SGLang itself gives up above
128 waiting requests, and `dfs-weight`), with the heads in the radix cache, for one plan. Ours for
one plan is the first --plan requests of the order and taking them out.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import time
from array import array
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from typing import Any

import msgspec
import numpy as np

from cosched.core.request import RequestClass, Slo
from cosched.lab.simulation.arrivals import VOCAB_SIZE
from cosched.pool.prefix_pool import PoolConfig, PrefixPool
from cosched.versions import versions

VOCABULARY = VOCAB_SIZE
SHAPES = ["heads", "documents", "unique"]
NUM_HEADS = 57
NUM_QUESTIONS = 20
GOALS = {"inserts_per_s": 20_000, "pick_p99_us": 50}


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed must not hide what is allocated next
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A waiting offline request."""

    rid: str
    token_ids: array[int]
    arrival_seq: int
    prefix_key: Hashable = None
    slo: Slo = field(default_factory=Slo)
    arrival_s: float = 0.0
    request_class: RequestClass = RequestClass.OFFLINE
    num_output_tokens: int = 0
    max_new_tokens: int = 1
    num_computed_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)


def prompts(
    shape: str, *, count: int, num_tokens: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], Iterator[np.ndarray]]:
    """(heads, token ids of each request)."""
    head_len = num_tokens * 9 // 10 if shape in ("heads", "documents") else 0
    num_heads = {"heads": NUM_HEADS, "documents": -(-count // NUM_QUESTIONS)}.get(shape, 0)
    heads = [rng.integers(0, VOCABULARY, head_len) for _ in range(num_heads)]
    which = rng.permutation(np.arange(count) % max(num_heads, 1))

    def each() -> Iterator[np.ndarray]:
        for index in which:
            tail = rng.integers(0, VOCABULARY, num_tokens - head_len)
            yield np.concatenate([heads[index], tail]) if heads else tail

    return heads, each()


def sglang_array(ids: np.ndarray) -> array[int]:
    """Token ids as SGLang's `Req` holds them."""
    result = array("q")
    result.frombytes(ids.astype(np.int64).tobytes())
    return result


def timed(action: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def pick(pool: PrefixPool[Waiting]) -> None:
    pool.remove(next(iter(pool)).rid)


def plan(pool: PrefixPool[Waiting], count: int) -> None:
    for request in list(islice(pool, count)):
        pool.remove(request.rid)


def bench_pool(requests: list[Waiting], options: argparse.Namespace) -> dict[str, Any]:
    """Fill the pool and drain it."""
    pool: PrefixPool[Waiting] = PrefixPool(PoolConfig(utility_ratio=options.utility_ratio))
    before = resident_bytes()
    insert_s = timed(lambda: [pool.add(request) for request in requests])
    size = resident_bytes() - before
    stats = pool.stats()
    num_distinct = round(stats.num_tokens * (1 - stats.sharing_ratio))
    limit = 1.3 * 4 * num_distinct + 500 * len(requests)
    plans_s = [timed(lambda: plan(pool, options.plan)) for _ in range(20)]
    picks_s = [timed(lambda: pick(pool)) for _ in range(len(pool))]
    assert len(pool) == 0
    p50, p99, p999 = (float(value) * 1e6 for value in np.percentile(picks_s, [50, 99, 99.9]))
    return {
        "num_requests": len(requests),
        "sharing_ratio": round(stats.sharing_ratio, 4),
        "inserts_per_s": round(len(requests) / insert_s),
        "pick_p50_us": round(p50, 1),
        "pick_p99_us": round(p99, 1),
        "pick_p999_us": round(p999, 1),
        "pick_max_us": round(max(picks_s) * 1e6, 1),
        "plan_median_us": round(float(np.median(plans_s)) * 1e6, 1),
        "memory_bytes": size,
        "memory_over_distinct_bytes_per_request": round((size - 4 * num_distinct) / len(requests)),
        "memory_limit_ratio": round(size / limit, 3),
    }


def bench_stock(
    requests: list[Waiting], heads: list[np.ndarray], *, plan_us: float
) -> dict[str, Any]:
    """One computation of each of SGLang's prefix orders over the same requests."""
    import cosched.bootstrap  # noqa: F401, I001  prepares the process for sglang

    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import CacheAwarePolicy, SchedulePolicy
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
    from sglang.srt.sampling.sampling_params import SamplingParams

    cache = RadixCache.create_simulated()
    for head in heads:
        value = torch.arange(len(head), dtype=torch.int64)
        cache.insert(InsertParams(key=RadixKey(sglang_array(head)), value=value))
    reqs = [Req(request.rid, "", request.token_ids, SamplingParams()) for request in requests]
    result: dict[str, Any] = {}
    for name in ("lpm", "dfs-weight"):
        policy = SchedulePolicy(name, cache, False, False, False)
        # `calc_priority` does the same, but falls back to fcfs for lpm above 128.
        began_s = time.perf_counter()
        deprioritized = policy._compute_prefix_matches(reqs, CacheAwarePolicy(name))
        if name == "lpm":
            policy._sort_by_longest_prefix(reqs, deprioritized)
        else:
            policy._sort_by_dfs_weight(reqs, cache)
        seconds = time.perf_counter() - began_s
        result[name] = {
            "order_ms": round(seconds * 1e3, 1),
            "times_our_plan": round(seconds * 1e6 / plan_us),
        }
    return result


def bench_shape(
    shape: str, *, count: int, num_tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    rng = np.random.default_rng(options.seed)
    print(f"{shape}: making {count:,} requests of {num_tokens:,} tokens", flush=True)
    heads, each = prompts(shape, count=count, num_tokens=num_tokens, rng=rng)
    requests = [
        Waiting(rid=f"r{seq}", token_ids=sglang_array(ids), arrival_seq=seq)
        for seq, ids in enumerate(each)
    ]
    result = bench_pool(requests, options)
    print(
        f"  insert {result['inserts_per_s']:,}/s"
        f"   pick p50 {result['pick_p50_us']} us, p99 {result['pick_p99_us']} us,"
        f" p99.9 {result['pick_p999_us']} us"
        f"   plan of {options.plan} {result['plan_median_us']} us"
    )
    print(
        f"  memory {result['memory_bytes'] / 2**20:.0f} MiB:"
        f" {result['memory_over_distinct_bytes_per_request']} bytes a request over 4 bytes per"
        f" distinct token; {result['memory_limit_ratio']:.0%} of the limit",
        flush=True,
    )
    if options.stock and shape != "short":
        result["stock"] = bench_stock(requests, heads, plan_us=result["plan_median_us"])
        for name, stock in result["stock"].items():
            ratio = stock["times_our_plan"]
            order_ms = stock["order_ms"]
            print(f"  stock {name}: {order_ms:,} ms an order, {ratio:,} x our plan", flush=True)
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000, help="of each shape (100,000)")
    parser.add_argument("--tokens", type=int, default=1000, help="of each prompt (1,000)")
    parser.add_argument("--short-requests", type=int, default=1_000_000, help="1,000,000; 0: none")
    parser.add_argument("--short-tokens", type=int, default=32, help="of each (32)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        default=SHAPES,
        help="default: all",
    )
    parser.add_argument("--plan", type=int, default=32, help="requests admitted in one plan (32)")
    ratio = PoolConfig().utility_ratio
    parser.add_argument("--utility-ratio", type=float, default=ratio, help=f"of the pool ({ratio})")
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="only ours")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    options = parse()
    sizes = {shape: (options.requests, options.tokens) for shape in options.shapes}
    if options.short_requests:
        sizes["short"] = (options.short_requests, options.short_tokens)
    results = {}
    for shape, (count, num_tokens) in sizes.items():
        # Each in a process of its own: memory that another shape has freed would be reused unseen.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            run = process.submit(
                bench_shape, shape, count=count, num_tokens=num_tokens, options=options
            )
            results[shape] = run.result()
    met = all(
        result["inserts_per_s"] >= GOALS["inserts_per_s"]
        and result["pick_p99_us"] <= GOALS["pick_p99_us"]
        and result["memory_limit_ratio"] <= 1
        for result in results.values()
    )
    print(f"goals {'met' if met else 'MISSED'}: {GOALS}")
    entry = {
        "program": "bench_pool",
        "config": vars(options),
        "pool": msgspec.structs.asdict(PoolConfig(utility_ratio=options.utility_ratio)),
        "seed": options.seed,
        "versions": versions(),
        "goals": GOALS,
        "goals_met": met,
        "results": results,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(entry), flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
