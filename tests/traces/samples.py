"""Small traces as their formats write them, and requests made by hand."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

from cosched.core.request import RequestClass
from cosched_traces.trace_summary import shared_ratio
from cosched_traces.workload import Segment, TraceRequest, Workload

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURSTGPT_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def write(path: Path, *lines: str, newline: str = "\n") -> Path:
    """A text file of these lines, gzip when its name says so."""
    data = newline.join([*lines, ""]).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_jsonl(path: Path, *rows: object) -> Path:
    return write(path, *map(json.dumps, rows))


def request(rid="r", arrival_s=0.0, prompt=10, output=5, **fields) -> TraceRequest:
    """`prompt` is a number of tokens of its own, or (key, tokens) pairs."""
    pairs = ((zlib.crc32(rid.encode()), prompt),) if isinstance(prompt, int) else prompt
    segments = () if "token_ids" in fields else tuple(Segment(*pair) for pair in pairs)
    return TraceRequest(
        **{
            "rid": rid,
            "request_class": RequestClass.ONLINE,
            "arrival_s": arrival_s,
            "num_output_tokens": output,
            "segments": segments,
            **fields,
        }
    )


def workload(*requests: TraceRequest, name="w") -> Workload:
    return Workload(name=name, requests=requests)


def evenly(count: int, gap_s: float = 1.0, name="w") -> Workload:
    """`count` requests one `gap_s` apart."""
    return workload(*(request(f"{name}{i}", i * gap_s) for i in range(count)), name=name)


def lengths_of(given: Workload) -> list[tuple[int, int]]:
    return [(r.num_prompt_tokens, r.num_output_tokens) for r in given.requests]


def rids_of(given: Workload) -> list[str]:
    return [r.rid for r in given.requests]


def common_prefix(first, second) -> int:
    """Equal leading tokens of two prompts."""
    same = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        same += 1
    return same


def summarize(given: Workload) -> SimpleNamespace:
    prompts, outputs = zip(*lengths_of(given), strict=True)
    span_s = given.requests[-1].arrival_s - given.requests[0].arrival_s
    return SimpleNamespace(
        num_requests=len(prompts),
        span_s=span_s,
        mean_rate=(len(prompts) - 1) / span_s if span_s else None,
        mean_prompt_tokens=fmean(prompts),
        max_prompt_tokens=max(prompts),
        mean_output_tokens=fmean(outputs),
        max_output_tokens=max(outputs),
        shared_ratio=shared_ratio(given),
    )
