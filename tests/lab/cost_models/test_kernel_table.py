"""The kernel-table model on made-up tables whose formula is known."""

from __future__ import annotations

import random
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import BatchShape, Prefill
from cosched.errors import ConfigError
from cosched.lab.cost_models.base import CpuOverhead
from cosched.lab.cost_models.kernel_table import KernelTableModel
from tests.lab.cost_models.synthetic import (
    GPU,
    MODEL,
    context_s,
    gemm_s,
    generation_s,
    write_tables,
)

TOLERANCE = 1.03  # measured kernels are not monotone in the batch size to the last per cent
NOTHING = CpuOverhead(fixed_s=0.0)

prefills = st.lists(
    st.builds(Prefill, st.integers(1, 3000), st.integers(0, 20_000)), min_size=1, max_size=3
)
decodes = st.lists(st.integers(1, 9000), max_size=300)


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> KernelTableModel:
    """No noise, no overhead, no graphs."""
    folder = write_tables(tmp_path_factory.mktemp("exact"))
    return KernelTableModel(model=MODEL, gpu=GPU, data_dir=folder, overhead=NOTHING, graphs=False)


def expected_gemms_s(num_tokens: int, num_sequences: int) -> float:
    layer = sum(gemm_s(num_tokens, gemm.n, gemm.k) for gemm in MODEL.layer_gemms(1))
    return MODEL.num_layers * layer + gemm_s(num_sequences, MODEL.vocab, MODEL.hidden)


def elementwise_s(num_tokens: int) -> float:
    traffic = MODEL.elementwise_bytes_per_token(1) / (0.8 * GPU.bandwidth_bytes_per_s)
    return MODEL.num_layers * max(4 * 2.5e-6, num_tokens * traffic) + 25e-6


def test_decodes_cost_what_their_kernels_cost(exact):
    attention = MODEL.num_layers * generation_s(64, 1024, MODEL.num_kv_heads)
    expected = expected_gemms_s(64, 64) + elementwise_s(64) + attention
    batch = BatchShape(decodes=[1024] * 64)
    assert exact.iteration_s(batch) == pytest.approx(expected, rel=0.02)


def test_batches_between_the_measured_points_cost_what_their_kernels_cost(table_dir):
    """From noisy tables, as real ones are; what these say of real GPUs needs their data."""
    measured = KernelTableModel(
        model=MODEL, gpu=GPU, data_dir=table_dir, overhead=NOTHING, graphs=False
    )
    draw = random.Random(0)
    errors = []
    for _ in range(200):
        num = draw.randint(2, 250)
        contexts = [draw.randint(20, 9000)] * num
        cases = [(BatchShape(decodes=contexts), num, generation_s(num, contexts[0], 4))]
        num = draw.randint(20, 8000)
        prompts = BatchShape(prefills=[Prefill(num, 0)])
        cases.append((prompts, 1, context_s(1, num, MODEL.num_heads)))
        for batch, num_sequences, attention_s in cases:
            num_tokens = sum(p.num_new for p in batch.prefills) + len(batch.decodes)
            expected = expected_gemms_s(num_tokens, num_sequences) + elementwise_s(num_tokens)
            expected += MODEL.num_layers * attention_s
            errors.append(abs(measured.iteration_s(batch) / expected - 1))
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.25


def test_a_prompt_costs_what_its_kernels_cost(exact):
    attention = MODEL.num_layers * context_s(1, 2048, MODEL.num_heads)
    expected = expected_gemms_s(2048, 1) + elementwise_s(2048) + attention
    batch = BatchShape(prefills=[Prefill(2048, 0)])
    assert exact.iteration_s(batch) == pytest.approx(expected, rel=0.02)


def test_equal_prompts_cost_what_the_table_says_of_them_together(exact):
    attention = exact.context.seconds([Prefill(1024, 0)] * 4, 4096)
    assert attention == pytest.approx(context_s(4, 1024, MODEL.num_heads), rel=0.02)


def test_a_short_chunk_costs_reading_its_prefix(exact):
    def attention_s(cached: int) -> float:
        batch = BatchShape(prefills=[Prefill(4, cached)])
        return exact.iteration_s(batch) - exact.iteration_s(BatchShape(prefills=[Prefill(4, 0)]))

    kv = MODEL.kv_bytes_per_token() * 60_000
    assert attention_s(60_000) >= 0.9 * kv / GPU.bandwidth_bytes_per_s


def test_uneven_contexts_cost_a_little_more_than_even_ones(exact):
    even = exact.generation.seconds([1000] * 64)
    uneven = exact.generation.seconds([100] * 63 + [1000 * 64 - 6300])
    assert even < uneven < 3 * even


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


@given(prefills, decodes, st.integers(1, 500), st.integers(1, 9000))
def test_more_work_is_never_cheaper(toy, prefills, decodes, tokens, context):
    before = toy.iteration_s(BatchShape(prefills=prefills, decodes=decodes))
    first, *rest = prefills
    for more in (
        BatchShape(
            prefills=[first._replace(num_new=first.num_new + tokens), *rest], decodes=decodes
        ),
        BatchShape(
            prefills=[first._replace(num_cached=first.num_cached + tokens), *rest], decodes=decodes
        ),
        BatchShape(prefills=[*prefills, Prefill(tokens, 0)], decodes=decodes),
        BatchShape(prefills=prefills, decodes=[*decodes, context]),
        BatchShape(prefills=prefills, decodes=[context + 1, *decodes]),
    ):
        assert toy.iteration_s(more) * TOLERANCE >= before


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
