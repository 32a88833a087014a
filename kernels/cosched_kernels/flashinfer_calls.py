"""FlashInfer as the library of `cosched_kernels.cascade`. Its calls have not run on a GPU: tests
have a stand-in for FlashInfer that does what its documentation says.

FlashInfer's own `MultiLevelCascadeAttentionWrapper` wants every query on every level, and requests
share prefixes of different depth here; so a level is a call of its attention over paged KV, with
pages of one token.
"""

from __future__ import annotations

from typing import Any

import torch

from cosched_kernels.cascade import Attend, Sequences, State

_WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation


class FlashInferCalls:
    """A `Prepare`. A level has the same wrapper in each forward pass: what one was prepared for
    holds until the next one is."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._wrappers: list[Any] = []

    def __call__(self, number: int, sequences: Sequences) -> Attend:
        while len(self._wrappers) <= number:
            self._wrappers.append(self._new_wrapper())
        wrapper, heads = self._wrappers[number], sequences.heads
        wrapper.plan(
            sequences.row_ends,
            sequences.kv_ends,
            sequences.slots,
            torch.ones(len(sequences.row_ends) - 1, dtype=torch.int32),
            heads.num_q_heads,
            heads.num_kv_heads,
            heads.head_dim,
            1,  # tokens of a page
            causal=sequences.is_causal,
            q_data_type=sequences.dtype,
            kv_data_type=sequences.dtype,
        )

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> State:
            # Not `run`: layers may differ in their scale.
            out, lse = wrapper.forward_return_lse(
                q,
                (k.unsqueeze(1), v.unsqueeze(1)),
                causal=sequences.is_causal,
                sm_scale=scale,
            )
            return State(out, lse)

        return attend

    def _new_wrapper(self) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
