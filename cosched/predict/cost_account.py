"""What requests cost: their shares of the seconds in which the device is busy.

The seconds of an iteration are divided by what each of its requests adds to its predicted time: the
slope of the prediction in each of `BatchTotals`, times what the request adds to that total. Where
the prediction is linear in the totals, that is its marginal cost. The rest (reading the
weights, an error of the prediction) is divided in the same proportions, so the shares add up to the
measured seconds. Before the predictor has learned, its careful first guess divides: mostly by
tokens. An idle device costs nothing.

Limits   A cached prefix costs the request that computed it, and nothing the requests that reuse it;
         what reading it takes is shared among those that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from cosched.core.batch import QUERY_TILE, BatchShape, BatchTotals
from cosched.core.request import RequestClass, Traits
from cosched.predict.fitted import FloatArray

_PREFILL = ("num_prefills", "num_new", "num_cached", "double_pairs", "double_tail_pairs")
_DECODE = ("num_decodes", "decode_context")

MOST_NAMES = 1000
"""Beyond, those that have had no new request for longest are counted with their key: clients choose
the names of tenants."""

MOST_DEBTS = 1000
"""Pairs of keys; the oldest debt is forgotten first."""

MOST_KEYS = 16
"""Keys that pay for a prefix: what further ones would owe is little, and they owe nothing."""


def key_of(name: str) -> str:
    """The name of the API key in ``KEY/TENANT``."""
    return name.partition("/")[0]


class Payer:
    """A tenant's requests of one class, ``KEY/TENANT`` or ``KEY``, and what they cost [s].
    heir: what is charged to it from now on is charged to this one; None: to itself."""

    __slots__ = ("device_s", "heir", "key", "name", "request_class")

    def __init__(self, name: str, request_class: RequestClass) -> None:
        self.name = name
        self.key = key_of(name)
        self.request_class = request_class
        self.device_s = 0.0
        self.heir: Payer | None = None

    def pay(self, seconds: float) -> None:
        payer = self if self.heir is None else self.heir
        payer.device_s += seconds


class Charged(Protocol):
    """A request that runs. device_s: what it has cost [s]; is_ended: it runs once more only because
    that iteration was launched before its last token was known."""

    device_s: float
    payer: Payer
    is_ended: bool
    traits: Traits


class PrefixNode(Protocol):
    """A part of a cached prefix. start, end: tokens from the root; keys: those that have paid for
    it. A key that has paid for a node has paid for all above it."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    keys: frozenset[str]


class Account:
    """The costs of all requests of one scheduler."""

    def __init__(self, predict_s: Callable[[BatchTotals], float]) -> None:
        self._predict_s = predict_s
        self.payers: dict[tuple[str, RequestClass], Payer] = {}
        self._debts: dict[tuple[str, str], float] = {}
        """(Debtor, creditor) -> what is owed [s]; never in both directions."""

    def payer(self, name: str, request_class: RequestClass) -> Payer:
        """The one of a tenant and a class."""
        found = self.payers.pop((name, request_class), None)
        if found is None:
            found = Payer(name, request_class)
            if len(self.payers) >= MOST_NAMES and "/" in name:
                self._bequeath()
        self.payers[name, request_class] = found  # the last one had the newest request
        return found

    def _bequeath(self) -> None:
        """The key inherits from the tenant that has had no new request for longest."""
        oldest = next((payer for payer in self.payers.values() if "/" in payer.name), None)
        if oldest is not None:
            del self.payers[oldest.name, oldest.request_class]
            oldest.heir = self.payer(oldest.key, oldest.request_class)
            oldest.heir.device_s += oldest.device_s

    def charge(self, requests: Sequence[Charged], shape: BatchShape, seconds: float) -> None:
        """An iteration took `seconds` of the device. requests: in the order of the shape, prefills
        first; where that is unknown, they pay alike."""
        if not requests:
            return
        if len(requests) == 1:
            requests[0].device_s += seconds
            requests[0].payer.pay(seconds)
            return
        has_shape = shape.prefills or shape.decodes
        weights = _weights(shape, self._predict_s) if has_shape else np.ones(len(requests))
        if len(weights) != len(requests):  # beams: their further rows come last
            weights = weights[: len(requests)] * [r.traits.num_rows for r in requests]
        if any([request.is_ended for request in requests]):
            running = weights * [not request.is_ended for request in requests]
            weights = running if running.any() else weights
        shares = weights * (seconds / weights.sum())
        if self._debts:
            self._settle([request.payer.key for request in requests], shares)
        for request, share_s in zip(requests, shares.tolist(), strict=True):
            request.device_s += share_s
            request.payer.pay(share_s)

    # --- Cached prefixes ---

    def computed(self, key: str, path: Iterable[PrefixNode]) -> None:
        """Requests of a key have computed what is new of a path, given from its end upwards."""
        for node in path:
            if key in node.keys:
                return
            if len(node.keys) < MOST_KEYS:
                node.keys |= {key}

    def reused(self, key: str, path: Iterable[PrefixNode]) -> None:
        """A request of a key is admitted with this path in the cache, given from its end
        upwards."""
        for node in path:
            if key in node.keys:
                return
            if 0 < len(node.keys) < MOST_KEYS:
                part_s = self._cost_s(node) / (len(node.keys) + 1) / len(node.keys)
                for creditor in node.keys:
                    self._owe(key, creditor, part_s)
                node.keys |= {key}

    def _cost_s(self, node: PrefixNode) -> float:
        """What computing it adds to an iteration with prefills."""
        whole, least = BatchTotals(), BatchTotals()
        whole.add_prefill(node.end - node.start, node.start)
        least.add_prefill(1, 0)
        return max(self._predict_s(whole) - self._predict_s(least), 0.0)

    def _owe(self, debtor: str, creditor: str, seconds: float) -> None:
        seconds += self._debts.pop((debtor, creditor), 0.0)
        seconds -= self._debts.pop((creditor, debtor), 0.0)
        if seconds < 0:
            debtor, creditor, seconds = creditor, debtor, -seconds
        if seconds:
            self._debts[debtor, creditor] = seconds
        if len(self._debts) > MOST_DEBTS:
            del self._debts[next(iter(self._debts))]

    def _settle(self, keys: Sequence[str], shares: FloatArray) -> None:
        """Move shares of creditors to debtors. keys: of the requests of an iteration."""
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        if len(numbers) == 1:
            return
        key_of_share = np.array([numbers[key] for key in keys])
        before: list[float] = np.bincount(key_of_share, shares).tolist()
        after = before.copy()
        for pair in [p for p in self._debts if p[0] in numbers and p[1] in numbers]:
            debtor, creditor = numbers[pair[0]], numbers[pair[1]]
            moved_s = min(self._debts[pair], after[creditor])
            after[creditor] -= moved_s
            after[debtor] += moved_s
            self._debts[pair] -= moved_s
            if not self._debts[pair]:
                del self._debts[pair]
        for key, before_s in enumerate(before):
            if after[key] != before_s:
                its = key_of_share == key
                shares[its] = after[key] * (shares[its] / before_s if before_s else 1 / its.sum())

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
        if totals.num_encoded:
            encoded = np.array(shape.encoded, dtype=float)
            of_prefills += slope("num_encoded") * encoded + slope("num_encodings") * (encoded > 0)
        weights = np.concatenate([of_prefills, weights])
        tokens = np.concatenate([new, tokens])
    return weights if weights.any() else tokens
