"""Fitting measured iterations, and the file that holds them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.batch import BatchShape, Prefill
from cosched.errors import ConfigError
from cosched.lab.cost_models.noise import NoisyModel
from cosched.lab.cost_models.profile_model import MIN_POINTS, ProfileModel
from cosched.lab.cost_models.registry import make_cost_model
from cosched.predict.profile_file import FILE_VERSION, MeasuredPoint, Profile
from tests.lab.cost_models.batches import typical_batches

BATCHES = typical_batches(seed=5, num=300, max_kv_tokens=100_000)


def measure(model, batches=BATCHES):
    return [MeasuredPoint(batch=batch, seconds=model.iteration_s(batch)) for batch in batches]


@pytest.fixture(scope="module")
def fitted(toy) -> ProfileModel:
    return ProfileModel.fit(measure(NoisyModel(toy, seed=0, sigma=0.03)))


def test_learns_a_machine_it_was_not_shaped_after(fitted, toy):
    assert fitted.held_out.num_points == 60
    assert fitted.held_out.mean < 0.1
    unseen = typical_batches(seed=6, num=100, max_kv_tokens=100_000)
    relative = [fitted.iteration_s(batch) / toy.iteration_s(batch) - 1 for batch in unseen]
    assert sum(map(abs, relative)) / len(relative) < 0.1


@given(
    st.lists(st.builds(Prefill, st.integers(1, 4000), st.integers(0, 9000)), max_size=3),
    st.lists(st.integers(1, 9000), min_size=1, max_size=50),
)
def test_more_work_is_never_cheaper(fitted, prefills, decodes):
    before = fitted.iteration_s(BatchShape(prefills=prefills, decodes=decodes))
    for more in (
        BatchShape(prefills=[*prefills, Prefill(7, 3)], decodes=decodes),
        BatchShape(prefills=prefills, decodes=[*decodes, 5]),
        BatchShape(prefills=prefills, decodes=[decodes[0] + 5, *decodes[1:]]),
    ):
        assert fitted.iteration_s(more) >= before


def test_a_file_gives_the_same_model_back(fitted, tmp_path):
    path = tmp_path / "profile.json"
    Profile(points=fitted.points, about={"seed": 3}).save(path)
    loaded = ProfileModel.load(path)
    assert loaded == ProfileModel.fit(fitted.points, source={"seed": 3})
    assert make_cost_model("profile", profile=path).iteration_s(BATCHES[0]) == pytest.approx(
        fitted.iteration_s(BATCHES[0])
    )


class TestBadFiles:
    def load(self, tmp_path, content):
        path = tmp_path / "bad.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return ProfileModel.load(path)

    def file(self, *points):
        return {"format": "cosched-profile", "version": FILE_VERSION, "points": list(points)}

    def test_not_there(self, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
            ProfileModel.load(tmp_path / "none.json")

    def test_not_json(self, tmp_path):
        with pytest.raises(ConfigError, match=r"bad\.json is not JSON"):
            self.load(tmp_path, "{")

    def test_not_an_object(self, tmp_path):
        with pytest.raises(ConfigError, match="expected a JSON object"):
            self.load(tmp_path, [])

    def test_another_version(self, tmp_path):
        with pytest.raises(ConfigError, match="version 7; expected 'cosched-profile', version 2"):
            self.load(tmp_path, {"format": "cosched-profile", "version": 7, "points": []})

    def test_too_few_points(self, tmp_path):
        with pytest.raises(ConfigError, match=rf"bad\.json: .* 0 points; .* least {MIN_POINTS}"):
            self.load(tmp_path, self.file())

    @pytest.mark.parametrize(
        ("point", "message"),
        [
            ({"prefills": [], "decodes": [1]}, "missing required field `seconds`"),
            ({"prefills": [], "decodes": [], "seconds": 1.0}, "neither prefills nor decodes"),
            ({"prefills": [], "decodes": [0], "seconds": 1.0}, r"`int` >= 1 .*decodes.*: \[0\]"),
            ({"prefills": [[1]], "decodes": [], "seconds": 1.0}, "`array` of length 2"),
            ({"prefills": [[1, 0.5]], "decodes": [], "seconds": 1.0}, "`int`, got `float`"),
            ({"prefills": 3, "decodes": [], "seconds": 1.0}, "`array`, got `int` .*prefills"),
            ({"prefills": [], "decodes": [1], "seconds": 0}, "> 0.0 .*seconds.*'seconds': 0"),
            ({"prefills": [], "decodes": [1], "seconds": "1"}, "`float`, got `str` .*seconds"),
            ({"prefills": [], "decodes": [1], "seconds": 1, "x": 1}, "unknown field `x`"),
        ],
    )
    def test_a_bad_point_is_named_by_its_place(self, tmp_path, point, message):
        good = {"prefills": [[8, 0]], "decodes": [], "seconds": 0.01}
        with pytest.raises(ConfigError, match=r"bad\.json: points\[1\]: .*" + message):
            self.load(tmp_path, self.file(good, point))
