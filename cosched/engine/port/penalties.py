"""Sampling penalties (frequency, presence, repetition, minimum length) of requests that are paused
or preempted.

SGLang counts the tokens that a penalty depends on per batch: each decode adds the latest token of a
request to its row. That misses tokens when a request is paused or results are waited for, and
starts from zero when a request resumes. Here each token is counted once, when it is known;
`TrackedRequest.num_penalized` is the number of counted tokens.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from sglang.srt.sampling.penaltylib.frequency_penalty import BatchedFrequencyPenalizer
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.sampling.penaltylib.presence_penalty import BatchedPresencePenalizer
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
from sglang.srt.utils.common import async_h2d

from cosched.engine.port.batch import prefills_of


def count_outputs(batch: Any) -> bool:
    """Count the tokens of a batch's requests that are not counted yet. False if a request is not
    tracked by cosched."""
    rows: list[int] = []
    tokens: list[int] = []
    for row, req in enumerate(batch.reqs):
        tracked = getattr(req, "cosched", None)
        if tracked is None:
            return False
        if not tracked.has_penalties:
            continue
        num_known = len(req.output_ids)
        num_new = num_known - tracked.num_penalized
        if num_new > 0:
            rows += [row] * num_new
            tokens += req.output_ids[-num_new:]
            tracked.num_penalized = num_known
    if rows:
        _count(batch.sampling_info.penalizer_orchestrator, rows, tokens)
    return True


def count_resumed(batch: Any) -> None:
    """The same for a new prefill batch, in which resumed requests have new rows."""
    if not batch.sampling_info.penalizer_orchestrator.is_required:
        return
    for req, _ in prefills_of(batch):
        req.cosched.num_penalized = 0
    count_outputs(batch)


def _count(orchestrator: Any, rows: list[int], tokens: list[int]) -> None:
    """Count `tokens[i]` in row `rows[i]`."""
    device = orchestrator.device
    row = async_h2d(rows, dtype=torch.int64, device=device)
    token = async_h2d(tokens, dtype=torch.int64, device=device)
    penalizers = orchestrator.penalizers
    if (p := penalizers.get(BatchedFrequencyPenalizer)) is not None and p.is_prepared():
        p.cumulated_frequency_penalties.index_put_(
            (row, token), p.frequency_penalties[row, 0], accumulate=True
        )
    if (p := penalizers.get(BatchedPresencePenalizer)) is not None and p.is_prepared():
        p.cumulated_presence_penalties[row, token] = p.presence_penalties[row, 0]
    if (p := penalizers.get(BatchedRepetitionPenalizer)) is not None and p.is_prepared():
        p.cumulated_repetition_penalties[row, token] = p.repetition_penalties[row, 0]
    if (p := penalizers.get(BatchedMinNewTokensPenalizer)) is not None and p.is_prepared():
        ones = torch.ones_like(row, dtype=p.len_output_tokens.dtype)
        p.len_output_tokens[:, 0].index_add_(0, row, ones)


def copy_for_part(orchestrator: Any, part: Any) -> Any:
    """A copy for a part of its batch. The original stays as it is."""
    other = copy.copy(orchestrator)
    other.batch = part
    other.penalizers = {}
    for kind, penalizer in orchestrator.penalizers.items():
        twin = copy.copy(penalizer)
        twin._orchestrator_ref = weakref.ref(other)
        other.penalizers[kind] = twin
    return other


def copy_rows(part: Any, whole: Any) -> None:
    """Copy the rows of a part of a batch back."""
    source, target = (b.sampling_info.penalizer_orchestrator for b in (part, whole))
    if not (source.is_required and target.is_required):
        return
    rows = {req: row for row, req in enumerate(whole.reqs)}
    places = [rows[req] for req in part.reqs]
    index = async_h2d(places, dtype=torch.int64, device=target.device)
    for kind, penalizer in source.penalizers.items():
        if not penalizer.is_prepared():
            continue
        twin = target.penalizers[kind]
        for name, value in vars(penalizer).items():
            if isinstance(value, torch.Tensor):
                getattr(twin, name).index_copy_(0, index, value)
