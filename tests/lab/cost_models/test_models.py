"""Roofline, noise, capacity, specs and the registry."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import BatchShape, Prefill
from cosched.errors import ConfigError
from cosched.lab.cost_models.base import OVERLAPPED, SYNCHRONOUS, CpuOverhead, PrefixReads
from cosched.lab.cost_models.capacity import default_mem_fraction, kv_capacity_tokens
from cosched.lab.cost_models.noise import NoisyModel
from cosched.lab.cost_models.registry import COST_MODELS, make_cost_model
from cosched.lab.cost_models.roofline import RooflineModel
from cosched.lab.cost_models.specs import GPUS, MODELS
from tests.lab.cost_models.batches import typical_batches
from tests.lab.cost_models.synthetic import GPU, MODEL

BATCH = BatchShape(prefills=[Prefill(512, 1024)], decodes=[700] * 30)


def test_many_questions_on_one_document_are_read_2_times_as_fast():
    """By bytes over bandwidth alone 13.4 ms become 4.0 (docs/kernels.md)."""
    batch = BatchShape(decodes=[10_200] * 32, num_repeated=31 * 10_000)
    each, once = (
        roofline(gpu=GPUS["H200"], prefix_reads=PrefixReads(way)).iteration_s(batch)
        for way in ("each", "once")
    )
    assert 2 < each / once < 4


@pytest.mark.parametrize(
    ("name", "way", "message"),
    [
        ("roofline", "twice", "prefix_reads is 'twice'; choose from"),
        ("profile", "once", "'profile' was measured with prefix_reads 'each' only"),
    ],
)
def test_an_unknown_way_to_read_is_refused(name, way, message):
    with pytest.raises(ConfigError, match=message):
        make_cost_model(name, model="Llama-3.1-8B", gpu="H100", prefix_reads=way)


def roofline(**changes):
    return RooflineModel(**({"model": MODELS["Llama-3.1-8B"], "gpu": GPUS["H100"]} | changes))


class TestRoofline:
    @given(
        st.lists(st.builds(Prefill, st.integers(1, 4000), st.integers(0, 9000)), max_size=3),
        st.lists(st.integers(1, 9000), min_size=1, max_size=50),
    )
    def test_more_work_is_never_cheaper(self, prefills, decodes):
        model = roofline()
        before = model.iteration_s(BatchShape(prefills=prefills, decodes=decodes))
        more = [
            BatchShape(prefills=[*prefills, Prefill(7, 3)], decodes=decodes),
            BatchShape(prefills=prefills, decodes=[*decodes, 5]),
            BatchShape(prefills=prefills, decodes=[decodes[0] + 5, *decodes[1:]]),
        ]
        assert all(model.iteration_s(batch) >= before for batch in more)

    @given(st.lists(st.integers(100, 9000), min_size=2, max_size=50), st.floats(0, 1))
    def test_reading_once_is_below_the_cache_and_that_below_reading_each(self, decodes, share):
        batch = BatchShape(decodes=decodes, num_repeated=int(share * (sum(decodes) - len(decodes))))
        once, cached, each = (
            roofline(prefix_reads=PrefixReads(way)).iteration_s(batch)
            for way in ("once", "cached", "each")
        )
        assert once <= each and cached <= each
        assert each == roofline().iteration_s(replace(batch, num_repeated=0))

    def test_one_decode_reads_the_weights(self):
        weights_s = MODELS["Llama-3.1-8B"].weight_bytes() / GPUS["H100"].bandwidth_bytes_per_s
        assert weights_s < roofline().iteration_s(BatchShape(decodes=[10])) < 2 * weights_s

    def test_within_a_factor_of_three_of_tables(self, toy):
        model = RooflineModel(model=MODEL, gpu=GPU)
        for batch in typical_batches(seed=0, num=200, max_kv_tokens=200_000):
            assert 1 / 3 < model.iteration_s(batch) / toy.iteration_s(batch) < 3

    def test_overhead_counts_the_requests(self):
        slow, fast = (roofline(overhead=overhead) for overhead in (SYNCHRONOUS, OVERLAPPED))
        extra = SYNCHRONOUS.fixed_s + 31 * SYNCHRONOUS.per_sequence_s - OVERLAPPED.fixed_s
        assert slow.iteration_s(BATCH) - fast.iteration_s(BATCH) == pytest.approx(extra)

    def test_nothing_takes_no_time(self):
        assert roofline().iteration_s(BatchShape()) == 0.0

    def test_a_model_that_cannot_be_split(self):
        with pytest.raises(ConfigError, match=r"tp is 3, but Llama-3\.1-8B has 32 heads"):
            roofline(tp=3)


class TestNoise:
    def draws(self, count=5000, **changes):
        model = NoisyModel(roofline(), **({"seed": 1, "sigma": 0.1} | changes))
        base = model.base.iteration_s(BATCH)
        return np.array([model.iteration_s(BATCH) for _ in range(count)]) / base

    def test_mean_one_and_the_asked_scatter(self):
        draws = self.draws()
        assert draws.mean() == pytest.approx(1, abs=0.01)
        assert np.log(draws).std() == pytest.approx(0.1, rel=0.05)

    def test_equal_seeds_draw_alike_and_others_do_not(self):
        assert self.draws().tolist() == self.draws().tolist()
        assert self.draws(count=5).tolist() != self.draws(count=5, seed=2).tolist()

    def test_outliers_are_added_on_top_of_the_same_scatter(self):
        ratio = self.draws(outlier_ratio=0.01, outlier_factor=5.0) / self.draws()
        assert set(np.round(ratio, 6)) == {1.0, 5.0}
        assert (ratio > 1).mean() == pytest.approx(0.01, abs=0.005)

    def test_no_sigma_is_the_base(self):
        assert np.all(self.draws(count=10, sigma=0.0) == 1)

    @pytest.mark.parametrize(
        "wrong", [{"sigma": -0.1}, {"outlier_ratio": 2.0}, {"outlier_factor": 0.5}]
    )
    def test_wrong_values_are_named(self, wrong):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            self.draws(**wrong)


class TestCapacity:
    def test_matches_the_server_log_of_sglang(self):
        # SGLang documentation, server log: Llama-3.1-8B, H100, --mem-fraction-static 0.88.
        tokens = kv_capacity_tokens(MODELS["Llama-3.1-8B"], GPUS["H100"], mem_fraction=0.88)
        assert tokens == pytest.approx(444_500, rel=0.005)

    def test_the_default_fraction_is_what_sglang_would_choose(self):
        # By its formula it keeps 13,904 MiB on both.
        assert default_mem_fraction(GPUS["A100-80"]) == 0.83
        assert default_mem_fraction(GPUS["H200"]) == 0.903
        default = kv_capacity_tokens(MODELS["Llama-3.1-8B"], GPUS["A100-80"])
        assert default == kv_capacity_tokens(
            MODELS["Llama-3.1-8B"], GPUS["A100-80"], mem_fraction=0.83
        )

    def test_whole_pages(self):
        tokens = kv_capacity_tokens(MODELS["Llama-3.1-8B"], GPUS["A100-80"], page_size=64)
        assert tokens % 64 == 0

    def test_two_gpus_have_more_than_twice_the_room_of_one(self):
        one, two = (kv_capacity_tokens(MODELS["Llama-2-13B"], GPUS["A100-80"], tp) for tp in (1, 2))
        assert two > 2 * one

    def test_a_model_that_does_not_fit(self):
        with pytest.raises(ConfigError, match=r"Llama-3-70B leaves no room .* 131\.\d GiB"):
            kv_capacity_tokens(MODELS["Llama-3-70B"], GPUS["H100"])

    @pytest.mark.parametrize(
        ("name", "billions"),
        [
            ("Llama-3.1-8B", 8.03),
            ("Llama-3-70B", 70.6),
            ("Llama-2-7B", 6.74),
            ("Llama-2-13B", 13.0),
            ("OPT-13B", 12.85),
            ("Qwen2.5-7B", 7.62),
            ("Qwen2.5-14B", 14.8),
            ("Mistral-7B", 7.25),
            ("Yi-34B", 34.4),
        ],
    )
    def test_models_have_as_many_parameters_as_published(self, name, billions):
        assert MODELS[name].weight_bytes() / 2e9 == pytest.approx(billions, rel=0.01)


class TestSlowing:
    def test_it_takes_longer_once_it_has_worked_so_long(self):
        model = make_cost_model("roofline", model=MODEL, gpu=GPU, slower=2.0, slower_after_s=0.5)
        whole_s = model.base.iteration_s(BATCH)
        times = [model.iteration_s(BATCH) for _ in range(2 * math.ceil(0.5 / whole_s))]
        slow = [index for index, seconds in enumerate(times) if seconds > 1.5 * whole_s]
        assert slow == list(range(math.ceil(0.5 / whole_s), len(times)))
        assert set(times) == {whole_s, 2 * whole_s}
        assert model.describe()["slower"] == {"factor": 2.0, "after_s": 0.5}


class TestRegistry:
    def test_models_by_name(self, table_dir):
        names = {
            make_cost_model("roofline", model="Llama-2-7B", gpu="A100-40").name,
            make_cost_model("kernel-table", model=MODEL, gpu=GPU, data_dir=str(table_dir)).name,
        }
        assert names == {"roofline", "kernel-table"} == COST_MODELS.keys() - {"profile"}

    def test_decodes_beside_prefills_are_dearer_where_a_table_has_such_a_part(self, table_dir):
        arguments = {"model": MODEL, "gpu": GPU, "data_dir": table_dir, "mixed_decode_factor": 1.6}
        model = make_cost_model("kernel-table", **arguments)
        assert model.describe()["mixed_decode_factor"] == 1.6
        with pytest.raises(ConfigError, match="'roofline' has no mixed_decode_factor"):
            make_cost_model("roofline", **arguments)

    def test_every_description_is_json(self, table_dir):
        noisy = make_cost_model(
            "kernel-table", model=MODEL, gpu=GPU, data_dir=table_dir, noise_sigma=0.05, seed=3
        )
        described = json.loads(json.dumps(noisy.describe()))
        assert described["noise"]["seed"] == 3
        assert noisy.name == "kernel-table+noise"

    @pytest.mark.parametrize(
        ("name", "arguments", "message"),
        [
            ("rooflines", {}, "unknown cost model 'rooflines'; choose from kernel-table, profile"),
            ("roofline", {"model": "GPT-5", "gpu": "H100"}, "unknown model 'GPT-5'; choose from"),
            ("roofline", {"model": "Llama-2-7B", "gpu": "B300"}, "unknown GPU 'B300'; choose from"),
            ("roofline", {"model": "Llama-2-7B"}, "'roofline' needs a gpu"),
            ("kernel-table", {"model": "Llama-2-7B", "gpu": "H100"}, "needs data_dir"),
            ("profile", {}, "needs profile, a file"),
        ],
    )
    def test_what_is_wrong_is_named(self, name, arguments, message):
        with pytest.raises(ConfigError, match=message):
            make_cost_model(name, **arguments)

    def test_an_overhead_in_milliseconds_is_refused(self):
        with pytest.raises(ConfigError, match="fixed_s is 5"):
            CpuOverhead(fixed_s=5)
