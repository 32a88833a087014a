"""Prefix and rest with merged states are attention, whoever computes the parts."""

import sys
from types import ModuleType

import torch
from hypothesis import given, settings

from cosched_kernels.cascade import (
    Cascade,
    Sequences,
    State,
    attend_plainly,
    merge_states,
    plain_calls,
)
from cosched_kernels.flashinfer_calls import FlashInferCalls
from tests.kernels.batches import Batch
from tests.kernels.test_shared_prefix import NAN, batches


def run(batch, prepare):
    cascade = Cascade(
        batch.groups(),
        num_queries=batch.new,
        seq_lens=batch.seq_lens,
        token_order=batch.plan().token_order,
        req_to_token=batch.req_to_token,
        pool_rows=batch.pool_rows,
        heads=batch.heads,
        dtype=batch.q.dtype,
        prepare=prepare,
    )
    out = torch.full_like(batch.q, NAN)
    cascade.attend(batch.q, batch.k, batch.v, out=out, scale=batch.scale)
    return out


@settings(max_examples=60)
@given(batches())
def test_the_cascade_is_plain_attention(batch):
    out = run(batch, plain_calls)
    torch.testing.assert_close(out.double(), batch.attention(), rtol=1e-4, atol=1e-5)


LEVELS = [[((0,), 8), ((0, 0), 3)], [((0,), 8), ((0, 0), 3)], [((0,), 8)], [((1,), 4)]]


def test_a_prefix_is_read_once_for_all_that_share_it():
    calls = []

    def prepare(number, sequences):
        calls.append((len(sequences.row_ends) - 1, len(sequences.slots), sequences.is_causal))
        return plain_calls(number, sequences)

    run(Batch(LEVELS, own=[1, 4, 2, 1], new=[1, 3, 1, 1]), prepare)
    assert calls == [(4, 1 + 4 + 2 + 5, True), (1, 8, False), (1, 3, False)]


def test_half_precision():
    batch = Batch(LEVELS, own=[1, 4, 2, 1], new=[1, 3, 1, 1], dtype=torch.float16, head_dim=64)
    out = run(batch, plain_calls)
    torch.testing.assert_close(out.double(), batch.attention(), rtol=4e-3, atol=2e-3)


def test_a_part_that_weighs_nothing_changes_nothing():
    one = State(torch.randn(2, 3, 4), torch.randn(2, 3))
    merged = merge_states(one, State(torch.zeros(2, 3, 4), torch.full((2, 3), float("-inf"))))
    torch.testing.assert_close(merged, one)


class PagedWrapper:
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper` as its documentation describes it, for
    what is asked of it here."""

    def __init__(self, workspace, kv_layout, *, backend):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD" and backend == "fa2"

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        q_data_type,
        kv_data_type,
    ):
        assert page_size == 1 and (paged_kv_last_page_len == 1).all()
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        integers = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {tensor.dtype for tensor in integers} == {torch.int32}
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type)
        self.planned = integers, causal

    def forward_return_lse(self, q, paged_kv_cache, *, causal, sm_scale):
        (rows, ends, slots, _), is_causal = self.planned
        keys, values = paged_kv_cache  # [pages, page size, KV heads, head dim]
        assert causal == is_causal and keys.shape[1] == 1 and len(q) == rows[-1]
        assert self.shape == (q.shape[1], *keys.shape[2:], q.dtype, keys.dtype)
        sequences = Sequences(
            row_ends=rows,
            kv_ends=ends,
            slots=slots,
            is_causal=causal,
            heads=None,
            dtype=q.dtype,
        )
        return attend_plainly(sequences, q, keys[:, 0], values[:, 0], sm_scale)


def test_what_flashinfer_is_asked_is_the_cascade(monkeypatch):
    flashinfer = ModuleType("flashinfer")
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    calls = FlashInferCalls("cpu")
    for seed in range(2):  # the wrappers are used again
        batch = Batch(LEVELS, own=[1, 4, 2, 1], new=[1, 3, 1, 1], seed=seed)
        torch.testing.assert_close(
            run(batch, calls).double(), batch.attention(), rtol=1e-4, atol=1e-5
        )
    assert len(calls._wrappers) == 3
