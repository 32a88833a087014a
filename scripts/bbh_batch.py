#!/usr/bin/env python3
"""BIG-Bench Hard as an offline job: every question behind its task's three worked examples.

    .venv/bin/python scripts/bbh_batch.py write --data DIR -o bbh.jsonl
    .venv/bin/python scripts/bbh_batch.py run --data DIR --out out/bbh
    .venv/bin/python scripts/bbh_batch.py run --data DIR --out out/bbh --policy hygen --rate 0 \\
        --lines 300 --kv-tokens 12000 --concurrency 300

``write`` makes the input of ``python -m cosched.run_batch``. ``run`` also serves a demo model,
sends the job beside a light stream of online requests (none with ``--rate 0``), and checks that
every line was answered once. ``--lines`` takes so many lines by chance, in mixed order: with a KV
pool that does not hold all tasks' prefixes, what is computed then depends on the order of the pool.

DIR (default: $COSCHED_DATA) holds ``tasks/*.json`` and ``cot-prompts/*.txt`` of
https://github.com/suzgunmirac/BIG-Bench-Hard, by themselves or in ``prompts/bbh``. The project
ships neither.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cosched.batch.jsonl.server import serving
from cosched.command_line import run_async
from cosched.errors import ConfigError, CoschedError
from cosched.lab.benchmark.live import LiveTarget, run_live
from cosched.lab.benchmark.own_server import leave_a_core_free
from cosched.lab.demo_model import SIZES, ensure_demo_model
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.metrics.stats import to_dict
from cosched.lab.metrics.summary import Summary, summarize
from cosched.lab.simulation.arrivals import Arrival, Source
from cosched.lab.simulation.clients import online_client
from cosched.policies import POLICIES
from cosched.versions import versions
from cosched_traces.builders import DEMO_MEAN_RATE
from cosched_traces.catalogue import load_workload
from cosched_traces.workload import TraceRequest

MODEL = "demo"
DTYPE = "bfloat16"
LONGEST_S = 4 * 3600.0  # the online trace is made for so long
SERVER_FLAGS = (
    *("--dtype", DTYPE),
    *("--served-model-name", MODEL),
    *("--chunked-prefill-size", "512"),
    *("--max-running-requests", "16"),
    *("--mem-fraction-static", "0.2"),
    "--enable-cache-report",  # answers then say how many prompt tokens were in the prefix cache
)


def lines(data: Path, *, max_tokens: int) -> Iterator[dict[str, Any]]:
    """The job's lines, task after task in the order of their names."""
    folder = data if (data / "tasks").is_dir() else data / "prompts" / "bbh"
    tasks = sorted((folder / "tasks").glob("*.json"))
    if not tasks:
        raise ConfigError(f"no tasks/*.json of BIG-Bench Hard in {data} (--data, $COSCHED_DATA)")
    for path in tasks:
        # A header that warns against training on the file ends with a line of dashes.
        shots = (folder / "cot-prompts" / f"{path.stem}.txt").read_text().split("-----\n", 1)[-1]
        examples = json.loads(path.read_text())["examples"]
        for index, example in enumerate(examples):
            prompt = f"{shots.strip()}\n\nQ: {example['input']}\nA: Let's think step by step.\n"
            yield {
                "custom_id": f"{path.stem}/{index}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "model": MODEL,
                    "prompt": prompt,
                    "max_tokens": max_tokens,
                    "temperature": 0,
                },
            }


def write(path: Path, options: argparse.Namespace) -> int:
    """How many lines were written."""
    chosen = list(lines(options.data, max_tokens=options.max_tokens))
    if options.lines is not None:
        chosen = random.Random(options.seed).sample(chosen, options.lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in chosen)
    return len(chosen)


def checked(job: Path, answers: Path) -> dict[str, int]:
    """Whether every line of the job was answered once, and what the answers say of their tokens."""
    wanted = {json.loads(line)["custom_id"] for line in job.open()}
    found: Counter[str] = Counter()
    tokens = Counter(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
    for line in answers.open():
        answer = json.loads(line)
        found[answer["custom_id"]] += 1
        usage = answer["response"]["body"]["usage"]
        tokens["prompt_tokens"] += usage["prompt_tokens"]
        tokens["completion_tokens"] += usage["completion_tokens"]
        tokens["cached_tokens"] += (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return {
        "lines": len(wanted),
        "answers": found.total(),
        "unique_custom_ids": len(found),
        "duplicates": found.total() - len(found),
        "missing": len(wanted - found.keys()),
        "unknown": len(found.keys() - wanted),
        **tokens,
    }


class While:
    """A source of requests that has nothing more once `is_on` says so."""

    def __init__(self, source: Source, is_on: Callable[[], bool]) -> None:
        self._source, self._is_on = source, is_on

    def due(self, now_s: float) -> Iterable[Arrival]:
        return self._source.due(now_s) if self._is_on() else ()

    def next_s(self) -> float | None:
        return self._source.next_s() if self._is_on() else None

    def on_finish(self, record: RequestRecord, output_ids: Sequence[int] | None = None) -> None:
        self._source.on_finish(record, output_ids)


async def serve_and_answer(
    online: Sequence[TraceRequest], options: argparse.Namespace, *, job: Path
) -> tuple[list[RequestRecord], float]:
    """Run the job beside the online requests: their records, and the job's seconds."""
    answers = options.out / "answers.jsonl"
    async with serving(
        model_path=str(ensure_demo_model(size=options.size, dtype=DTYPE)),
        flags=[*server_flags(options), "--cosched-policy", options.policy],
        log_path=answers.with_name("server.log"),
        port=options.port,
    ) as base_url:
        run_batch = [sys.executable, "-m", "cosched.run_batch", "-i", str(job), "-o", str(answers)]
        run_batch += ["--base-url", base_url, "--concurrency", str(options.concurrency)]
        run_batch += ["--overwrite", "--progress-every", "30"]
        began_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(*run_batch)
        try:
            source = While(
                online_client(online, vocab_size=2000), lambda: process.returncode is None
            )
            target = LiveTarget(base_url=base_url, model=MODEL)
            async with asyncio.TaskGroup() as beside:
                chat = beside.create_task(run_live(target, [source], duration_s=LONGEST_S))
                code = await process.wait()
                seconds = time.monotonic() - began_s
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
    if code not in (0, 1):  # 1: some lines failed, which the check reports
        raise CoschedError(f"run_batch ended with exit code {code}")
    return chat.result(), seconds


def server_flags(options: argparse.Namespace) -> tuple[str, ...]:
    pool = ("--max-total-tokens", str(options.kv_tokens))
    return (*SERVER_FLAGS, *pool, "--schedule-policy", options.schedule_policy)


def run(options: argparse.Namespace) -> int:
    job, answers = options.out / "bbh.jsonl", options.out / "answers.jsonl"
    write(job, options)
    leave_a_core_free()
    online: Sequence[TraceRequest] = ()
    if options.rate:
        rate = DEMO_MEAN_RATE * options.rate
        online = load_workload(
            "demo-chat", seed=options.seed, rate=rate, duration_s=LONGEST_S
        ).requests
    records, seconds = run_async(serve_and_answer(online, options, job=job))
    counts = checked(job, answers)
    report(options, counts=counts, summary=summarize(records), seconds=seconds)
    once = counts["answers"] == counts["unique_custom_ids"] == counts["lines"]
    return 0 if once and not counts["missing"] else 1


def report(
    options: argparse.Namespace, *, counts: dict[str, int], summary: Summary, seconds: float
) -> None:
    hit_rate = counts["cached_tokens"] / max(1, counts["prompt_tokens"])
    print(f"{counts['lines']} lines, {counts['answers']} answers in {seconds:.0f} s")
    print(f"duplicates: {counts['duplicates']}, missing: {counts['missing']}")
    tokens_per_s = (counts["prompt_tokens"] + counts["completion_tokens"]) / seconds
    print(f"prompt tokens: {counts['prompt_tokens']:,}, of them cached: {hit_rate:.1%}")
    print(f"tokens/s of prompt and reply: {tokens_per_s:,.0f}")
    online = summary.online
    print(f"online: {online.num_requests} requests, {online.num_failed} failed")
    for name, value in (("TTFT", online.ttft_s), ("TPOT", online.tpot_s)):
        if value.p50 is not None and value.p99 is not None:
            print(f"  {name} p50 {1e3 * value.p50:.0f} ms, p99 {1e3 * value.p99:.0f} ms")
    entry = {
        "program": "bbh_batch",
        "config": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name not in ("data", "action")
        },
        "server_flags": server_flags(options),
        "seed": options.seed,
        "versions": versions(),
        "results": {
            **counts,
            "seconds": round(seconds, 1),
            "lines_per_s": round(counts["answers"] / seconds, 2),
            "tokens_per_s": round(tokens_per_s),
            "cached_ratio": round(hit_rate, 4),
            "online": to_dict(online),
            "load_average": os.getloadavg()[0],
        },
    }
    print(json.dumps(entry), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    writing = actions.add_parser("write", help="make the JSONL file")
    running = actions.add_parser("run", help="make it, serve a demo model, answer it, check")
    data = os.environ.get("COSCHED_DATA")
    for action in (writing, running):
        action.add_argument("--data", type=Path, default=data, required=data is None)
        action.add_argument("--max-tokens", type=int, default=8, help="of a reply (default: 8)")
        action.add_argument("--lines", type=int, help="so many, in mixed order (all, in order)")
        action.add_argument("--seed", type=int, default=0, help="of lines and online requests (0)")
    writing.add_argument("-o", "--output", type=Path, required=True)
    running.add_argument("--out", type=Path, default=Path("out/bbh"), help="folder of the results")
    running.add_argument("--size", choices=sorted(SIZES), default="tiny", help="default: tiny")
    running.add_argument("--rate", type=float, default=0.5, help="online requests/s (0.5)")
    running.add_argument("--concurrency", type=int, default=64, help="offline requests (64)")
    running.add_argument("--policy", choices=sorted(POLICIES), default="sarathi")
    running.add_argument("--schedule-policy", default="fcfs", help="where stock schedules (fcfs)")
    running.add_argument("--kv-tokens", type=int, default=100_000, help="KV pool (100,000)")
    running.add_argument("--port", type=int, help="default: one that is free")
    return parser.parse_args()


def main() -> int:
    options = parse()
    try:
        if options.action == "run":
            return run(options)
        count = write(options.output, options)
        print(f"{options.output}: {count} lines")
    except KeyboardInterrupt:
        print("bbh_batch: interrupted", file=sys.stderr)
        return 130
    except CoschedError as error:
        print(f"bbh_batch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
