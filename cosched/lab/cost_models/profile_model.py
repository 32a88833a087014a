"""Cost model fitted to iterations measured on an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from cosched.core.batch import BatchShape
from cosched.errors import ConfigError
from cosched.predict.fitted import ErrorSummary, relative_fit, summarise
from cosched.predict.profile_file import MeasuredPoint, Profile

KNOTS = (32, 64, 128, 256, 512, 1024)
"""Numbers of tokens at which the cost of a token may rise: small iterations are bound by reading
the weights, large ones by computation."""

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
class ProfileModel:
    """Iteration time as a sum of non-negative costs: of the iteration, of each token (rising at
    `KNOTS`), of each (query, key) pair of prefill attention, n * (c + n / 2) for n new tokens over
    c cached, of each prefill and decode, and of each token of their contexts. So more work is never
    predicted to be cheaper. The fit minimises the relative error.

    coefficients  seconds per unit of each of `FEATURES`, fitted to all points
    held_out      error of a fit to 80 % of the points on the rest
    source        engine and measurement, as the file describes them
    """

    coefficients: tuple[float, ...]
    points: tuple[MeasuredPoint, ...]
    held_out: ErrorSummary
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
        """ConfigError for too few points. Deterministic."""
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
        predicted = matrix[held] @ relative_fit(matrix[kept].T, seconds[kept])
        return cls(
            coefficients=relative_fit(matrix.T, seconds),
            points=points,
            held_out=summarise(predicted.tolist(), seconds[held].tolist()),
            source=dict(source or {}),
        )

    @classmethod
    def load(cls, path: Path) -> ProfileModel:
        """Fit the points of a profile file. ConfigError names the file."""
        profile = Profile.load(path)
        engine = {} if profile.engine is None else {"engine": asdict(profile.engine)}
        try:
            return cls.fit(profile.points, source={**engine, **profile.about})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

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
