"""The kernel-table model on made-up tables whose formula is known."""

from __future__ import annotations

import random
import timeit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import BatchShape, Prefill
from cosched.errors import ConfigError
from cosched.lab.cost_models.cost_model import CpuOverhead
from cosched.lab.cost_models.kernel_table import KernelTableModel
from cosched.lab.cost_models.kernels import (
    GenerationAttention,
    attention_cells,
    isotonic,
    non_decreasing,
)
from tests.lab.cost_models.synthetic import (
    GPU,
    MODEL,
    context_s,
    gemm_s,
    generation_s,
    write_tables,
)


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> KernelTableModel:
    """Of tables without noise."""
    return model_of(write_tables(tmp_path_factory.mktemp("exact")))


def model_of(folder):
    """No overhead, no graphs."""
    overhead = CpuOverhead(fixed_s=0.0)
    return KernelTableModel(model=MODEL, gpu=GPU, data_dir=folder, overhead=overhead, graphs=False)


def expected_s(num_tokens: int, num_sequences: int, attention_s: float) -> float:
    """By the formulas of the tables."""
    layer = sum(gemm_s(num_tokens, gemm.n, gemm.k) for gemm in MODEL.layers(1)[0].gemms)
    traffic = MODEL.elementwise_bytes_per_token(1) / (0.8 * GPU.bandwidth_bytes_per_s)
    elementwise = max(4 * 2.5e-6, num_tokens * traffic)
    head = gemm_s(num_sequences, MODEL.vocab, MODEL.hidden) + 25e-6
    return MODEL.num_layers * (layer + elementwise + attention_s) + head


def test_batches_cost_what_their_kernels_cost(exact):
    decodes = expected_s(64, 64, generation_s(64, 1024, MODEL.num_kv_heads))
    assert exact.iteration_s(BatchShape(decodes=[1024] * 64)) == pytest.approx(decodes, rel=0.02)
    prompt = expected_s(2048, 1, context_s(1, 2048, MODEL.num_heads))
    batch = BatchShape(prefills=[Prefill(2048, 0)])
    assert exact.iteration_s(batch) == pytest.approx(prompt, rel=0.02)


def test_batches_between_the_measured_points_cost_what_their_kernels_cost(table_dir):
    """From noisy tables, as real ones are; what these say of real GPUs needs their data."""
    measured = model_of(table_dir)
    draw = random.Random(0)
    errors = []
    for _ in range(200):
        num = draw.randint(2, 250)
        contexts = [draw.randint(20, 9000)] * num
        expected = expected_s(num, num, generation_s(num, contexts[0], 4))
        errors.append(measured.iteration_s(BatchShape(decodes=contexts)) / expected - 1)
        num = draw.randint(20, 8000)
        expected = expected_s(num, 1, context_s(1, num, MODEL.num_heads))
        errors.append(measured.iteration_s(BatchShape(prefills=[Prefill(num, 0)])) / expected - 1)
    assert np.mean(np.abs(errors)) < 0.05
    assert np.max(np.abs(errors)) < 0.25


def test_a_short_chunk_costs_reading_its_prefix(exact):
    short, long = (
        exact.iteration_s(BatchShape(prefills=[Prefill(4, cached)])) for cached in (0, 60_000)
    )
    kv = MODEL.kv_bytes_per_token() * 60_000
    assert long - short >= 0.9 * kv / GPU.bandwidth_bytes_per_s


def test_mixed_decodes_can_be_made_dearer(table_dir):
    batch = BatchShape(prefills=[Prefill(256, 0)], decodes=[2000] * 100)
    plain, dear = (
        KernelTableModel(model=MODEL, gpu=GPU, data_dir=table_dir, mixed_decode_factor=factor)
        for factor in (1.0, 2.0)
    )
    extra = MODEL.num_layers * plain.generation.seconds(batch.decodes)
    assert dear.iteration_s(batch) - plain.iteration_s(batch) == pytest.approx(extra)
    alone = BatchShape(decodes=batch.decodes)
    assert dear.iteration_s(alone) == plain.iteration_s(alone)


@given(st.integers(2, 8000), st.integers(0, 30_000), st.data())
def test_chunks_cost_at_least_the_attention_of_the_whole(toy, new, cached, data):
    first = data.draw(st.integers(1, new - 1))
    whole = toy.context.seconds([Prefill(new, cached)], new)
    head = toy.context.seconds([Prefill(first, cached)], first)
    tail = toy.context.seconds([Prefill(new - first, cached + first)], new - first)
    assert head + tail >= whole * (1 - 1e-9)


def test_an_iteration_runs_in_the_next_larger_graph(toy):
    def gemms_s(tokens: int) -> float:
        batch = BatchShape(prefills=[Prefill(tokens, 0)])
        attention = toy.context.seconds(batch.prefills, tokens)
        return toy.iteration_s(batch) - MODEL.num_layers * max(
            attention, toy.generation.equal_s(1, tokens)
        )

    assert gemms_s(1025) == pytest.approx(gemms_s(1280))
    assert gemms_s(1281) > gemms_s(1280)


def test_two_gpus_share_the_work_and_pay_for_the_link(table_dir):
    batch = BatchShape(prefills=[Prefill(4096, 0)], decodes=[500] * 20)
    one, two = (
        KernelTableModel(model=MODEL, gpu=GPU, data_dir=table_dir, tp=tp).iteration_s(batch)
        for tp in (1, 2)
    )
    assert 0.5 * one < two < one


@pytest.mark.parametrize(
    ("tp", "message"), [(3, "tp must divide both"), (8, "no all-reduce over 8 GPUs")]
)
def test_an_impossible_split_is_refused(table_dir, tp, message):
    with pytest.raises(ConfigError, match=message):
        KernelTableModel(model=MODEL, gpu=GPU, data_dir=table_dir, tp=tp)


def test_a_call_costs_little_more_than_looking_at_the_batch(toy):
    batch = BatchShape(
        prefills=[Prefill(500, 0), Prefill(300, 1000), Prefill(512, 8000)],
        decodes=[100 + 17 * i for i in range(200)],
    )
    # Short ones, of which some find the machine quiet.
    often = {"number": 20, "repeat": 100}
    look = min(timeit.repeat(lambda: (sum(batch.decodes), max(batch.decodes)), **often))
    call = min(timeit.repeat(lambda: toy.iteration_s(batch), **often))
    assert call < 20 * look  # about 4 in practice: no loop over requests but these


# -- interpolation --------------------------------------------------------------------------------


def seconds(heads, batch, length):
    return 1e-5 + 1e-9 * heads * batch * length


def attention_of(heads, wanted, *more):
    rows = [
        (h, kv, 128, batch, length, seconds(h, batch, length))
        for h, kv in heads
        for batch in (1, 4, 16)
        for length in (16, 256, 4096)
    ]
    return GenerationAttention(attention_cells([*rows, *more], *wanted))


def test_heads_between_measured_ones_are_interpolated_within_their_kind():
    between = attention_of([(16, 4), (32, 4)], (28, 4, 128))
    assert between.equal_s(4, 256) == pytest.approx(seconds(28, 4, 256))
    ungrouped = attention_of([(8, 8), (16, 16), (12, 8)], (12, 12, 128))
    assert ungrouped.equal_s(4, 256) == pytest.approx(seconds(12, 4, 256))


@pytest.mark.parametrize("shape", [(64, 4, 128), (16, 3, 128), (16, 4, 64)])
def test_heads_outside_the_table_are_refused_by_name(shape):
    with pytest.raises(
        ConfigError, match=f"{shape[0]} query and {shape[1]} KV heads of {shape[2]}"
    ):
        attention_of([(16, 4), (32, 4)], shape)


def test_gaps_of_the_grid_are_bridged_and_its_edges_extended():
    cells = {(1, 16): 1e-5, (1, 1024): 2e-5, (1, 2048): 3e-5, (8, 16): 1.1e-5, (8, 1024): 9e-5}
    attention = GenerationAttention(cells)
    assert attention.equal_s(8, 2048) == pytest.approx(9e-5 + 8e-5)
    assert attention.equal_s(1, 4096) == pytest.approx(5e-5)
    assert attention.equal_s(16, 1024) == pytest.approx(18e-5)
    cells = {(1, 16): 1e-5, (1, 64): 1e-5, (1, 1024): 3e-5, (2, 16): 1e-5, (2, 1024): 5e-5}
    assert 1e-5 < GenerationAttention(cells).equal_s(2, 64) < 2e-5


def test_the_least_of_repeated_measurements_counts_and_a_disturbed_one_is_cut():
    doubled = attention_of([(16, 4)], (16, 4, 128), (16, 4, 128, 4, 256, 1.0))
    assert doubled.equal_s(4, 256) < 1e-3
    assert non_decreasing(np.array([1.0, 1.0, 20.0, 1.1, 1.2, 1.3])).max() < 1.35


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30))
def test_isotonic_never_falls_keeps_the_sum_and_leaves_what_is_in_order(values):
    fitted = isotonic(values)
    assert np.all(np.diff(fitted) >= 0)
    assert fitted.sum() == pytest.approx(sum(values), abs=1e-6)
    assert isotonic(sorted(values)).tolist() == sorted(values)
