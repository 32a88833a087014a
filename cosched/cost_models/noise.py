"""A cost model with the scatter of a real machine."""

from __future__ import annotations

import numpy as np

from cosched.core.batch import BatchShape
from cosched.cost_models.base import CostModel
from cosched.errors import ConfigError
from cosched.latency.graphs import GraphSizes

__all__ = ["NoisyModel"]

_BLOCK = 4096


class NoisyModel:
    """`base` times lognormal noise of mean 1, exp(sigma * z - sigma**2 / 2), z standard normal; a
    share `outlier_ratio` of the iterations is also `outlier_factor` times as long.

    Each call draws: the i-th call after construction sees the i-th draw, whatever its batch, so
    equal seeds and equal calls give equal times. With outliers the mean is above the base's.
    """

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
        self.base = base
        self.seed = seed
        self.sigma = sigma
        self.outlier_ratio = outlier_ratio
        self.outlier_factor = outlier_factor
        # Two generators: the scatter of the others stays the same when outliers are turned on.
        self._scatter, self._outliers = (
            np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(2)
        )
        self._factors: list[float] = []

    @property
    def graph_sizes(self) -> GraphSizes | None:
        return self.base.graph_sizes

    @property
    def name(self) -> str:
        return f"{self.base.name}+noise"

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
