"""What requests cost: their shares of the seconds in which the device is busy.

The seconds of an iteration are divided by what each of its requests adds to its predicted time: the
slope of the prediction in each of `BatchTotals`, times what the request adds to that total. Where
the prediction is linear in the totals, that is its marginal cost. What is left (reading the
weights, an error of the prediction) is divided in the same proportions, so the shares add up to the
measured seconds. Before the predictor has learned, its careful first guess divides: mostly by
tokens. An idle device costs nothing.

Limits   A cached prefix costs the request that computed it, and nothing the requests that reuse it;
         what reading it takes is shared among those that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cosched.core.batch import QUERY_TILE, BatchShape, BatchTotals
from cosched.core.request import RequestClass, Traits
from cosched.predict.fitted import FloatArray

_PREFILL = ("num_prefills", "num_new", "num_cached", "double_pairs", "double_tail_pairs")
_DECODE = ("num_decodes", "decode_context")

MOST_NAMES = 1000
"""Tenants beyond are counted with their key: clients choose the names of tenants."""


def key_of(name: str) -> str:
    """The name of the API key in ``KEY/TENANT``."""
    return name.partition("/")[0]


class Payer:
    """A tenant's requests of one class, ``KEY/TENANT`` or ``KEY``, and what they cost [s]."""

    __slots__ = ("device_s", "name", "request_class")

    def __init__(self, name: str, request_class: RequestClass) -> None:
        self.name = name
        self.request_class = request_class
        self.device_s = 0.0


class Charged(Protocol):
    """A request that runs. device_s: what it has cost [s]; is_ended: it runs once more only because
    that iteration was launched before its last token was known."""

    device_s: float
    payer: Payer
    is_ended: bool
    traits: Traits


class Account:
    """The costs of all requests of one scheduler."""

    def __init__(self, predict_s: Callable[[BatchTotals], float]) -> None:
        self._predict_s = predict_s
        self.payers: dict[tuple[str, RequestClass], Payer] = {}

    def payer(self, name: str, request_class: RequestClass) -> Payer:
        """The one of a tenant and a class."""
        if (name, request_class) not in self.payers:
            if len(self.payers) >= MOST_NAMES and "/" in name:
                return self.payer(key_of(name), request_class)
            self.payers[name, request_class] = Payer(name, request_class)
        return self.payers[name, request_class]

    def charge(self, requests: Sequence[Charged], shape: BatchShape, seconds: float) -> None:
        """An iteration took `seconds` of the device. requests: in the order of the shape, prefills
        first; where that is unknown, they pay alike."""
        if not requests:
            return
        has_shape = shape.prefills or shape.decodes
        weights = _weights(shape, self._predict_s) if has_shape else np.ones(len(requests))
        if len(weights) != len(requests):  # beams: their further rows come last
            weights = weights[: len(requests)] * [r.traits.num_rows for r in requests]
        if any([request.is_ended for request in requests]):
            running = weights * [not request.is_ended for request in requests]
            weights = running if running.any() else weights
        shares = (weights * (seconds / weights.sum())).tolist()
        for request, share_s in zip(requests, shares, strict=True):
            request.device_s += share_s
            request.payer.device_s += share_s

    def by_class(self) -> dict[str, dict[str, float]]:
        """Class -> tenant -> what its requests cost [s]."""
        found: dict[str, dict[str, float]] = {one.value: {} for one in RequestClass}
        for payer in self.payers.values():
            found[payer.request_class.value][payer.name] = round(payer.device_s, 6)
        return found


def _weights(shape: BatchShape, predict_s: Callable[[BatchTotals], float]) -> FloatArray:
    """[prefills, then decodes] What each adds to the predicted time; by tokens where that is
    nothing."""
    totals = BatchTotals.of(shape)
    predicted_s = predict_s(totals)

    def slope(name: str) -> float:
        """Between half of the total and all of it: CUDA graphs make steps."""
        trial = totals.copy()
        amount: int = getattr(totals, name)
        if not amount:
            return 0.0
        setattr(trial, name, amount // 2)
        return max(predicted_s - predict_s(trial), 0.0) / (amount - amount // 2)

    per_decode, per_key = map(slope, _DECODE)
    weights = per_decode + per_key * np.array(shape.decodes, dtype=float)
    tokens = np.ones(len(shape.decodes))
    if shape.prefills:
        new, cached = np.array(shape.prefills, dtype=float).T
        tail = np.maximum(new - QUERY_TILE, 0.0)
        adds = (
            np.ones(len(new)),
            new,
            cached,
            new * (2 * cached + new),
            tail * (2 * (cached + QUERY_TILE) + tail),
        )
        slopes = map(slope, _PREFILL)
        of_prefills = sum(s * add for s, add in zip(slopes, adds, strict=True))
        weights = np.concatenate([of_prefills, weights])
        tokens = np.concatenate([new, tokens])
    return weights if weights.any() else tokens
