"""The profile file, and whose engine it is of."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from cosched.core.batch import BatchTotals
from cosched.errors import ConfigError
from cosched.predict.fitted import fit_predictor
from cosched.predict.profile_file import EngineIdentity, MeasuredPoint, Profile
from tests.predict.batches import scheduler_batches

ENGINE = EngineIdentity(
    device="NVIDIA H200",
    num_cores=None,
    model="meta-llama/Llama-3.1-8B",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    dtype="bfloat16",
    quantization=None,
    tp=2,
    sglang="0.5.21",
)


@pytest.fixture(scope="module")
def profile(toy) -> Profile:
    batches = scheduler_batches(seed=0, num=120, max_kv_tokens=100_000)
    points = [MeasuredPoint(batch=b, seconds=toy.iteration_s(b)) for b in batches]
    predictor = fit_predictor("cosched", batches, [p.seconds for p in points])
    return Profile(
        points=points,
        engine=ENGINE,
        predictor=predictor,
        held_out={"num_points": 3},
        about={"seed": 0},
    )


def test_a_file_gives_everything_back(profile, tmp_path):
    path = tmp_path / "profile.json"
    profile.save(path)
    loaded = Profile.load(path)
    assert loaded.engine == ENGINE
    assert list(loaded.points) == list(profile.points)
    assert (loaded.held_out, loaded.about) == ({"num_points": 3}, {"seed": 0})
    for point in profile.points:
        totals = BatchTotals.of(point.batch)
        assert loaded.predictor.predict_s(totals) == profile.predictor.predict_s(totals)


def test_a_predictor_of_an_earlier_form_is_fitted_again(profile, tmp_path):
    path = tmp_path / "p.json"
    profile.save(path)
    data = json.loads(path.read_text())
    curve = {"sizes": [8, 16, 8192], "seconds": [1.0, 1.0, 1.0], "num_graphs": 2}
    data["predictor"] = {"predictor": "cosched", "prefill": curve, "decode": curve, "surface": []}
    path.write_text(json.dumps(data))
    predictor = Profile.load(path).predictor
    assert predictor.prefill.graphs == predictor.decode.graphs == (8, 16)
    for point in profile.points:
        totals = BatchTotals.of(point.batch)
        assert predictor.predict_s(totals) == pytest.approx(point.seconds, rel=0.5)


@pytest.mark.parametrize("num_unknown", [1, 2])
def test_a_predictor_that_knows_no_media_is_read(profile, tmp_path, num_unknown):
    path = tmp_path / "p.json"
    profile.save(path)
    data = json.loads(path.read_text())
    costs = data["predictor"]["prefill"]["costs"]
    assert [costs.pop() for _ in range(num_unknown)] == [0.0] * num_unknown
    path.write_text(json.dumps(data))
    assert Profile.load(path).predictor.to_dict() == profile.predictor.to_dict()


def test_the_predictor_of_the_same_engine_is_given_wherever_its_model_lies(profile, tmp_path):
    profile.save(tmp_path / "p.json")
    here = replace(ENGINE, model="/models/llama")
    assert Profile.of_engine(tmp_path / "p.json", here).predictor_named(None).name == "cosched"


@pytest.mark.parametrize("name", sorted({f.name for f in fields(EngineIdentity)} - {"model"}))
def test_every_difference_is_refused_and_named(profile, tmp_path, name):
    profile.save(tmp_path / "p.json")
    value = getattr(ENGINE, name)
    other = value + 1 if isinstance(value, int) else f"another {name}"
    with pytest.raises(ConfigError, match=r"p\.json: .* is of another engine") as refusal:
        Profile.of_engine(tmp_path / "p.json", replace(ENGINE, **{name: other}))
    assert f"{name} is {value!r}, expected {other!r}" in str(refusal.value)


def test_a_profile_of_nobody_is_no_estimate(profile, tmp_path):
    replace(profile, engine=None).save(tmp_path / "p.json")
    with pytest.raises(ConfigError, match=r"p\.json: .* names no engine"):
        Profile.of_engine(tmp_path / "p.json", ENGINE)
    replace(profile, predictor=None).save(tmp_path / "p.json")
    with pytest.raises(ConfigError, match=r"p\.json: .* names no predictor"):
        Profile.of_engine(tmp_path / "p.json", ENGINE)


def test_a_bad_engine_or_predictor_is_named(profile, tmp_path):
    path = tmp_path / "p.json"
    profile.save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"engine": {"device": "x"}}))
    with pytest.raises(ConfigError, match=r"p\.json: engine has \['device'\]; expected .*'tp'"):
        Profile.load(path)
    path.write_text(json.dumps(data | {"predictor": {"predictor": "echoo"}}))
    with pytest.raises(ConfigError, match=r"p\.json: unknown predictor 'echoo'; choose from bros"):
        Profile.load(path)


def test_an_interrupted_save_leaves_the_old_file(profile, tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    profile.save(path)
    before = path.read_bytes()
    broken = replace(
        profile, points=[MeasuredPoint(batch=p.batch, seconds=float("nan")) for p in profile.points]
    )
    with pytest.raises(ValueError):
        broken.save(path)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        profile.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
