"""Sharing is picked where it pays, and in doubt it is not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched_kernels.groups import Shared, groups_of
from cosched_kernels.picker import DeviceModel, gain_s
from cosched_kernels.plan import HeadShape, Tiling, make_plan

LLAMA_8B = HeadShape(num_q_heads=32, num_kv_heads=8, head_dim=128)


def gain(*, batch, prefix, chunk=0, **device):
    """Of decodes over one document, and a chunk of a prompt that shares nothing."""
    document = np.zeros(prefix, dtype=np.int64)
    requests = [Shared(namespace=None, tokens=document, length=prefix)] * batch
    num_queries, seq_lens = [1] * batch, [prefix + 100] * batch
    if chunk:
        requests.append(Shared(namespace=None, tokens=document[:0], length=0))
        num_queries.append(chunk)
        seq_lens.append(10_000)
    shapes = {"num_queries": np.array(num_queries), "seq_lens": np.array(seq_lens)}
    groups = groups_of(requests)
    plan = make_plan(groups, heads=LLAMA_8B, tiling=Tiling(), **shapes)
    return gain_s(groups, plan, heads=LLAMA_8B, device=DeviceModel(**device), **shapes)


@pytest.mark.parametrize(
    "batch, prefix, chunk, is_shared",
    [
        (2, 1000, 0, False),
        (8, 500, 0, False),
        (4, 10_000, 0, True),
        (32, 1000, 0, True),
        (64, 32_000, 0, True),
        (2, 4000, 2048, False),
        (32, 10_000, 512, True),
    ],
)
def test_which_batches_are_shared(batch, prefix, chunk, is_shared):
    assert (gain(batch=batch, prefix=prefix, chunk=chunk) > 0) == is_shared


@given(st.integers(2, 64), st.integers(600, 20_000), st.integers(1, 10_000))
def test_a_longer_document_gains_more(batch, prefix, more):
    # A document that the device's cache cannot hold is worth more by itself.
    shorter, longer = gain(batch=batch, prefix=prefix), gain(batch=batch, prefix=prefix + more)
    pieces = 2 * batch * 12 * (LLAMA_8B.q_bytes_per_token + 128) / DeviceModel().memory_bandwidth
    assert longer > shorter - pieces


@given(st.integers(2, 64), st.integers(100, 14_000))
def test_doubt_about_the_cache_never_adds(batch, prefix):
    assert gain(batch=batch, prefix=prefix) <= gain(batch=batch, prefix=prefix, cache_bytes=0)
