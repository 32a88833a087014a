"""Prompts with the lengths that their responses really got: what length estimates are judged by."""

from __future__ import annotations

import csv
import json
import math
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from cosched_traces.block_traces import read_mooncake_jsonl
from cosched_traces.csv_traces import read_azure_csv
from cosched_traces.errors import RowError, WorkloadError
from cosched_traces.json_lines import json_lines
from cosched_traces.rows import numbered_lines
from cosched_traces.seeds import rng_of
from cosched_traces.workload import TraceRequest

__all__ = ["RESPONSE_SETS", "Response", "ResponseSet", "read_responses_jsonl"]

_WORD = re.compile(r"\w+|[^\w\s]")
_BYTES_PER_TOKEN = 4
_HEAD_BLOCKS = 2
"""Of a trace that tells its prompts by blocks: what a template could be."""


class Response(NamedTuple):
    """prompt  token ids; where a trace has no text, as much as it tells: empty, or its head
    num_prompt_tokens, num_output_tokens  their true numbers
    stream  requests of one stream come one after the other, and are learned from together
    """

    prompt: Sequence[int]
    num_prompt_tokens: int
    num_output_tokens: int
    stream: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSet:
    """summary  what it is
    delay    requests that are under way when one arrives: what it is told comes from before them
    files    below the data folder; none: it is generated
    make     responses in the order of arrival, of the data folder and a seed
    """

    summary: str
    delay: int
    make: Callable[[Path, int], list[Response]]
    files: tuple[str, ...] = ()

    def is_there(self, data_dir: Path | None) -> bool:
        if not self.files:
            return True
        return data_dir is not None and all((data_dir / name).is_file() for name in self.files)


def words_of(text: str) -> array[int]:
    """Stands in for a tokenizer: one id per word and mark, equal in every process."""
    return array("q", [zlib.crc32(word.encode()) for word in _WORD.findall(text)])


def tokens_of(text: str) -> int:
    """About how many tokens a text has."""
    return max(math.ceil(len(text.encode()) / _BYTES_PER_TOKEN), 1)


def read_responses_jsonl(path: Path) -> list[Response]:
    """Lines of ``{"prompt": text, "output_tokens": n}``, or with the ``response`` itself in place
    of its length; ``"model"`` names a stream. Raises `WorkloadError`."""
    return [_of_line(path, line, given) for line, given in json_lines(path, _Given)]


class _Given(msgspec.Struct):
    prompt: str
    output_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    response_tokens_est: Annotated[int, msgspec.Meta(ge=0)] | None = None
    response: str | None = None
    model: Any = ""


def _of_line(path: Path, line: int, given: _Given) -> Response:
    length = given.response_tokens_est if given.output_tokens is None else given.output_tokens
    if length is None and given.response is not None:
        length = tokens_of(given.response)
    if length is None:
        raise RowError(path, line, "neither output_tokens nor a response")
    return Response(words_of(given.prompt), tokens_of(given.prompt), length, str(given.model))


def _shuffled(responses: list[Response], seed: int, name: str) -> list[Response]:
    """Streams one after the other, each in random order."""
    order = rng_of(seed, "responses", name).permutation(len(responses))
    return sorted((responses[i] for i in order), key=lambda response: response.stream)


def _texts(name: str) -> Callable[[Path, int], list[Response]]:
    def make(data_dir: Path, seed: int) -> list[Response]:
        return _shuffled(read_responses_jsonl(data_dir / name), seed, name)

    return make


def _azure(data_dir: Path, seed: int) -> list[Response]:
    requests = read_azure_csv(data_dir / _AZURE).requests
    return [Response((), r.num_prompt_tokens, r.num_output_tokens) for r in requests]


def _mooncake(name: str) -> Callable[[Path, int], list[Response]]:
    def make(data_dir: Path, seed: int) -> list[Response]:
        return [
            Response(_head(request), request.num_prompt_tokens, request.num_output_tokens)
            for request in read_mooncake_jsonl(data_dir / name).requests
        ]

    return make


def _head(request: TraceRequest) -> array[int]:
    """Its first blocks, each as 64 tokens that are equal where the block is."""
    keys = [segment.key & 0xFFFFFFFF for segment in request.segments[:_HEAD_BLOCKS]]
    return array("q", [key for key in keys for _ in range(64)])


def _gsm8k(data_dir: Path, seed: int) -> list[Response]:
    path = data_dir / _GSM8K
    rows = csv.DictReader(text for _, text in numbered_lines(path))
    models = [name for name in rows.fieldnames or () if "response" in name]
    if not models:
        raise WorkloadError(f"{path}: no column holds responses")
    responses = [
        Response(words_of(row["prompt"]), tokens_of(row["prompt"]), tokens_of(row[model]), model)
        for row in rows
        for model in models
    ]
    return _shuffled(responses, seed, "gsm8k")


def _repeats(data_dir: Path, seed: int) -> list[Response]:
    """2,000 prompts, of which only ids are known, answered at four temperatures one after the
    other."""
    with_text = "".join(text for _, text in numbered_lines(data_dir / _REPEATS))
    rows = json.loads(with_text)[:2000]
    order = rng_of(seed, "responses", "repeats").permutation(len(rows))
    temperatures = ("L_t0.0", "L_t0.3", "L_t0.5", "L_t0.7")
    return [
        Response(array("q", [int(rows[i]["id"])]), 1, rows[i][temperature])
        for temperature in temperatures
        for i in order
    ]


def _templates(data_dir: Path, seed: int) -> list[Response]:
    """Six applications, each with a prompt of its own in front; their lengths are of six kinds."""
    rng = rng_of(seed, "responses", "templates")
    kinds = [(3, 0.1), (40, 0.3), (120, 0.5), (300, 0.2), (700, 0.4), (60, 1.2)]
    heads = rng.integers(0, 30_000, size=(len(kinds), 80))
    responses = []
    for kind in rng.integers(len(kinds), size=6000):
        median, sigma = kinds[kind]
        tail = rng.integers(0, 30_000, size=int(rng.integers(10, 400)))
        prompt = array("q", [*heads[kind].tolist(), *tail.tolist()])
        length = max(1, round(median * math.exp(rng.normal(0, sigma))))
        responses.append(Response(prompt, len(prompt), length))
    return responses


def _words(data_dir: Path, seed: int) -> list[Response]:
    """Chats without a template: three of 3,000 words decide about the length, by a factor each."""
    rng = rng_of(seed, "responses", "words")
    factors = np.exp(rng.normal(0, 0.12, size=3000))
    responses = []
    for _ in range(6000):
        ids = np.minimum(rng.zipf(1.3, size=int(rng.integers(8, 60))), 3000) - 1
        length = 150 * float(np.prod(factors[ids])) * math.exp(rng.normal(0, 0.4))
        responses.append(Response(array("q", ids.tolist()), len(ids), max(1, round(length))))
    return responses


def _drift(data_dir: Path, seed: int) -> list[Response]:
    """Lengths that say nothing about their prompts; their scale moves by a factor of 5."""
    rng = rng_of(seed, "responses", "drift")
    responses = []
    for step in range(8000):
        scale = 100 * math.exp(0.8 * math.sin(step / 800))
        ids = array("q", rng.integers(0, 30_000, size=int(rng.integers(20, 200))).tolist())
        length = max(1, round(scale * math.exp(rng.normal(0, 0.7))))
        responses.append(Response(ids, len(ids), length))
    return responses


_AZURE = "arrivals/azure2023_conv.csv"
_MOONCAKE = "arrivals/mooncake_arxiv_first1000.jsonl.gz"
_SYNTHETIC = "arrivals/mooncake_fast25_synthetic.jsonl.gz"
_GSM8K = "prompts/gsm8k/routellm_gsm8k_responses.csv.gz"
_ALPACA = "responses/alpaca_eval.jsonl.gz"
_ARENA_1 = "responses/arena_hard_v0.1.jsonl.gz"
_ARENA_2 = "responses/arena_hard_v2.0.jsonl.gz"
_REPEATS = "responses/sequence_scheduling_alpaca-val-10k-length.json.gz"

RESPONSE_SETS: Mapping[str, ResponseSet] = {
    "azure-conv": ResponseSet(
        summary="Azure chat: lengths only", delay=100, make=_azure, files=(_AZURE,)
    ),
    "mooncake": ResponseSet(
        summary="Mooncake's arXiv trace: lengths and hashes of blocks",
        delay=50,
        make=_mooncake(_MOONCAKE),
        files=(_MOONCAKE,),
    ),
    "mooncake-synthetic": ResponseSet(
        summary="Mooncake's synthetic trace: lengths and hashes of blocks",
        delay=50,
        make=_mooncake(_SYNTHETIC),
        files=(_SYNTHETIC,),
    ),
    "gsm8k": ResponseSet(
        summary="GSM8K, answered by two models", delay=20, make=_gsm8k, files=(_GSM8K,)
    ),
    "alpaca-eval": ResponseSet(
        summary="AlpacaEval, answered by nine models",
        delay=20,
        make=_texts(_ALPACA),
        files=(_ALPACA,),
    ),
    "arena-0.1": ResponseSet(
        summary="Arena-Hard v0.1, answered by three models",
        delay=20,
        make=_texts(_ARENA_1),
        files=(_ARENA_1,),
    ),
    "arena-2.0": ResponseSet(
        summary="Arena-Hard v2.0, answered by one reasoning model",
        delay=20,
        make=_texts(_ARENA_2),
        files=(_ARENA_2,),
    ),
    "repeats": ResponseSet(
        summary="2,000 Alpaca prompts, each answered four times by Vicuna-7B",
        delay=50,
        make=_repeats,
        files=(_REPEATS,),
    ),
    "templates": ResponseSet(summary="generated: six templates", delay=50, make=_templates),
    "words": ResponseSet(summary="generated: words decide", delay=50, make=_words),
    "drift": ResponseSet(
        summary="generated: nothing to tell, and it drifts", delay=50, make=_drift
    ),
}


def iter_streams(responses: Sequence[Response]) -> Iterator[tuple[str, list[Response]]]:
    """Responses by stream, in the order of the first of each."""
    streams: dict[str, list[Response]] = {}
    for response in responses:
        streams.setdefault(response.stream, []).append(response)
    return iter(streams.items())
