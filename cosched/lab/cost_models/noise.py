"""Cost models that scatter and slow down, as real machines do."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from cosched.core.batch import BatchShape
from cosched.errors import ConfigError
from cosched.lab.cost_models.base import CostModel
from cosched.predict.fitted import GraphSizes

_BLOCK = 4096


class _Disturbed:
    """What is as in `base` but for the time of an iteration."""

    suffix: ClassVar[str]

    def __init__(self, base: CostModel) -> None:
        self.base = base

    @property
    def graph_sizes(self) -> GraphSizes | None:
        return self.base.graph_sizes

    @property
    def name(self) -> str:
        return f"{self.base.name}+{self.suffix}"


class NoisyModel(_Disturbed):
    """`base` times lognormal noise of mean 1, exp(sigma * z - sigma**2 / 2), z standard normal; a
    share `outlier_ratio` of the iterations is also `outlier_factor` times as long.

    Each call draws: the i-th call after construction sees the i-th draw, whatever its batch, so
    equal seeds and equal calls give equal times. With outliers the mean is above the base's.
    """

    suffix = "noise"

    def __init__(
        self,
        base: CostModel,
        *,
        seed: int,
        sigma: float,
        outlier_ratio: float = 0.0,
        outlier_factor: float = 3.0,
    ) -> None:
        if not 0 <= sigma <= 1:
            raise ConfigError(f"sigma is {sigma}; it must be in [0, 1]")
        if not 0 <= outlier_ratio <= 1:
            raise ConfigError(f"outlier_ratio is {outlier_ratio}; it must be in [0, 1]")
        if outlier_factor < 1:
            raise ConfigError(f"outlier_factor is {outlier_factor}; it must be at least 1")
        super().__init__(base)
        self.seed = seed
        self.sigma = sigma
        self.outlier_ratio = outlier_ratio
        self.outlier_factor = outlier_factor
        # Two generators: the scatter of the others stays the same when outliers are turned on.
        self._scatter, self._outliers = (
            np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(2)
        )
        self._factors: list[float] = []

    def iteration_s(self, batch: BatchShape) -> float:
        """Draws a number: not the same for the same batch."""
        if not self._factors:
            self._draw()
        return self.base.iteration_s(batch) * self._factors.pop()

    def _draw(self) -> None:
        factors = np.exp(self.sigma * self._scatter.standard_normal(_BLOCK) - self.sigma**2 / 2)
        outliers = self._outliers.random(_BLOCK) < self.outlier_ratio
        factors[outliers] *= self.outlier_factor
        self._factors = factors[::-1].tolist()

    def describe(self) -> dict[str, object]:
        return {
            **self.base.describe(),
            "noise": {
                "seed": self.seed,
                "sigma": self.sigma,
                "outlier_ratio": self.outlier_ratio,
                "outlier_factor": self.outlier_factor,
            },
        }


class SlowingModel(_Disturbed):
    """`base`, and `factor` times as long from the moment on at which the GPU has worked for
    `after_s` seconds: what heat or a power limit does under load. For good, and at once."""

    suffix = "slower"

    def __init__(self, base: CostModel, *, factor: float, after_s: float) -> None:
        if not 0.1 <= factor <= 10:
            raise ConfigError(f"slower is {factor}; it must be in [0.1, 10]")
        if after_s < 0:
            raise ConfigError(f"slower_after_s is {after_s}; it must not be negative")
        super().__init__(base)
        self.factor = factor
        self.after_s = after_s
        self._worked_s = 0.0

    def iteration_s(self, batch: BatchShape) -> float:
        """Depends on what came before: not the same for the same batch."""
        seconds = self.base.iteration_s(batch)
        if self._worked_s >= self.after_s:
            seconds *= self.factor
        self._worked_s += seconds
        return seconds

    def describe(self) -> dict[str, object]:
        slower = {"factor": self.factor, "after_s": self.after_s}
        return {**self.base.describe(), "slower": slower}
