"""Attention over shared prefixes is attention: kernels in the interpreter, and references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosched_kernels import reference, shared_prefix
from cosched_kernels.buffers import FixedBuffers, upload
from cosched_kernels.plan import Tiling
from tests.crossed import crossed
from tests.kernels.batches import TILING, Batch, trees

# Poison: what is read before it was written shows.
NAN = float("nan")


def run(module, batch, plan, **scales):
    tensors = upload(plan, batch.heads, device="cpu", dtype=batch.q.dtype, num_programs=3)
    tensors.pieces.fill_(NAN)
    tensors.weights.fill_(NAN)
    out = torch.full_like(batch.q, NAN)
    module.attend_items(
        batch.q,
        batch.k,
        batch.v,
        out=out,
        plan=tensors,
        req_to_token=batch.req_to_token,
        pool_rows=batch.pool_rows,
        scale=batch.scale,
        **scales,
    )
    module.reduce_pieces(out=out, plan=tensors)
    return out, tensors


@st.composite
def batches(draw, **options):
    page_size = draw(st.sampled_from([1, 1, 4, 16]))
    requests = draw(trees(page_size=page_size))
    own = [draw(st.integers(1, 9)) for _ in requests]
    is_decode = draw(st.booleans())
    new = [1 if is_decode else draw(st.integers(1, o)) for o in own]
    return Batch(
        requests, own=own, new=new, page_size=page_size, seed=draw(st.integers(0, 99)), **options
    )


@settings(max_examples=60)
@given(batches())
def test_the_reference_is_plain_attention(batch):
    out, _ = run(reference, batch, batch.plan())
    torch.testing.assert_close(out.double(), batch.attention(), rtol=1e-4, atol=1e-5)


@settings(max_examples=12)
@given(
    st.sampled_from([torch.float32, torch.float16]).flatmap(
        lambda dtype: batches(heads=(2, 1), dtype=dtype)
    )
)
def test_the_kernels_are_the_reference(batch):
    near = {"rtol": 1e-5, "atol": 1e-6}
    if batch.q.dtype == torch.float16:
        near = {"rtol": 4e-3, "atol": 2e-3}
    plan = batch.plan()
    out, tensors = run(shared_prefix, batch, plan)
    expected, expected_tensors = run(reference, batch, plan)
    torch.testing.assert_close(out, expected, **near)
    torch.testing.assert_close(tensors.pieces, expected_tensors.pieces, **near)
    near["atol"] = max(near["atol"], 1e-5)
    torch.testing.assert_close(tensors.weights, expected_tensors.weights, **near)


SMALL = [[((0,), 8), ((0, 0), 3)], [((0,), 8), ((0, 0), 3)], [((0,), 8)]]


@crossed(head_dim=[64, 96, 128, 256], group=[1, 3, 16])
def test_head_shapes(head_dim, group):
    batch = Batch(SMALL, own=[1, 4, 2], new=[1, 3, 1], heads=(group, 1), head_dim=head_dim)
    out, _ = run(shared_prefix, batch, batch.plan())
    torch.testing.assert_close(out.double(), batch.attention(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e5m2, torch.float8_e4m3fn])
def test_half_precision_and_float8_kv(kv_dtype):
    batch = Batch(
        SMALL, own=[1, 4, 2], new=[1, 3, 1], dtype=torch.float16, kv_dtype=kv_dtype, head_dim=64
    )
    out, _ = run(shared_prefix, batch, batch.plan(), k_scale=0.5, v_scale=2.0)
    expected = batch.attention(k_scale=0.5, v_scale=2.0)
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=2e-3)


def test_long_spans_are_split_and_full_tiles_follow_each_other():
    """Splits of the prefix, splits of a causal part that some of its tokens see nothing of, and
    more members than a tile holds."""
    requests = [[((0,), 600)]] * 9
    own = [600, *[1] * 8]
    batch = Batch(requests, own=own, new=[40, *[1] * 8], heads=(2, 1), head_dim=16)
    plan = batch.plan(tiling=Tiling(rows=(16, 64), programs=8))
    assert plan.num_pieces > 3 * plan.num_tokens
    out, _ = run(shared_prefix, batch, plan)
    torch.testing.assert_close(out.double(), batch.attention(), rtol=1e-4, atol=1e-5)


def fixed_buffers(heads):
    return FixedBuffers(
        heads,
        rows=TILING.rows,
        max_tokens=4,
        max_items=40,
        max_pieces=40,
        device="cpu",
        dtype=torch.float32,
        num_programs=2,
    )


def test_one_capture_runs_every_plan():
    """A CUDA graph repeats launches with the same addresses: another plan in the same buffers."""
    buffers = None
    for requests, own in ((SMALL, [1, 4, 2]), ([[]], [5]), ([[((0,), 8)]] * 3, [1, 1, 1])):
        batch = Batch(requests, own=own, new=[1] * len(own), heads=(2, 1))
        if buffers is None:
            buffers = fixed_buffers(batch.heads)
            addresses = [t.data_ptr() for t in vars_of(buffers.tensors)]
        buffers.load(batch.plan())
        assert addresses == [t.data_ptr() for t in vars_of(buffers.tensors)]
        out = torch.full_like(batch.q, NAN)
        shared_prefix.attend_items(
            batch.q,
            batch.k,
            batch.v,
            out=out,
            plan=buffers.tensors,
            scale=batch.scale,
            req_to_token=batch.req_to_token,
            pool_rows=batch.pool_rows,
        )
        shared_prefix.reduce_pieces(out=out, plan=buffers.tensors)
        torch.testing.assert_close(out.double(), batch.attention(), rtol=1e-4, atol=1e-5)
    buffers.clear()
    before = out.clone()
    shared_prefix.reduce_pieces(out=out, plan=buffers.tensors)
    assert torch.equal(out, before)


def test_launches_depend_on_no_plan(monkeypatch):
    """What a CUDA graph has captured: programs and arguments of each launch."""
    launches = []

    def launch(kernel, grid, *args, **constants):
        arguments = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        launches.append((kernel.__name__, grid, arguments, constants))

    monkeypatch.setattr(shared_prefix, "launch", launch)
    batch = Batch(SMALL, own=[1, 4, 2], new=[1, 1, 1])
    buffers = fixed_buffers(batch.heads)
    inputs = {"req_to_token": batch.req_to_token, "pool_rows": batch.pool_rows, "scale": 1.0}
    out = torch.empty_like(batch.q)
    num_items = set()
    for plan in (None, batch.plan(), batch.plan(min_saved=1000)):
        if plan is None:
            buffers.clear()
        else:
            buffers.load(plan)
            num_items.add(len(plan.items))
        shared_prefix.attend_items(
            batch.q, batch.k, batch.v, out=out, plan=buffers.tensors, **inputs
        )
        shared_prefix.reduce_pieces(out=out, plan=buffers.tensors)
    assert len(num_items) == 2
    one, *others = (launches[i : i + 3] for i in range(0, 9, 3))
    assert len(launches) == 9 and all(other == one for other in others)


def vars_of(tensors):
    names = ("items", "starts", "token_order", "bases", "num_tokens", "pieces", "weights")
    return [getattr(tensors, name) for name in names]
