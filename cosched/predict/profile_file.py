"""The profile file: measured iterations, of which engine they are, and what was fitted to them.

One format for two readers: the simulator's cost model ``profile`` reads the points, a server's
policy starts from the fitted predictor. Fields: docs/operate.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cosched.core.batch import BatchShape, Prefill
from cosched.errors import ConfigError
from cosched.files import write_whole
from cosched.predict.fitted import FittedPredictor, GraphSizes, fit_predictor, predictor_from_dict

FILE_FORMAT = "cosched-profile"
FILE_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """One iteration as the engine ran it and the time it took [s]."""

    batch: BatchShape
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """What the time of an iteration depends on besides its batch.

    device       name of the GPU or model of the CPU
    num_cores    CPU cores that compute; None: a GPU does
    model        name or path, for people: models of equal shape take equal time
    tp           tensor parallel size
    sglang       its version
    """

    device: str
    num_cores: int | None
    model: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    dtype: str
    quantization: str | None
    tp: int
    sglang: str

    def differences(self, expected: EngineIdentity) -> list[str]:
        """What of this is not as expected, each with both values; empty when nothing is."""
        different = [
            f"{name} is {mine!r}, expected {other!r}"
            for name, mine, other in (
                (f.name, getattr(self, f.name), getattr(expected, f.name)) for f in fields(self)
            )
            if name != "model" and mine != other
        ]
        if different and self.model != expected.model:
            different.append(f"model is {self.model!r}, expected {expected.model!r}")
        return different

    @classmethod
    def from_dict(cls, data: Any) -> EngineIdentity:
        """ConfigError naming the keys that are missing or too many."""
        names = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            found = sorted(data) if isinstance(data, dict) else data
            raise ConfigError(f"engine has {found}; expected {sorted(names)}")
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The content of a profile file.

    engine     whose iterations they are; None: not said, and then only a simulation can use it
    predictor  fitted to all points; None: there is none
    held_out   errors of predictors fitted to a part of the points, on the others, by name
    about      how it was measured: versions, seed, repeats; for people
    """

    points: Sequence[MeasuredPoint]
    engine: EngineIdentity | None = None
    predictor: FittedPredictor | None = None
    held_out: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """ConfigError naming file and entry when it is no profile."""
        data = _read_json(path)
        if data.get("format") != FILE_FORMAT or data.get("version") != FILE_VERSION:
            raise ConfigError(
                f"{path}: format {data.get('format')!r}, version {data.get('version')!r}; "
                f"expected {FILE_FORMAT!r}, version {FILE_VERSION}"
            )
        entries = data.get("points")
        if not isinstance(entries, list):
            raise ConfigError(f"{path}: 'points' must be a list")
        engine = data.get("engine")
        try:
            points = [_point(entry, where=f"points[{i}]") for i, entry in enumerate(entries)]
            return cls(
                points=points,
                engine=None if engine is None else EngineIdentity.from_dict(engine),
                predictor=_predictor(data.get("predictor"), points),
                held_out=data.get("held_out", {}),
                about=data.get("about", {}),
            )
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def of_engine(cls, path: Path, expected: EngineIdentity) -> Profile:
        """A file that can be a policy's estimate of this engine. ConfigError naming every
        difference when it is of another engine, or when it holds no predictor."""
        profile = cls.load(path)
        if profile.engine is None or profile.predictor is None:
            missing = "engine" if profile.engine is None else "predictor"
            raise ConfigError(
                f"{path}: the latency profile names no {missing}, so it cannot be a policy's "
                "estimate; write one with python -m cosched.profile measure"
            )
        different = profile.engine.differences(expected)
        if different:
            raise ConfigError(
                f"{path}: the latency profile is of another engine: {'; '.join(different)}; "
                "measure this one with python -m cosched.profile measure"
            )
        return profile

    def predictor_named(self, name: str | None) -> FittedPredictor:
        """Its predictor; with another name that predictor, fitted to its points."""
        if self.predictor is not None and name in (None, self.predictor.name):
            return self.predictor
        assert name is not None, "the profile has no predictor"
        batches = [point.batch for point in self.points]
        return fit_predictor(name, batches, [point.seconds for point in self.points])

    def save(self, path: Path) -> None:
        """Write it in one step: an interrupted call leaves the file that was there."""
        data = {
            "format": FILE_FORMAT,
            "version": FILE_VERSION,
            "engine": None if self.engine is None else asdict(self.engine),
            "about": dict(self.about),
            "held_out": dict(self.held_out),
            "predictor": None if self.predictor is None else self.predictor.to_dict(),
            "points": [
                {
                    "prefills": [list(prefill) for prefill in point.batch.prefills],
                    "decodes": list(point.batch.decodes),
                    "seconds": point.seconds,
                }
                for point in self.points
            ],
        }
        write_whole(path, json.dumps(data, allow_nan=False) + "\n")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the latency profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return data


def _predictor(data: Any, points: Sequence[MeasuredPoint]) -> FittedPredictor | None:
    if data is None:
        return None
    if "surface" not in data:
        return predictor_from_dict(data)
    # Files before November 2026 hold `cosched` in another form: it is fitted to the points again.
    prefill, decode = (
        tuple(map(int, data[phase]["sizes"][: data[phase]["num_graphs"]]))
        for phase in ("prefill", "decode")
    )
    return fit_predictor(
        "cosched",
        [point.batch for point in points],
        [point.seconds for point in points],
        graphs=GraphSizes(prefill=prefill, decode=decode),
    )


class _Point(msgspec.Struct, forbid_unknown_fields=True):
    prefills: list[tuple[Annotated[int, msgspec.Meta(ge=1)], Annotated[int, msgspec.Meta(ge=0)]]]
    decodes: list[Annotated[int, msgspec.Meta(ge=1)]]
    seconds: Annotated[float, msgspec.Meta(gt=0)]


def _point(entry: Any, *, where: str) -> MeasuredPoint:
    try:
        point = msgspec.convert(entry, _Point)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}, in {str(entry)[:200]}") from None
    if not math.isfinite(point.seconds):
        raise ConfigError(f"{where}: seconds is {point.seconds}; it must be finite")
    if not point.prefills and not point.decodes:
        raise ConfigError(f"{where}: neither prefills nor decodes")
    batch = BatchShape(prefills=[Prefill(*pair) for pair in point.prefills], decodes=point.decodes)
    return MeasuredPoint(batch=batch, seconds=point.seconds)
