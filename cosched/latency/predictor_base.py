"""What a predictor that was fitted is, and what reading and fitting one shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from cosched.core.estimates import Predictor
from cosched.errors import ConfigError
from cosched.latency.interp import FloatArray
from cosched.latency.nnls import nnls_normal

__all__ = ["FittedPredictor", "check_points", "number", "numbers", "relative_fit"]


class FittedPredictor(Predictor, Protocol):
    """A predictor whose coefficients do not change, so that a file can hold them."""

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values from which `predictor_from_dict` makes an equal predictor: its name
        and, of a data class, its fields."""
        return {"predictor": self.name, **msgspec.json.decode(msgspec.json.encode(self))}

    def describe(self) -> dict[str, object]:
        return self.to_dict()


def relative_fit(features: FloatArray, seconds: FloatArray) -> tuple[float, ...]:
    """Coefficients >= 0 that minimise the squares of the relative errors; features are rows."""
    matrix = features.T / seconds[:, None]
    return tuple(nnls_normal(matrix.T @ matrix, matrix.sum(axis=0)).tolist())


def check_points(kind: str, num: int, *, least: int, predictor: str) -> None:
    """ConfigError when there are too few batches of a kind to fit a predictor."""
    if num < least:
        raise ConfigError(
            f"the {predictor!r} predictor needs at least {least} {kind} batches to fit; "
            f"there are {num}"
        )


def number(data: Mapping[str, Any], key: str) -> float:
    """The number >= 0 at `key`; ConfigError naming it when it is none."""
    return _checked(data.get(key), key)


def numbers(data: Mapping[str, Any], key: str, length: int) -> tuple[float, ...]:
    """The `length` numbers >= 0 at `key`; ConfigError naming them when they are none."""
    values = data.get(key)
    if not isinstance(values, list | tuple) or len(values) != length:
        raise ConfigError(f"{key} is {values!r}; it must be a list of {length} numbers")
    return tuple(_checked(value, f"{key}[{i}]") for i, value in enumerate(values))


def _checked(value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{name} is {value!r}; it must be a number, at least 0")
    return float(value)
