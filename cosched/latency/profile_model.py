"""Cost model fitted to iterations measured on a live engine, and the file that holds them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cosched.core.batch import BatchShape, Prefill
from cosched.errors import ConfigError
from cosched.latency.interp import FloatArray
from cosched.latency.nnls import nnls

__all__ = [
    "FILE_FORMAT",
    "FILE_VERSION",
    "MeasuredPoint",
    "ProfileError",
    "ProfileModel",
    "read_iteration_log",
]

FILE_FORMAT = "cosched-profile"
FILE_VERSION = 1

KNOTS = (32, 64, 128, 256, 512, 1024)
"""Where the cost of one more token may rise [tokens]: up to a few hundred tokens an iteration reads
the weights whatever it computes, beyond them every token counts in full."""

FEATURES = (
    "iteration",
    "token",
    *(f"token_over_{knot}" for knot in KNOTS),
    "attention_pair",
    "prefill",
    "decode",
    "decode_context_token",
    "prefill_context_token",
)

MIN_POINTS = 2 * len(FEATURES)
_HELD_OUT_RATIO = 0.2
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """One iteration as the engine ran it and the time it took [s]."""

    batch: BatchShape
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileError:
    """Relative error on points the fit did not see (0-1); bias above 0: predicted too long."""

    num_points: int
    bias: float
    mean: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileModel:
    """Iteration time as a sum of non-negative costs: of the iteration, of each token (rising at
    `KNOTS`), of each (query, key) pair of prefill attention, n * (c + n / 2) for n new tokens over
    c cached, of each prefill and decode, and of each token of their contexts.

    Costs that cannot be negative make it safe between and beyond the points: more work is never
    predicted to be cheaper. The fit minimises the relative error.

    coefficients  seconds per unit of each of `FEATURES`
    held_out      error of a fit to 80 % of the points on the rest; `coefficients` come from all
    source        what the file says of the machine: machine, model, sglang_version, ...
    """

    coefficients: tuple[float, ...]
    points: tuple[MeasuredPoint, ...]
    held_out: ProfileError
    source: Mapping[str, object] = field(default_factory=dict)

    @property
    def graph_sizes(self) -> None:
        return None

    @property
    def name(self) -> str:
        return "profile"

    @classmethod
    def fit(
        cls, points: Iterable[MeasuredPoint], *, source: Mapping[str, object] | None = None
    ) -> ProfileModel:
        """ConfigError when there are too few points. Same points, same model."""
        points = tuple(points)
        if len(points) < MIN_POINTS:
            raise ConfigError(
                f"a latency profile has {len(points)} points; it needs at least {MIN_POINTS}"
            )
        matrix = np.array([features(point.batch) for point in points], dtype=np.float64)
        seconds = np.array([point.seconds for point in points], dtype=np.float64)
        order = np.random.default_rng(_SEED).permutation(len(points))
        num_held = max(1, round(len(points) * _HELD_OUT_RATIO))
        held, kept = order[:num_held], order[num_held:]
        relative = matrix[held] @ _fit(matrix[kept], seconds[kept]) / seconds[held] - 1
        return cls(
            coefficients=tuple(_fit(matrix, seconds).tolist()),
            points=points,
            held_out=ProfileError(
                num_points=num_held,
                bias=float(relative.mean()),
                mean=float(np.abs(relative).mean()),
                p99=float(np.quantile(np.abs(relative), 0.99)),
            ),
            source=dict(source or {}),
        )

    @classmethod
    def load(cls, path: Path) -> ProfileModel:
        """Fit the points of a file. ConfigError naming file and entry when it is no profile."""
        data = _read_json(path)
        if data.get("format") != FILE_FORMAT or data.get("version") != FILE_VERSION:
            raise ConfigError(
                f"{path}: format {data.get('format')!r}, version {data.get('version')!r}; "
                f"expected {FILE_FORMAT!r}, version {FILE_VERSION}"
            )
        entries = data.get("points")
        if not isinstance(entries, list):
            raise ConfigError(f"{path}: 'points' must be a list")
        points = [_point(entry, where=f"{path}: points[{i}]") for i, entry in enumerate(entries)]
        source = {k: v for k, v in data.items() if k not in ("format", "version", "points")}
        try:
            return cls.fit(points, source=source)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def save(self, path: Path) -> None:
        """Write the points, not the fit: the file stays true when the fit is improved."""
        data = {
            "format": FILE_FORMAT,
            "version": FILE_VERSION,
            **self.source,
            "points": [
                {
                    "prefills": [list(prefill) for prefill in point.batch.prefills],
                    "decodes": list(point.batch.decodes),
                    "seconds": point.seconds,
                }
                for point in self.points
            ],
        }
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")

    def iteration_s(self, batch: BatchShape) -> float:
        if not batch.prefills and not batch.decodes:
            return 0.0
        return sum(map(float.__mul__, self.coefficients, features(batch)))

    def describe(self) -> dict[str, object]:
        return {
            "cost_model": self.name,
            "source": dict(self.source),
            "num_points": len(self.points),
            "held_out_error": asdict(self.held_out),
            "coefficients_s": dict(zip(FEATURES, self.coefficients, strict=True)),
        }


def read_iteration_log(path: Path) -> list[MeasuredPoint]:
    """The iterations that a server wrote with --cosched-iteration-log; a last line that is half
    written is left out. ConfigError naming the file when it cannot be read, or the line that is
    none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the iteration log {path}: {error.strerror}") from error
    points = []
    for i, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if i == len(lines) - 1:
                break
            raise ConfigError(f"{path}, line {i + 1} is not JSON: {error}") from None
        if isinstance(entry, dict):
            entry.pop("start_s", None)
            if entry.get("seconds") == 0:
                continue  # Shorter than the log's resolution: nothing to learn.
        points.append(_point(entry, where=f"{path}, line {i + 1}"))
    return points


def features(batch: BatchShape) -> list[float]:
    """The amounts of `FEATURES` in a batch."""
    pairs = 0.0
    num_new = prefill_context = 0
    for new, cached in batch.prefills:
        num_new += new
        prefill_context += new + cached
        pairs += new * (cached + new / 2)
    num_decodes = len(batch.decodes)
    tokens = float(num_new + num_decodes)
    return [
        1.0,
        tokens,
        *(tokens - knot if tokens > knot else 0.0 for knot in KNOTS),
        pairs,
        float(len(batch.prefills)),
        float(num_decodes),
        float(sum(batch.decodes)),
        float(prefill_context),
    ]


def _fit(matrix: FloatArray, seconds: FloatArray) -> FloatArray:
    # Divided by the time, so that the residuals are relative errors.
    return nnls(matrix / seconds[:, None], np.ones(len(seconds)))


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


def _point(entry: Any, *, where: str) -> MeasuredPoint:
    if not isinstance(entry, dict) or set(entry) != {"prefills", "decodes", "seconds"}:
        raise ConfigError(f"{where}: expected an object with prefills, decodes and seconds")
    seconds = entry["seconds"]
    if not isinstance(seconds, int | float) or not (seconds > 0 and math.isfinite(seconds)):
        raise ConfigError(f"{where}: seconds is {seconds!r}; it must be above 0")
    prefills = [
        _counts(pair, least=(1, 0), where=where) for pair in _list(entry, "prefills", where)
    ]
    decodes = [
        _counts([context], least=(1,), where=where)[0] for context in _list(entry, "decodes", where)
    ]
    if not prefills and not decodes:
        raise ConfigError(f"{where}: neither prefills nor decodes")
    batch = BatchShape(prefills=[Prefill(*pair) for pair in prefills], decodes=decodes)
    return MeasuredPoint(batch=batch, seconds=float(seconds))


def _list(entry: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = entry[key]
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {key} must be a list")
    return value


def _counts(values: Any, *, least: Sequence[int], where: str) -> list[int]:
    """Whole numbers, as many as `least` has, none below its own least."""
    if (
        not isinstance(values, list)
        or len(values) != len(least)
        or any(type(value) is not int for value in values)
        or any(value < low for value, low in zip(values, least, strict=True))
    ):
        raise ConfigError(
            f"{where}: {values!r} must be {len(least)} whole numbers, at least {list(least)}"
        )
    return values
