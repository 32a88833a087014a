"""Shared prefixes in calls of an attention library: the prefix once for all members of a group, the
rest for each request, and the states of a token merged by their log-sum-exp (Cascade Inference, Ye
et al., 2024).

A call computes *sequences*: query rows that read one span of KV. A level of `Groups` is a call in
which a group is a sequence; what requests have for themselves is a call in which each is one. The
library is FlashInfer (`cosched_kernels.flashinfer_calls`) or, on a CPU, plain PyTorch
(`attend_plainly`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cosched_kernels.buffers import to_device
from cosched_kernels.groups import Groups, IntArray
from cosched_kernels.plan import HeadShape

_LOG2_E = 1.4426950408889634


class CascadeLevel(NamedTuple):
    """The sequences of one call, on the host.

    ranks      [rows] query tokens by rank (`Plan.token_order`), sequence by sequence
    row_ends   [sequences + 1] rows [row_ends[i], row_ends[i + 1]) are of sequence i
    request    [sequences] index in the batch of the request whose slots it reads
    begin, end [sequences] it reads the KV of positions [begin, end), at least one
    is_causal  the last row sees all of the span, and each one before it a position less; else all
               rows see all
    """

    ranks: IntArray
    row_ends: IntArray
    request: IntArray
    begin: IntArray
    end: IntArray
    is_causal: bool


def levels_of(
    groups: Groups, *, num_queries: IntArray, seq_lens: IntArray
) -> Iterator[CascadeLevel]:
    """First what requests have for themselves, with all rows, then the levels of groups. The
    arguments are those of `cosched_kernels.plan.make_plan`."""
    order = groups.order
    first = _sums(num_queries.take(order))
    yield CascadeLevel(
        ranks=np.arange(first[-1]),
        row_ends=first,
        request=order,
        begin=groups.own,
        end=seq_lens.take(order),
        is_causal=True,
    )
    for level in range(groups.num_levels):
        found = (groups.level == level).nonzero()[0]
        begins, ends = first.take(groups.begin[found]), first.take(groups.end[found])
        pairs = zip(begins.tolist(), ends.tolist(), strict=True)
        yield CascadeLevel(
            ranks=np.concatenate([np.arange(begin, end) for begin, end in pairs]),
            row_ends=_sums(ends - begins),
            request=order.take(groups.begin[found]),
            begin=groups.first[found],
            end=groups.last[found],
            is_causal=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """A level with the KV slots that it reads.

    row_ends   [sequences + 1] int32, on the host; as in `CascadeLevel`
    kv_ends    [sequences + 1] int32, on the host: slots [kv_ends[i], kv_ends[i + 1]) are of
               sequence i
    slots      [slots] int32, on the device
    is_causal  as in `CascadeLevel`
    heads, dtype  of the queries
    """

    row_ends: torch.Tensor
    kv_ends: torch.Tensor
    slots: torch.Tensor
    is_causal: bool
    heads: HeadShape
    dtype: torch.dtype


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], "State"]
"""Attention of the sequences of one call: ``attend(q, k, v, scale)``. q: [rows, q heads, head dim];
k, v: [slots, kv heads, head dim]; scale: of the scores, before the softmax."""

Prepare = Callable[[int, Sequences], Attend]
"""A library: an `Attend` for the sequences of a level, once for all layers of a forward pass. The
number of the level is 0 for what requests have for themselves."""


class State(NamedTuple):
    """What rows found in a part of their KV.

    out  [rows, q heads, head dim], normalised
    lse  [rows, q heads] float32: log2 of the sum behind it
    """

    out: torch.Tensor
    lse: torch.Tensor


class Cascade:
    """The attention of one forward pass, the same for all its layers."""

    def __init__(
        self,
        groups: Groups,
        *,
        num_queries: IntArray,
        seq_lens: IntArray,
        token_order: npt.NDArray[np.integer[Any]],
        req_to_token: torch.Tensor,
        pool_rows: torch.Tensor,
        heads: HeadShape,
        dtype: torch.dtype,
        prepare: Prepare,
    ) -> None:
        """token_order: [tokens] rank -> row of the query tensor. req_to_token, pool_rows: as in
        `cosched_kernels.shared_prefix.attend_items`."""
        device = req_to_token.device
        self._order = to_device(token_order.astype(np.int64), device)
        self._calls: list[tuple[torch.Tensor, Attend]] = []
        levels = levels_of(groups, num_queries=num_queries, seq_lens=seq_lens)
        for number, level in enumerate(levels):
            sequences = Sequences(
                row_ends=torch.from_numpy(level.row_ends.astype(np.int32)),
                kv_ends=torch.from_numpy(_sums(level.end - level.begin).astype(np.int32)),
                slots=_slots(level, req_to_token, pool_rows),
                is_causal=level.is_causal,
                heads=heads,
                dtype=dtype,
            )
            ranks = to_device(level.ranks, device)
            self._calls.append((ranks, prepare(number, sequences)))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, scale: float
    ) -> None:
        """Attention of a layer, into `out`. q, out: [tokens, q heads, head dim]."""
        q = q[self._order]
        (_, own), *levels = self._calls
        result, lse = own(q, k, v, scale)
        for ranks, shared in levels:
            merged = merge_states(State(result[ranks], lse[ranks]), shared(q[ranks], k, v, scale))
            result[ranks], lse[ranks] = merged
        out[self._order] = result


def merge_states(one: State, other: State) -> State:
    """What rows found in two parts of their KV, together."""
    lse = torch.logaddexp2(one.lse, other.lse)
    shares = [torch.exp2(state.lse - lse)[..., None] for state in (one, other)]
    out = one.out * shares[0] + other.out * shares[1]
    return State(out.to(one.out.dtype), lse)


def attend_plainly(
    sequences: Sequences, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> State:
    """One sequence after the other, in float32."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    rows, slots = sequences.row_ends.tolist(), sequences.kv_ends.tolist()
    group = q.shape[1] // k.shape[1]
    for i in range(len(rows) - 1):
        mine, read = slice(rows[i], rows[i + 1]), sequences.slots[slots[i] : slots[i + 1]].long()
        keys, values = (x[read].float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("thd,shd->ths", q[mine].float(), keys) * scale
        if sequences.is_causal:
            num_rows, num_read = len(scores), len(read)
            sees = torch.ones(num_rows, num_read, dtype=torch.bool, device=q.device)
            sees = sees.tril(num_read - num_rows)
            scores.masked_fill_(~sees[:, None, :], float("-inf"))
        out[mine] = torch.einsum("ths,shd->thd", scores.softmax(-1), values).to(q.dtype)
        lse[mine] = scores.logsumexp(-1) * _LOG2_E
    return State(out, lse)


def plain_calls(number: int, sequences: Sequences) -> Attend:
    """A `Prepare` of plain PyTorch."""
    return partial(attend_plainly, sequences)


def _slots(
    level: CascadeLevel, req_to_token: torch.Tensor, pool_rows: torch.Tensor
) -> torch.Tensor:
    """Looked up on the device, from a few numbers for each sequence."""
    lengths = level.end - level.begin
    total, device = int(lengths.sum()), req_to_token.device
    shifts = level.begin - _sums(lengths)[:-1]
    told = to_device(np.stack((level.request, shifts, lengths)), device)
    requests, shift = told[:2].repeat_interleave(told[2], dim=1, output_size=total)
    positions = torch.arange(total, device=device) + shift
    return req_to_token[pool_rows[requests].long(), positions].int()


def _sums(numbers: IntArray) -> IntArray:
    """Of none, of the first, of the first two, ...: [2, 3] -> [0, 2, 5]."""
    return np.concatenate(([0], numbers.cumsum())).astype(np.int64)
