"""What a launch adds to the time of its kernels."""

import random

import pytest

from cosched.core.batch import BatchShape, BatchTotals, Prefill
from cosched.errors import ConfigError
from cosched.lab.cost_models.overheads import DeviceOverheads, Launches, overheads_named
from cosched.lab.cost_models.registry import make_cost_model
from cosched.lab.cost_models.specs import GPUS
from cosched.lab.simulation.run_spec import CostSpec
from cosched.predict.calibration import Calibrator

DECODES = BatchShape(decodes=[500] * 8)
PREFILL = BatchShape(prefills=[Prefill(100, 0)])
MIXED = BatchShape(prefills=[Prefill(100, 0)], decodes=[500] * 8)


@pytest.mark.parametrize("shape", [DECODES, PREFILL, MIXED])
def test_without_overheads_a_launch_takes_no_time(shape):
    assert Launches().launch(shape, now_s=3.0, device_done_s=2.0) == (3.0, 3.0)
    assert Launches().launch(shape, now_s=3.0, device_done_s=4.0) == (4.0, 3.0)


def test_a_launch_is_hidden_while_the_device_is_busy():
    launches = Launches(DeviceOverheads(launch_ms=2.0))
    assert launches.launch(DECODES, now_s=1.0, device_done_s=1.5) == pytest.approx((1.5, 1.002))
    assert launches.launch(DECODES, now_s=1.0, device_done_s=0.5) == pytest.approx((1.002, 1.002))


def test_a_prefill_of_flashinfer_waits_for_the_device_and_then_leaves_it_idle():
    launches = Launches(DeviceOverheads(launch_ms=1.0, prefill_sync_ms=2.0))
    for shape in (PREFILL, MIXED):
        times = launches.launch(shape, now_s=1.0, device_done_s=1.5)
        assert times == pytest.approx((1.502, 1.502))
    assert launches.launch(DECODES, now_s=1.0, device_done_s=1.5) == pytest.approx((1.5, 1.001))


def test_layers_outside_cuda_graphs_are_launched_one_after_the_other():
    launches = Launches(DeviceOverheads(eager_layer_ms=0.1), num_layers=30)
    for shape, host_s in ((DECODES, 0.0), (PREFILL, 0.003), (MIXED, 0.003)):
        _, returned_s = launches.launch(shape, now_s=1.0, device_done_s=1.5)
        assert returned_s == pytest.approx(1.0 + host_s)


def test_decodes_beyond_the_largest_graph_are_launched_layer_by_layer():
    launches = Launches(DeviceOverheads(no_graph_layer_ms=0.5), num_layers=30, largest_graph=4)
    for num_decodes, host_s in ((4, 0.0), (5, 0.015)):
        shape = BatchShape(decodes=(100,) * num_decodes)
        _, returned_s = launches.launch(shape, now_s=1.0, device_done_s=1.5)
        assert returned_s == pytest.approx(1.0 + host_s)


def test_only_the_iteration_after_a_mixed_one_waits_for_all_of_it():
    launches = Launches(DeviceOverheads(fence_ms=3.0))
    starts_s = [
        launches.launch(shape, now_s=1.0, device_done_s=1.5).start_s
        for shape in (DECODES, PREFILL, MIXED, DECODES, DECODES)
    ]
    assert starts_s == pytest.approx([1.5, 1.5, 1.5, 1.503, 1.5])


def test_the_default_overheads_are_those_of_sglangs_attention_backend_for_the_gpu():
    for name, syncs in (("A100-80", True), ("H100", False), ("H200", False)):
        found = CostSpec(device_overheads="auto").overheads(name)
        assert (found.prefill_sync_ms > 0) is syncs
        assert found.launch_ms > 0
        assert CostSpec().overheads(name) == DeviceOverheads()
    factors = {
        name: CostSpec(device_overheads=name).overheads("H100").mixed_decode_factor
        for name in ("fa3", "flashinfer", "triton")
    }
    assert factors == {"fa3": 1.0, "flashinfer": 1.6, "triton": 9.5}  # docs/results/gpu.md
    given = CostSpec(device_overheads="fa3", launch_ms=0.0).overheads("A100-80")
    assert given.launch_ms == 0 and given.fence_ms > 0


def test_overheads_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="'fa9'; choose from"):
        overheads_named("fa9", GPUS["H100"])
    for values in ({"launch_ms": -1}, {"fence_ms": float("nan")}, {"mixed_decode_factor": 0.9}):
        with pytest.raises(ConfigError, match="must be in"):
            DeviceOverheads(**values)


@pytest.mark.parametrize("gpu", ["A100-80", "H100"])
def test_what_mixing_costs_can_be_learned(gpu):
    """A factor on decodes beside prefills, and a wait of each iteration with a prefill."""
    model = make_cost_model("roofline", model="Llama-3.1-8B", gpu=gpu, mixed_decode_factor=2.0)
    draw = random.Random(0)

    def sample():
        kind = draw.choice(["prefill", "decode", "mixed"])
        decodes = [draw.randint(100, 6000) for _ in range(draw.randint(1, 128))]
        prefill = Prefill(draw.randint(16, 2000), draw.choice([0, 3000]))
        shape = BatchShape(
            prefills=[] if kind == "decode" else [prefill],
            decodes=[] if kind == "prefill" else decodes,
        )
        return shape, model.iteration_s(shape) + (0.002 if shape.prefills else 0.0)

    learned = Calibrator()
    for _ in range(600):
        learned.observe(*sample())
    samples = [sample() for _ in range(200)]
    errors = [learned.estimate_s(BatchTotals.of(shape)) / s - 1 for shape, s in samples]
    assert sum(map(abs, errors)) / len(errors) < 0.01
    assert max(map(abs, errors)) < 0.1
    mixed = BatchShape(prefills=[Prefill(512, 0)], decodes=[4000] * 64)
    plain = make_cost_model("roofline", model="Llama-3.1-8B", gpu=gpu)
    estimate_s = learned.estimate_s(BatchTotals.of(mixed))
    assert estimate_s > 1.3 * plain.iteration_s(mixed)
