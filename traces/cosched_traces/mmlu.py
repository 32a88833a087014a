"""MMLU 5-shot as an offline set: 57 subjects whose questions share a head of five worked examples.
From the real files, or generated with their statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cosched.core.request import RequestClass
from cosched_traces.errors import RowError
from cosched_traces.files import Text, json_lines
from cosched_traces.openai_batch import BYTES_PER_TOKEN, Tokenize
from cosched_traces.seeds import key_base, rng_of
from cosched_traces.transform import first_requests, shuffle
from cosched_traces.workload import Segment, TraceRequest, Workload

OUTPUT_TOKENS = 16  # one letter would do; harnesses mostly leave room for a short phrase

# One subject each: number of questions, tokens of its 5-shot head, mean tokens of its questions.
_SUBJECTS = tuple(
    tuple(map(int, subject.split(":")))
    for subject in """
    171:181:35 783:187:46 100:221:47 103:236:47 235:247:42 135:253:60 145:258:42 311:259:63
    223:264:50 131:282:60 166:285:57 100:286:50 100:289:66 265:316:58 100:320:44 203:320:70
    108:338:77 270:339:49 238:340:78 100:346:60 390:348:74 198:365:51 102:366:72 378:375:45
    234:382:66 151:386:97 100:387:60 110:387:64 144:396:83 163:407:75 201:415:81 100:416:69
    114:423:100 173:431:117 310:432:87 126:452:97 346:452:76 193:463:84 324:481:67 545:491:72
    895:528:103 152:531:75 306:533:74 282:552:109 100:561:81 612:582:91 112:594:74 121:618:109
    216:647:126 100:707:105 100:746:110 272:966:198 237:1236:398 245:1347:207 1534:1666:307
    204:2231:362 165:2907:408
    """.split()
)
_QUESTION_CV = 0.48  # of a question's length about its subject's mean, over all subjects


class _Question(msgspec.Struct):
    subject: Text
    question: Text
    choices: tuple[Any, Any, Any, Any]

    @property
    def text(self) -> str:
        options = "".join(f"\n{a}. {text}" for a, text in zip("ABCD", self.choices, strict=True))
        return f"{self.question}{options}\nAnswer:"


class _Example(_Question, kw_only=True):
    answer: Text


def read_mmlu(
    dev_path: Path,
    test_path: Path,
    *,
    seed: int,
    num_requests: int | None = None,
    tokenize: Tokenize | None = None,
    num_output_tokens: int = OUTPUT_TOKENS,
) -> Workload:
    """The test questions, shuffled, each after its subject's five dev examples; all at 0.

    Both files are JSONL with ``subject``, ``question``, ``choices`` (four) and ``answer`` (a
    letter). With `tokenize` prompts are real token ids; head and question are tokenized apart, so
    that a head is the same tokens before every question. Without it lengths are the text's bytes
    divided by 4, and a head is one segment per subject.
    """
    heads: dict[str, str] = {}
    for _, example in json_lines(dev_path, _Example):
        subject = example.subject
        intro = "The following are multiple choice questions (with answers) about "
        heads.setdefault(subject, f"{intro}{subject.replace('_', ' ')}.\n\n")
        heads[subject] += f"{example.text} {example.answer}\n\n"
    tokenized = {s: tuple(tokenize(head)) for s, head in heads.items()} if tokenize else {}
    head_keys = {s: key_base("mmlu", "head", s) for s in heads}
    requests: list[TraceRequest] = []
    for line, asked in json_lines(test_path, _Question):
        subject, question = asked.subject, asked.text
        if subject not in heads:
            raise RowError(test_path, line, f"subject {subject!r} has no examples in {dev_path}")
        rid = f"mmlu-{len(requests)}"
        if tokenize:
            ids = (*tokenized[subject], *tokenize(question))
            requests.append(_request(rid, num_output_tokens, token_ids=ids))
            continue
        segments = (
            Segment(head_keys[subject], _estimate(heads[subject])),
            Segment(key_base("mmlu", "question", question), _estimate(question)),
        )
        requests.append(_request(rid, num_output_tokens, segments=segments))
    how = "tokenized" if tokenize else f"lengths from text at {BYTES_PER_TOKEN} bytes a token"
    notes = (f"read {dev_path.name} and {test_path.name}, {how}",)
    return _drawn(Workload(name="mmlu", requests=tuple(requests), notes=notes), seed, num_requests)


def generate_mmlu(
    *,
    seed: int,
    num_requests: int | None = None,
    num_output_tokens: int = OUTPUT_TOKENS,
) -> Workload:
    """The same without the files: 57 prefixes, 14,042 questions shuffled, or the first of them.
    For more requests than that, each prefix has a multiple of its questions.

    Measured on the real files at 4 bytes a token: heads 540 tokens on average (181-2907, median
    396; 640 when weighted by questions), questions 117.1 (11-1224, median 77, std 115). Here
    heads and the number of questions of each subject are the measured ones; a question's length is
    lognormal about its subject's measured mean with cv 0.48, at least 11 and at most 1224, which
    yields a mean of 117, median 75, std 121.
    """
    rng = rng_of(seed, "mmlu-like")
    sigma = float(np.sqrt(np.log(1 + _QUESTION_CV**2)))
    head_keys, own_keys = key_base("mmlu-like", seed, "head"), key_base("mmlu-like", seed, "own")
    requests: list[TraceRequest] = []
    num_each = sum(count for count, _, _ in _SUBJECTS)
    times = max(1, math.ceil((num_requests or 0) / num_each))
    for subject, (count, head, mean) in enumerate(_SUBJECTS):
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, size=times * count)
        for num_tokens in np.rint(np.clip(drawn, 11, 1224)).astype(int).tolist():
            index = len(requests)
            segments = (
                Segment(head_keys + subject, head),
                Segment(own_keys + index, num_tokens),
            )
            requests.append(_request(f"mmlu-like-{index}", num_output_tokens, segments=segments))
    notes = (f"generated with MMLU's statistics, {seed=}",)
    workload = Workload(name="mmlu-like", requests=tuple(requests), notes=notes)
    return _drawn(workload, seed, num_requests)


def _drawn(workload: Workload, seed: int, num_requests: int | None) -> Workload:
    shuffled = shuffle(workload, seed=seed)
    return shuffled if num_requests is None else first_requests(shuffled, num_requests)


def _request(
    rid: str,
    num_output_tokens: int,
    *,
    segments: tuple[Segment, ...] = (),
    token_ids: Sequence[int] = (),
) -> TraceRequest:
    return TraceRequest(
        rid=rid,
        request_class=RequestClass.OFFLINE,
        arrival_s=0.0,
        num_output_tokens=num_output_tokens,
        segments=segments,
        token_ids=token_ids,
    )


def _estimate(text: str) -> int:
    return -(-len(text.encode()) // BYTES_PER_TOKEN)
