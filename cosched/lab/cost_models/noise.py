"""Cost models that scatter and slow down, as real machines do."""

from __future__ import annotations

import numpy as np

from cosched.core.batch import BatchShape
from cosched.errors import ConfigError
from cosched.lab.cost_models.cost_model import CostModel
from cosched.predict.fitted import GraphSizes

_BLOCK = 4096


class _Disturbed:
    """`base` with other times."""

    suffix = ""

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

    The i-th call after construction gets the i-th draw, whatever its batch: equal seeds and equal
    calls give equal times.
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
        for name, value in (("sigma", sigma), ("outlier_ratio", outlier_ratio)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}; it must be in [0, 1]")
        if outlier_factor < 1:
            raise ConfigError(f"outlier_factor is {outlier_factor}; it must be at least 1")
        super().__init__(base)
        self.seed = seed
        self.sigma = sigma
        self.outlier_ratio = outlier_ratio
        self.outlier_factor = outlier_factor
        # Two generators: outliers do not change the scatter of the other iterations.
        self._scatter, self._outliers = (
            np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(2)
        )
        self._factors: list[float] = []

    def iteration_s(self, batch: BatchShape) -> float:
        """Draws a number: not the same for the same batch."""
        if not self._factors:
            drawn = self._scatter.standard_normal(_BLOCK)
            factors = np.exp(self.sigma * drawn - self.sigma**2 / 2)
            factors[self._outliers.random(_BLOCK) < self.outlier_ratio] *= self.outlier_factor
            self._factors = factors[::-1].tolist()
        return self.base.iteration_s(batch) * self._factors.pop()

    def describe(self) -> dict[str, object]:
        names = ("seed", "sigma", "outlier_ratio", "outlier_factor")
        return {**self.base.describe(), "noise": {name: getattr(self, name) for name in names}}


class SlowingModel(_Disturbed):
    """`base` until the GPU has worked for `after_s` seconds, then `factor` times as long, as with
    heat or a power limit."""

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
        """Depends on earlier calls: not the same for the same batch."""
        seconds = self.base.iteration_s(batch)
        if self._worked_s >= self.after_s:
            seconds *= self.factor
        self._worked_s += seconds
        return seconds

    def describe(self) -> dict[str, object]:
        slower = {"factor": self.factor, "after_s": self.after_s}
        return {**self.base.describe(), "slower": slower}
