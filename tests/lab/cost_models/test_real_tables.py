"""Measured tables of real GPUs, where the machine has them: errors below the stated bounds."""

from __future__ import annotations

from itertools import product

import pytest

from cosched.core.batch import BatchShape, Prefill
from cosched.lab.cost_models.registry import make_cost_model
from cosched.lab.cost_models.sglang_defaults import kv_capacity_tokens
from cosched.lab.cost_models.specs import MODELS
from tests.lab.cost_models.batches import roofline_ratio, typical_batches

TABLE_GPUS = ("A100-80", "H100", "H200")


@pytest.fixture(scope="module", params=TABLE_GPUS)
def pair(request, real_tables):
    """(kernel tables, roofline) of Llama-3.1-8B on one GPU."""
    arguments = {"model": "Llama-3.1-8B", "gpu": request.param}
    return (
        make_cost_model("kernel-table", data_dir=real_tables, **arguments),
        make_cost_model("roofline", **arguments),
    )


def test_roofline_is_within_a_factor_of_three(pair):
    table, roofline = pair
    capacity = kv_capacity_tokens(table.model, table.gpu)
    batches = typical_batches(seed=2, num=300, max_kv_tokens=capacity)
    for batch in batches:
        assert 1 / 3 < roofline.iteration_s(batch) / table.iteration_s(batch) < 3
    for error in roofline_ratio(roofline, table, batches).values():
        assert error.mean < 0.25


def test_one_request_on_an_h100_decodes_as_fast_as_sglang_did(real_tables):
    # SGLang documentation, server log: Llama-3.1-8B, one H100, one request: 144 tokens/s.
    model = make_cost_model("kernel-table", model="Llama-3.1-8B", gpu="H100", data_dir=real_tables)
    assert 1 / model.iteration_s(BatchShape(decodes=[60])) == pytest.approx(144, rel=0.05)


# No table has a whole model of 175B on one GPU, nor would one hold it.
@pytest.mark.parametrize(
    ("name", "tp"), [pair for pair in product(MODELS, (1, 4)) if pair != ("OPT-175B", 1)]
)
def test_every_model_can_be_read_from_the_tables(real_tables, name, tp):
    # The smallest table: what it holds the others hold too.
    model = make_cost_model("kernel-table", model=name, gpu="A100-80", tp=tp, data_dir=real_tables)
    batch = BatchShape(decodes=[100] * 8)
    experts = model.model.experts
    share = 1 if experts is None else experts.distinct(8) / experts.number
    reading_s = share * model.model.weight_bytes(tp) / model.gpu.bandwidth_bytes_per_s
    assert reading_s < model.iteration_s(batch) < 4 * reading_s


def test_slower_memory_slows_what_reads_it(real_tables):
    slow, fast = (
        make_cost_model("kernel-table", model="Llama-2-7B", gpu=gpu, data_dir=real_tables)
        for gpu in ("A100-40", "A100-80")
    )
    decode = BatchShape(decodes=[100] * 8)
    assert 1.1 < slow.iteration_s(decode) / fast.iteration_s(decode) < 2.039 / 1.555
    prefill = BatchShape(prefills=[Prefill(4096, 0)])
    assert 1.0 < slow.iteration_s(prefill) / fast.iteration_s(prefill) < 1.05
