"""Sharing is picked where it pays, and in doubt it is not."""

import json

import numpy as np
import pytest

from cosched_kernels.groups import Shared, groups_of
from cosched_kernels.picker import (
    DeviceModel,
    Measured,
    fitted,
    gain_s,
    read_model,
    write_model,
)
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
        (4, 10_000, 0, False),
        (16, 10_000, 0, True),
        (32, 1000, 0, True),
        (64, 32_000, 0, True),
        (2, 4000, 2048, False),
        (32, 10_000, 512, True),
    ],
)
def test_which_batches_are_shared(batch, prefix, chunk, is_shared):
    assert (gain(batch=batch, prefix=prefix, chunk=chunk) > 0) == is_shared


def mixed_gain(inner, *, chunk, decodes, context, own_documents=True):
    """Of decodes that share nothing, or one document, beside a chunk of a prompt."""
    documents = [np.full(context, index * own_documents) for index in range(decodes)]
    requests = [Shared(namespace=None, tokens=d, length=context) for d in documents]
    requests.append(Shared(namespace=None, tokens=np.zeros(0, int), length=0))
    num_queries = np.array([1] * decodes + [chunk])
    seq_lens = np.array([context + 100] * decodes + [chunk])
    shapes = {"num_queries": num_queries, "seq_lens": seq_lens, "heads": LLAMA_8B}
    groups = groups_of(requests)
    plan = make_plan(groups, tiling=Tiling(), **shapes)
    return gain_s(groups, plan, device=DeviceModel().beside(inner), **shapes)


def test_decodes_beside_a_prefill_are_packed_where_the_other_backend_packs_nothing():
    """A tile of 128 rows for each of 32 heads computes 128 times what a decode needs."""
    for context in (1000, 10_000):
        gain = mixed_gain("triton", chunk=512, decodes=32, context=context)
        waste = 32 * 32 * 127 * context * 4 * 128 / DeviceModel().other_flops
        assert 0.3 * waste < gain < waste
        assert mixed_gain("fa3", chunk=512, decodes=32, context=context) < gain / 10
    assert mixed_gain("triton", chunk=2048, decodes=1, context=100) < 0
    assert mixed_gain("fa3", chunk=512, decodes=32, context=10_000, own_documents=False) > 0


def measured(device, *, batch, prefix, launch_s=7e-6):
    """Times as a device of this model has them."""
    kv = LLAMA_8B.kv_bytes_per_token
    distinct, each = (prefix + batch * 200) * kv, batch * (prefix + 200) * kv
    pieces = 4.0 * batch * LLAMA_8B.q_bytes_per_token
    again_s = (each - distinct) / device.cache_bandwidth
    return Measured(
        distinct_bytes=distinct,
        each_bytes=each,
        piece_bytes=pieces,
        ours_s=launch_s + device.launch_s + (distinct + pieces) / device.own_bandwidth,
        shared_s=launch_s + distinct / device.memory_bandwidth + again_s,
        distinct_s=each / device.memory_bandwidth,
    )


def test_what_was_measured_becomes_the_model(tmp_path):
    true = DeviceModel(
        memory_bandwidth=3e12, cache_bandwidth=7e12, own_bandwidth=2e12, launch_s=12e-6
    )
    sizes = (500, 1000, 2000, 4000, 10_000, 32_000)
    times = [measured(true, batch=b, prefix=p) for b in (8, 16, 32, 64) for p in sizes]
    found = fitted(times, DeviceModel())
    for name in ("memory_bandwidth", "cache_bandwidth", "own_bandwidth", "launch_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6)
    assert found.other_flops == DeviceModel().other_flops
    assert fitted(times[:1] * 3, DeviceModel()) == DeviceModel()  # one shape says too little
    path = tmp_path / "picker.json"
    write_model(path, found, device_name="a card", origin="a test")
    assert read_model(path, device_name="a card") == found


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device": "another card"}, "was measured on 'another card', and this is 'a card'"),
        ({"model": {"launch": 1}}, "unknown 'launch'; a device has .*launch_s"),
        ({"model": {"flops": -1.0}}, "flops of a device must be a number from 0, not -1.0"),
        ({"model": {"flops": 0}}, "flops of a device must be positive"),
        ({"model": {"flops": "fast"}}, "picker.json: "),
        ({"model": 7}, "holds no device model of scripts/gpu_profile"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, change, message):
    path = tmp_path / "picker.json"
    path.write_text(json.dumps({"device": "a card", "model": {}} | change))
    with pytest.raises(ValueError, match=message):
        read_model(path, device_name="a card")


MEASURED = {
    (8, 500): False,
    (8, 1000): False,
    (8, 4000): True,
    (16, 2000): True,
    (32, 1000): True,
    (64, 500): True,
    (64, 32_000): True,
}
"""Decodes over one document on an H200 beside Triton's kernels (docs/results/kernels.md): whether
ours are faster."""


@pytest.mark.parametrize("batch, prefix", MEASURED)
def test_what_was_faster_on_an_h200_is_picked(batch, prefix):
    device = {name: getattr(DeviceModel().beside("triton"), name) for name in RATES}
    assert (gain(batch=batch, prefix=prefix, **device) > 0) == MEASURED[batch, prefix]


RATES = ("memory_bandwidth", "cache_bandwidth", "own_bandwidth", "launch_s")
