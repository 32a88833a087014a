"""Speculative decoding on SGLang's CPU engine.

SGLang's workers for EAGLE, MTP and n-gram drafts need compiled kernels that the CPU engine does not
have. `LookupWorker` takes their place on machines without a GPU. It drafts a chain of tokens by
looking up the last tokens in the request itself (prompt lookup) and verifies them as SGLang does:
one forward pass of the served model over all drafted tokens, of which the longest run that the
model would have generated itself is accepted, and one token more. Everything around it is
SGLang's: slots, KV memory that is allocated ahead, mixed steps, the radix tree's keys.

A draft model that is named is not loaded. Sampled requests accept a draft token if the model's own
sample is that token, which keeps the model's distribution. Grammars, penalties and log
probabilities are not applied to drafted tokens: these need a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from sglang.srt.speculative.spec_utils import (
    commit_mamba_states_after_verify,
    prepare_mamba_track_for_verify,
)

_MATCHED = 2
"""Last tokens of a request that are looked up in it."""


def draft(tokens: Sequence[int], num_drafts: int) -> list[int]:
    """The tokens that followed the latest earlier occurrence of the last ones; where they end, the
    last token again."""
    tail = list(tokens[-_MATCHED:])
    found: list[int] = []
    for start in range(len(tokens) - len(tail) - 1, -1, -1):
        if list(tokens[start : start + len(tail)]) == tail:
            found = list(tokens[start + len(tail) : start + len(tail) + num_drafts])
            break
    return found + [tokens[-1]] * (num_drafts - len(found))


def num_accepted(drafted: Sequence[int], predicted: Sequence[int]) -> int:
    """Tokens that an iteration generates. drafted: after the last token of the request; predicted:
    what the model generates after that token and after each drafted one."""
    number = 0
    while number < len(drafted) and drafted[number] == predicted[number]:
        number += 1
    return number + 1


class Drafts(SpecInput):  # type: ignore[misc]
    """What is carried from one iteration to the next: nothing, since drafts are looked up."""

    def __init__(self) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)

    def filter_batch(self, new_indices: Any, new_indices_cpu: Any = None) -> None:
        pass

    def merge_batch(self, spec_info: Drafts) -> None:
        pass


def result_of(
    batch: Any, next_tokens: torch.Tensor, generated: torch.Tensor, *, logits: Any = None
) -> GenerationBatchResult:
    """The result of an iteration, as SGLang reads it without the overlap scheduler, which it does
    not have for drafts on a CPU.

    next_tokens  the next token of each request; of a decode as many for each as are verified
    generated    how many of these each request gets; 1 in a batch with prefills
    """
    return GenerationBatchResult(
        logits_output=logits,
        next_token_ids=next_tokens,
        accept_lens=generated,
        new_seq_lens=batch.seq_lens + generated
        if batch.forward_mode.is_decode()
        else batch.seq_lens,
        next_draft_input=Drafts(),
        speculative_num_draft_tokens=num_verified(),
        can_run_cuda_graph=False,
    )


def num_verified() -> int:
    """Tokens of each request that a decode verifies, its own included."""
    return int(get_spec().speculative_num_draft_tokens)


class _Verify(SpecInput):  # type: ignore[misc]
    """One forward pass over the last token of each request and those drafted behind it."""

    def __init__(self, positions: torch.Tensor, num_tokens: int) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
        self.num_tokens_per_req = num_tokens
        self.num_tokens_for_logprob_per_req = num_tokens
        self.draft_token_num = num_tokens


class LookupWorker(BaseSpecWorker):  # type: ignore[misc]
    """Runs prefills and mixed steps on the served model as they are, and decodes with drafts."""

    def __init__(self, *, target_worker: Any, **_: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.num_tokens = num_verified()

    @property
    def target_worker(self) -> Any:
        return self._target_worker

    @property
    def draft_worker(self) -> None:
        return None

    def forward_batch_generation(self, batch: Any, **_: Any) -> GenerationBatchResult:
        if batch.forward_mode.is_decode():
            return self._verify(batch)
        drafts, batch.spec_info = batch.spec_info, None
        if batch.forward_mode.is_idle() and not batch.is_extend_in_batch:
            # With DP attention, while other ranks verify. SGLang asks it for hidden states.
            batch.spec_info = _Verify(batch.seq_lens[:0], self.num_tokens)
            batch.spec_info.capture_hidden_mode = CaptureHiddenMode.FULL
        result = self._target_worker.forward_batch_generation(batch)
        batch.spec_info = drafts
        ones = torch.ones(len(batch.reqs), dtype=torch.int32, device=batch.device)
        return result_of(batch, result.next_token_ids, ones, logits=result.logits_output)

    def _verify(self, batch: Any) -> GenerationBatchResult:
        number, device = self.num_tokens, batch.device
        drafted = [
            draft([*req.origin_input_ids, *req.output_ids], number - 1) for req in batch.reqs
        ]
        steps = torch.arange(number, device=device)
        positions = batch.seq_lens[:, None] + steps
        rows = batch.req_to_token_pool.req_to_token[batch.req_pool_indices]
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = torch.tensor(
            [[req.output_ids[-1], *ids] for req, ids in zip(batch.reqs, drafted, strict=True)],
            dtype=torch.int64,
            device=device,
        ).flatten()
        batch.out_cache_loc = rows.gather(1, positions).flatten().to(torch.int64)
        batch.spec_info = _Verify(positions.flatten(), number)
        prepare_mamba_track_for_verify(batch)
        result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        batch.forward_mode = ForwardMode.DECODE
        logits = result.logits_output.next_token_logits
        predicted = self._sample(batch, logits).reshape(len(batch.reqs), number)
        accepted = torch.tensor(
            [num_accepted(ids, row) for ids, row in zip(drafted, predicted.tolist(), strict=True)],
            dtype=torch.int32,
            device=device,
        )
        places = torch.arange(predicted.numel(), device=device).reshape(predicted.shape)
        commit_mamba_states_after_verify(
            self._target_worker, batch, accepted, places, draft_token_num=number
        )
        return result_of(batch, predicted.flatten(), accepted, logits=result.logits_output)

    def _sample(self, batch: Any, logits: torch.Tensor) -> torch.Tensor:
        """The model's token at each position: the likeliest, or one drawn at the request's
        temperature."""
        info = batch.sampling_info
        likeliest = logits.argmax(-1)
        if info.is_all_greedy:
            return likeliest
        temperatures = info.temperatures.repeat_interleave(self.num_tokens, dim=0)
        drawn = torch.multinomial(torch.softmax(logits / temperatures, -1), 1).flatten()
        greedy = torch.tensor([req.sampling_params.top_k == 1 for req in batch.reqs])
        return torch.where(greedy.repeat_interleave(self.num_tokens), likeliest, drawn)


def install() -> None:
    """Replace what the worker's batches need of compiled kernels. Idempotent."""
    # Copies the KV of accepted tokens of a tree. A chain leaves it where it is.
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None
    allocation.assign_req_to_token_pool_cpu = _assign
    TorchNativeAttnBackend.forward_extend = _extend_verified(TorchNativeAttnBackend.forward_extend)


def _assign(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    _: int,
) -> None:
    """Write the KV slots of several requests, one after the other, into their rows."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def _extend_verified(original: Any) -> Any:
    """Attention of a verified batch: each request extends its computed tokens by the drafted
    ones."""
    if hasattr(original, "extends_verified"):
        return original

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kw: Any
    ) -> Any:
        if forward_batch.forward_mode.is_target_verify() and forward_batch.extend_seq_lens is None:
            num_tokens = forward_batch.spec_info.num_tokens_per_req
            forward_batch.extend_prefix_lens = forward_batch.seq_lens
            forward_batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, num_tokens)
            forward_batch.seq_lens = forward_batch.seq_lens + num_tokens
        return original(self, q, k, v, layer, forward_batch, *args, **kw)

    forward_extend.extends_verified = True  # type: ignore[attr-defined]
    return forward_extend
