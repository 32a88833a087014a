"""Cost models: what holds for each of them, the roofline, noise, capacity and the registry."""

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
from cosched.lab.cost_models.cost_model import OVERLAPPED, SYNCHRONOUS, CpuOverhead, PrefixReads
from cosched.lab.cost_models.noise import NoisyModel
from cosched.lab.cost_models.profile_model import MIN_POINTS, ProfileModel
from cosched.lab.cost_models.registry import COST_MODELS, make_cost_model
from cosched.lab.cost_models.roofline import RooflineModel
from cosched.lab.cost_models.sglang_defaults import default_mem_fraction, kv_capacity_tokens
from cosched.lab.cost_models.specs import GPUS, MODELS
from cosched.predict.profile_file import FILE_VERSION, MeasuredPoint, Profile
from tests.lab.cost_models.batches import typical_batches
from tests.lab.cost_models.synthetic import GPU, MODEL

LLAMA = MODELS["Llama-3.1-8B"]
BATCH = BatchShape(prefills=[Prefill(512, 1024)], decodes=[700] * 30)
BATCHES = typical_batches(seed=5, num=300, max_kv_tokens=100_000)


def roofline(**changes):
    return RooflineModel(**({"model": LLAMA, "gpu": GPUS["H100"]} | changes))


@pytest.fixture(scope="module")
def fitted(toy) -> ProfileModel:
    noisy = NoisyModel(toy, seed=0, sigma=0.03)
    return ProfileModel.fit(
        [MeasuredPoint(batch=batch, seconds=noisy.iteration_s(batch)) for batch in BATCHES]
    )


@given(
    prefills=st.lists(st.builds(Prefill, st.integers(1, 4000), st.integers(0, 9000)), max_size=3),
    decodes=st.lists(st.integers(1, 9000), min_size=1, max_size=50),
    tokens=st.integers(1, 500),
)
@pytest.mark.parametrize("name", sorted(COST_MODELS))
def test_more_work_is_never_cheaper(toy, fitted, name, prefills, decodes, tokens):
    model = {"roofline": roofline(), "kernel-table": toy, "profile": fitted}[name]
    # Measured kernels are not monotone in the batch size to the last per cent.
    tolerance = 1.03 if name == "kernel-table" else 1.0
    before = model.iteration_s(BatchShape(prefills=prefills, decodes=decodes))
    more = [
        BatchShape(prefills=[*prefills, Prefill(tokens, 3)], decodes=decodes),
        BatchShape(prefills=prefills, decodes=[*decodes, tokens]),
        BatchShape(prefills=prefills, decodes=[decodes[0] + tokens, *decodes[1:]]),
    ]
    if prefills and name != "profile":
        first, *rest = prefills
        for grown in (
            first._replace(num_new=first.num_new + tokens),
            first._replace(num_cached=first.num_cached + tokens),
        ):
            more.append(BatchShape(prefills=[grown, *rest], decodes=decodes))
    for batch in more:
        assert model.iteration_s(batch) * tolerance >= before, batch


# -- roofline -------------------------------------------------------------------------------------


def test_many_questions_on_one_document_are_read_2_times_as_fast():
    """By bytes over bandwidth alone 13.4 ms become 4.0 (docs/architecture.md)."""
    batch = BatchShape(decodes=[10_200] * 32, num_repeated=31 * 10_000)
    each, once = (
        roofline(gpu=GPUS["H200"], prefix_reads=PrefixReads(way)).iteration_s(batch)
        for way in ("each", "once")
    )
    assert 2 < each / once < 4


@given(st.lists(st.integers(100, 9000), min_size=2, max_size=50), st.floats(0, 1))
def test_reading_once_is_below_the_cache_and_that_below_reading_each(decodes, share):
    batch = BatchShape(decodes=decodes, num_repeated=int(share * (sum(decodes) - len(decodes))))
    once, cached, each = (
        roofline(prefix_reads=PrefixReads(way)).iteration_s(batch)
        for way in ("once", "cached", "each")
    )
    assert once <= each and cached <= each
    assert each == roofline().iteration_s(replace(batch, num_repeated=0))


def test_one_decode_reads_the_weights_and_no_batch_takes_no_time():
    weights_s = LLAMA.weight_bytes() / GPUS["H100"].bandwidth_bytes_per_s
    assert weights_s < roofline().iteration_s(BatchShape(decodes=[10])) < 2 * weights_s
    assert roofline().iteration_s(BatchShape()) == 0.0


def test_overhead_counts_the_requests():
    slow, fast = (roofline(overhead=overhead) for overhead in (SYNCHRONOUS, OVERLAPPED))
    extra = SYNCHRONOUS.fixed_s + 31 * SYNCHRONOUS.per_sequence_s - OVERLAPPED.fixed_s
    assert slow.iteration_s(BATCH) - fast.iteration_s(BATCH) == pytest.approx(extra)


# -- noise ----------------------------------------------------------------------------------------


def draws(count=5000, **changes):
    model = NoisyModel(roofline(), **({"seed": 1, "sigma": 0.1} | changes))
    base = model.base.iteration_s(BATCH)
    return np.array([model.iteration_s(BATCH) for _ in range(count)]) / base


def test_noise_has_mean_one_and_the_scatter_and_outliers_that_were_asked_for():
    plain = draws()
    assert plain.mean() == pytest.approx(1, abs=0.01)
    assert np.log(plain).std() == pytest.approx(0.1, rel=0.05)
    ratio = draws(outlier_ratio=0.01, outlier_factor=5.0) / plain
    assert set(np.round(ratio, 6)) == {1.0, 5.0}
    assert (ratio > 1).mean() == pytest.approx(0.01, abs=0.005)
    assert np.all(draws(count=10, sigma=0.0) == 1)


def test_equal_seeds_draw_alike_and_others_do_not():
    assert draws(count=50).tolist() == draws(count=50).tolist()
    assert draws(count=5).tolist() != draws(count=5, seed=2).tolist()


@pytest.mark.parametrize(
    "wrong", [{"sigma": -0.1}, {"outlier_ratio": 2.0}, {"outlier_factor": 0.5}]
)
def test_wrong_values_of_noise_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        draws(**wrong)


# -- capacity and specs ---------------------------------------------------------------------------


def test_capacity_is_that_of_the_server_log_of_sglang():
    # SGLang documentation, server log: Llama-3.1-8B, H100, --mem-fraction-static 0.88.
    tokens = kv_capacity_tokens(LLAMA, GPUS["H100"], mem_fraction=0.88)
    assert tokens == pytest.approx(444_500, rel=0.005)
    default = default_mem_fraction(GPUS["A100-80"])
    tokens = kv_capacity_tokens(LLAMA, GPUS["A100-80"])
    assert tokens == kv_capacity_tokens(LLAMA, GPUS["A100-80"], mem_fraction=default)
    assert kv_capacity_tokens(LLAMA, GPUS["A100-80"], page_size=64) % 64 == 0


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"Llama-3-70B leaves no room .* 131\.\d GiB"):
        kv_capacity_tokens(MODELS["Llama-3-70B"], GPUS["H100"])


BILLIONS = {
    "Llama-3.1-8B": 8.03,
    "Llama-3-70B": 70.6,
    "Llama-2-7B": 6.74,
    "Llama-2-13B": 13.0,
    "Llama-33B": 32.5,
    "OPT-13B": 12.85,
    "OPT-30B": 30.0,
    "OPT-175B": 175.0,
    "Qwen2.5-7B": 7.62,
    "Qwen2.5-14B": 14.8,
    "Mistral-7B": 7.25,
    "Yi-34B": 34.4,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_models_have_as_many_parameters_as_published(name):
    assert MODELS[name].weight_bytes() / 2e9 == pytest.approx(BILLIONS[name], rel=0.02)


def test_a_slowed_device_takes_longer_once_it_has_worked_so_long():
    model = make_cost_model("roofline", model=MODEL, gpu=GPU, slower=2.0, slower_after_s=0.5)
    whole_s = model.base.iteration_s(BATCH)
    times = [model.iteration_s(BATCH) for _ in range(2 * math.ceil(0.5 / whole_s))]
    slow = [index for index, seconds in enumerate(times) if seconds > 1.5 * whole_s]
    assert slow == list(range(math.ceil(0.5 / whole_s), len(times)))
    assert set(times) == {whole_s, 2 * whole_s}
    assert model.describe()["slower"] == {"factor": 2.0, "after_s": 0.5}


# -- registry -------------------------------------------------------------------------------------


def test_a_model_of_the_registry_describes_itself_in_json(table_dir):
    arguments = {"model": MODEL, "gpu": GPU, "data_dir": table_dir, "mixed_decode_factor": 1.6}
    noisy = make_cost_model("kernel-table", **arguments, noise_sigma=0.05, seed=3)
    described = json.loads(json.dumps(noisy.describe()))
    assert described["noise"]["seed"] == 3 and noisy.name == "kernel-table+noise"
    assert noisy.base.describe()["mixed_decode_factor"] == 1.6


H100 = {"model": "Llama-3.1-8B", "gpu": "H100"}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rooflines", {}, "unknown cost model 'rooflines'; choose from kernel-table, profile"),
        ("roofline", H100 | {"model": "GPT-5"}, "unknown model 'GPT-5'; choose from"),
        ("roofline", H100 | {"gpu": "B300"}, "unknown GPU 'B300'; choose from"),
        ("roofline", {"model": "Llama-2-7B"}, "'roofline' needs a gpu"),
        ("roofline", H100 | {"tp": 3}, r"tp is 3, but Llama-3\.1-8B has 32 heads"),
        ("profile", {"mixed_decode_factor": 1.6}, "'profile' has no mixed_decode_factor"),
        ("roofline", H100 | {"prefix_reads": "twice"}, "prefix_reads is 'twice'; choose from"),
        ("kernel-table", H100, "needs data_dir"),
        ("profile", {}, "needs profile, a file"),
        ("profile", H100 | {"prefix_reads": "once"}, "was measured with prefix_reads 'each' only"),
    ],
)
def test_a_wrong_argument_is_named(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_cost_model(name, **arguments)


def test_an_overhead_in_milliseconds_is_refused():
    with pytest.raises(ConfigError, match="fixed_s is 5"):
        CpuOverhead(fixed_s=5)


# -- measured iterations and the file that holds them ---------------------------------------------


def test_a_profile_learns_a_machine_it_was_not_shaped_after(fitted, toy):
    assert fitted.held_out.num_points == 60
    assert fitted.held_out.mean < 0.1
    unseen = typical_batches(seed=6, num=100, max_kv_tokens=100_000)
    relative = [fitted.iteration_s(batch) / toy.iteration_s(batch) - 1 for batch in unseen]
    assert sum(map(abs, relative)) / len(relative) < 0.1


def test_a_file_gives_the_same_model_back(fitted, tmp_path):
    path = tmp_path / "profile.json"
    Profile(points=fitted.points, about={"seed": 3}).save(path)
    assert ProfileModel.load(path) == ProfileModel.fit(fitted.points, source={"seed": 3})
    again = make_cost_model("profile", profile=path)
    assert again.iteration_s(BATCHES[0]) == pytest.approx(fitted.iteration_s(BATCHES[0]))


def file(*points, version=FILE_VERSION):
    return json.dumps({"format": "cosched-profile", "version": version, "points": points})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot read .*bad\.json"),
        ("{", r"bad\.json is not JSON"),
        ("[]", "expected a JSON object"),
        (file(version=7), "version 7; expected 'cosched-profile', version 2"),
        (file(), rf"bad\.json: .* 0 points; .* least {MIN_POINTS}"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, content, message):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        ProfileModel.load(path)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"prefills": [], "decodes": [1]}, "missing required field `seconds`"),
        ({"prefills": [], "decodes": [], "seconds": 1.0}, "neither prefills nor decodes"),
        ({"prefills": [], "decodes": [0], "seconds": 1.0}, r"`int` >= 1 .*decodes.*: \[0\]"),
        ({"prefills": [[1]], "decodes": [], "seconds": 1.0}, "`array` of length 2"),
        ({"prefills": [], "decodes": [1], "seconds": 0}, "> 0.0 .*seconds.*'seconds': 0"),
        ({"prefills": [], "decodes": [1], "seconds": 1, "x": 1}, "unknown field `x`"),
    ],
)
def test_a_bad_point_is_named_by_its_place(tmp_path, point, message):
    good = {"prefills": [[8, 0]], "decodes": [], "seconds": 0.01}
    (tmp_path / "bad.json").write_text(file(good, point))
    with pytest.raises(ConfigError, match=r"bad\.json: points\[1\]: .*" + message):
        ProfileModel.load(tmp_path / "bad.json")


def test_an_encoder_takes_the_time_of_its_products():
    """Of 4 patches a token: 2 * 675e6 * 4 FLOPs at 72 % of an A100's 312e12 are 24 us."""
    model = make_cost_model("roofline", model="Qwen2.5-VL-7B", gpu="A100-80")
    text = BatchShape(prefills=[Prefill(1000, 0), Prefill(50, 0)])
    added_s = model.iteration_s(replace(text, encoded=[900, 100])) - model.iteration_s(text)
    assert added_s == pytest.approx(1000 * 24.04e-6, rel=1e-3)
