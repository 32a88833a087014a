"""Cost of the lines of a job in the best batch of the job alone, and the upper bound of offline
work beside online requests, by a cost model. docs/metrics.md has the derivation.

A load is reduced to prompt tokens and decodes of the mean length and divided among equal
iterations, so that prompts and decodes always share the time of reading the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

from cosched.core.batch import BatchShape, Prefill
from cosched.lab.cost_models.cost_model import CostModel
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.metrics.stats import Window
from cosched.predict.line_cost import (
    CHUNK_TOKENS,
    LineCost,
    most_per_s,
    prompt_cost_s,
    token_cost_s,
)
from cosched_traces.trace_summary import prefix_parts
from cosched_traces.workload import TraceRequest

SIZES = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.25, 1.5, 2.0, 4.0)
"""Prompt tokens of an iteration over their mean: two sizes can be faster than equal ones."""


class _Part(NamedTuple):
    """Consecutive tokens of a prompt that the same number of lines share."""

    start: int
    num_tokens: int
    num_lines: int


class _Load(NamedTuple):
    """Sums over requests.

    num_new      prompt tokens to compute
    num_pieces   parts of prompts that they are
    positions    sum over the tokens of their mean position in the prompt
    num_decodes  output tokens after the first of each reply
    contexts     sum over the decodes of what each attends to [tokens]
    """

    num_new: float = 0.0
    num_pieces: float = 0.0
    positions: float = 0.0
    num_decodes: float = 0.0
    contexts: float = 0.0

    @classmethod
    def prompt(cls, start: int, num_tokens: int, *, share: float = 1.0) -> _Load:
        middle = start + num_tokens / 2
        return cls(share * num_tokens, share, share * num_tokens * middle)

    @classmethod
    def decodes(cls, num: float, context: float) -> _Load:
        return cls(num_decodes=num, contexts=num * context)

    @classmethod
    def total(cls, loads: Iterable[_Load]) -> _Load:
        return cls(*map(math.fsum, zip(*loads, strict=True)))

    def times(self, factor: float) -> _Load:
        return _Load(*(factor * amount for amount in self))

    def prefills(self, size: float) -> Iterator[Prefill]:
        """The prompt tokens, times `size`, as prefills of the mean length at the mean position."""
        left = round(size * self.num_new)
        if not left:
            return
        length = max(round(self.num_new / max(self.num_pieces, 1.0)), 1)
        middle = self.positions / self.num_new
        while left > 0:
            num_new = min(length, left)
            yield Prefill(num_new, max(round(middle - num_new / 2), 0))
            left -= num_new


_NOTHING = _Load()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWork:
    """The cost of a job, and upper bounds of its throughput.

    costs    rid -> cost of a line
    total_s  their sum: the time of the job in its best mix alone [s]
    load     what there is to compute
    largest  share of the job that one iteration can hold
    num_ranks  ranks of DP attention, which share the job and the online requests
    """

    costs: dict[str, LineCost]
    total_s: float
    load: _Load
    largest: float
    cost_model: CostModel
    num_ranks: int = 1

    def bound_per_s(
        self, online: Iterable[RequestRecord], window: Window, *, tpot_s: float | None
    ) -> float:
        """Upper bound of work per second [s/s] beside these online requests (docs/metrics.md).

        tpot_s  target of online requests: limit of an iteration while one of them decodes
        """
        records = [record for record in online if record.ok and record.first_s is not None]
        beside = _load_of(records, window).times(1 / window.length_s / self.num_ranks)
        most = self.num_ranks * self.total_s * self._jobs_per_s(beside, math.inf)
        if tpot_s is None:
            return most
        share = _decoding_share(records, window)
        limited = self.num_ranks * self.total_s * self._jobs_per_s(beside, tpot_s)
        return share * limited + (1 - share) * most

    def _jobs_per_s(self, beside: _Load, limit_s: float) -> float:
        return _jobs_per_s(
            self.cost_model, self.load, largest=self.largest, beside=beside, limit_s=limit_s
        )


def job_work(
    requests: Sequence[TraceRequest],
    cost_model: CostModel,
    *,
    kv_tokens: int,
    max_running: int,
    num_ranks: int = 1,
) -> JobWork:
    """Cost of the lines of a job. Lines share the cost of prompt tokens that they have in common.

    A line costs its prompt in full iterations of equal prompts, and for each decode a share of the
    largest batch that memory and slots allow, scaled to add up to the time of the best mix of both.

    kv_tokens    capacity of the KV memory
    max_running  most requests that decode in one iteration
    num_ranks    see `JobWork`; capacity and requests are of one
    """
    loads = []
    num_held = 0.0  # sum over decodes of the KV tokens that the request holds for itself
    parts = _parts(requests)
    for request, own in zip(requests, parts, strict=True):
        num_decodes = max(request.num_output_tokens - 1, 0)
        prompt = _Load.total(_Load.prompt(start, num, share=1 / of) for start, num, of in own)
        num_held += num_decodes * (prompt.num_new + request.num_output_tokens / 2)
        loads += [prompt, _Load.decodes(num_decodes, _mean_context(request))]
    load = _Load.total(loads)
    held_by_each = num_held / load.num_decodes if load.num_decodes else 1.0
    most_decodes = max(1, min(max_running, int(kv_tokens / held_by_each)))

    prompt_s = cache(partial(prompt_cost_s, cost_model.iteration_s))
    decode_s = cache(partial(token_cost_s, cost_model.iteration_s, num_decodes=most_decodes))
    costs = {}
    for request, own in zip(requests, parts, strict=True):
        # To 64 tokens: a job has thousands of lengths, and a decode hardly differs between them.
        context = max(64 * round(_mean_context(request) / 64), 1)
        costs[request.rid] = LineCost(
            prompt_s=sum(prompt_s(start, num) / of for start, num, of in own),
            token_s=decode_s(context),
        )
    apart_s = sum(costs[r.rid].total_s(r.num_output_tokens) for r in requests)
    largest = min(
        most_decodes / load.num_decodes if load.num_decodes else math.inf,
        CHUNK_TOKENS / load.num_new if load.num_new else math.inf,
    )
    total_s = 1 / _jobs_per_s(cost_model, load, largest=largest)
    scale = total_s / apart_s
    return JobWork(
        costs={
            rid: LineCost(prompt_s=scale * cost.prompt_s, token_s=scale * cost.token_s)
            for rid, cost in costs.items()
        },
        total_s=total_s,
        load=load,
        largest=largest,
        cost_model=cost_model,
        num_ranks=num_ranks,
    )


def _jobs_per_s(
    cost_model: CostModel,
    job: _Load,
    *,
    largest: float,
    beside: _Load = _NOTHING,
    limit_s: float = math.inf,
) -> float:
    """Jobs per second of equal iterations, each with the same share of the job.

    largest  share of the job that one iteration can hold
    beside   what else there is to do in each second
    limit_s  most time of an iteration [s]
    """

    def iteration_s(share: float, lasting_s: float) -> float:
        load = _Load.total([job.times(share), beside.times(lasting_s)])
        return _iteration_s(cost_model, load)

    return most_per_s(iteration_s, largest=largest, limit_s=limit_s)


def _iteration_s(cost_model: CostModel, load: _Load) -> float:
    """Mean time of iterations with this mean load: linear between whole numbers of decodes, with
    prompt tokens in iterations of two sizes if that is faster, as at steps of kernels."""
    context = max(round(load.contexts / load.num_decodes), 1) if load.num_decodes else 1
    whole = math.floor(load.num_decodes)

    def seconds(size: float, num_decodes: int) -> float:
        prefills = list(load.prefills(size))
        return cost_model.iteration_s(
            BatchShape(prefills=prefills, decodes=[context] * num_decodes)
        )

    def between(size: float) -> float:
        below_s = seconds(size, whole)
        return below_s + (load.num_decodes - whole) * (seconds(size, whole + 1) - below_s)

    times_s = {size: between(size) for size in (SIZES if load.num_new else (1.0,))}
    return min(
        small_s + (large_s - small_s) * (1 - small) / (large - small) if large > small else small_s
        for small, small_s in times_s.items()
        for large, large_s in times_s.items()
        if small <= 1 <= large
    )


def _load_of(online: Iterable[RequestRecord], window: Window) -> _Load:
    """The load of online requests in a window. A prompt counts at its first token, without tokens
    that an earlier request had computed."""
    loads = [_NOTHING]
    for record in online:
        num_prompt = record.num_prompt_tokens
        if record.first_s is not None and record.first_s in window:
            known = (record.num_cached_tokens or 0) + (record.num_lost_tokens or 0)
            loads.append(_Load.prompt(known, num_prompt - known))
        times, weight = record.emissions(until_s=window.end_s)
        num_decodes = weight * int(window.holds(times[1:]).sum())
        loads.append(_Load.decodes(num_decodes, num_prompt + record.num_output_tokens / 2))
    return _Load.total(loads)


def _decoding_share(online: Iterable[RequestRecord], window: Window) -> float:
    """Share of a window in which an online request decodes."""
    total_s, until_s = 0.0, window.start_s
    for start_s, end_s in sorted(
        (record.first_s, window.end_s if record.finish_s is None else record.finish_s)
        for record in online
        if record.first_s is not None
    ):
        end_s = min(end_s, window.end_s)
        if end_s > until_s:
            total_s += end_s - max(start_s, until_s)
            until_s = end_s
    return total_s / window.length_s


def _mean_context(request: TraceRequest) -> float:
    return request.num_prompt_tokens + request.num_output_tokens / 2


def _parts(requests: Sequence[TraceRequest]) -> list[list[_Part]]:
    """The parts of each prompt, split where the number of lines that share it changes."""
    paths = list(prefix_parts(requests))
    num_lines = Counter(node for path in paths for node, _ in path)
    parts: list[list[_Part]] = []
    for path in paths:
        start, own = 0, []
        for num_alike, group in groupby(path, key=lambda part: num_lines[part[0]]):
            num_tokens = sum(length for _, length in group)
            own.append(_Part(start, num_tokens, num_alike))
            start += num_tokens
        parts.append(own)
    return parts
