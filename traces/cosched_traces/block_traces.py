"""Readers of traces that name each prompt's prefix blocks by hash: real prefix sharing, no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from cosched_traces.errors import RowError
from cosched_traces.json_lines import Ids, json_lines
from cosched_traces.lengths import Lengths
from cosched_traces.rows import DEFAULTS, ReadOptions, Row, make_workload
from cosched_traces.seeds import key_base, rng_of
from cosched_traces.workload import Segment, Workload

MOONCAKE_BLOCK_TOKENS = 512
SERVEGEN_BLOCK_TOKENS = 16

SegmentsOf = Callable[[Row], tuple[Segment, ...]]


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Ids


class _ServegenJob(msgspec.Struct):
    input_length: int
    output_length: int | None = None
    hash_ids: Ids = ()


def read_mooncake_jsonl(path: Path, options: ReadOptions = DEFAULTS) -> Workload:
    """Mooncake: ``{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}``.

    An id stands for one block of 512 tokens and everything before it; a prompt's last block is
    mostly shorter. Equal ids become segments of equal keys: equal leading ids, a shared prefix.
    """
    rows = (
        Row(
            line,
            request.timestamp / 1000,
            request.input_length,
            request.output_length,
            _hash_ids(path, line, request, MOONCAKE_BLOCK_TOKENS),
        )
        for line, request in json_lines(path, _Mooncake)
    )
    segments = _segments(path, options, MOONCAKE_BLOCK_TOKENS)
    return make_workload(path, rows, options=options, segments_of=segments)


def read_servegen_batch_jsonl(
    path: Path,
    options: ReadOptions = DEFAULTS,
    *,
    output: Lengths | None = None,
    seed: int = 0,
) -> Workload:
    """ServeGen's offline jobs (``data/offline/trace_*.jsonl``); all requests arrive at 0.

    Traces a-c have ``input_length`` and ``hash_ids`` of 16-token blocks but no output lengths:
    those are drawn from `output`. Traces d-f have ``output_length`` and share nothing.
    """

    def rows() -> Iterator[Row]:
        rng = rng_of(seed, "servegen-batch", options.name_for(path))
        for line, job in json_lines(path, _ServegenJob):
            if job.output_length is not None:
                yield Row(line, 0.0, job.input_length, job.output_length)
            elif output is None:
                reason = "no output_length (ServeGen's traces a-c); give output= to draw it from"
                raise RowError(path, line, reason)
            else:
                hash_ids = _hash_ids(path, line, job, SERVEGEN_BLOCK_TOKENS)
                drawn = int(output.sample(rng, 1)[0])
                yield Row(line, 0.0, job.input_length, drawn, hash_ids)

    segments = _segments(path, options, SERVEGEN_BLOCK_TOKENS)
    return make_workload(path, rows(), options=options, segments_of=segments)


def _segments(path: Path, options: ReadOptions, block_tokens: int) -> SegmentsOf:
    """One segment per hash id, all of `block_tokens` but the last; without ids, one of its own."""
    name = options.name_for(path)
    shared, own = key_base("blocks", name), key_base("rows", name)

    def segments_of(row: Row) -> tuple[Segment, ...]:
        if not row.hash_ids:
            return (Segment(own + row.line, row.num_prompt_tokens),)
        *full, last = row.hash_ids
        num_last_tokens = row.num_prompt_tokens - len(full) * block_tokens
        return (
            *(Segment(shared + hash_id, block_tokens) for hash_id in full),
            Segment(shared + last, num_last_tokens),
        )

    return segments_of


def _hash_ids(path: Path, line: int, row: _Mooncake | _ServegenJob, block_tokens: int) -> Ids:
    expected = -(-row.input_length // block_tokens)
    if len(row.hash_ids) != expected:
        reason = (
            f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens; blocks of "
            f"{block_tokens} tokens make {expected}"
        )
        raise RowError(path, line, reason)
    return row.hash_ids
