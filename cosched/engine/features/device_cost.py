"""Charges requests for their iterations, and keys for the prefixes that they share."""

from __future__ import annotations

from typing import Any

from cosched.engine import port
from cosched.engine.feature import Feature, Features
from cosched.engine.features.kv_manager import KvManager
from cosched.engine.iteration import Iteration
from cosched.engine.tracked import TrackedRequest
from cosched.predict.cost_account import Account


class DeviceCost(Feature):
    """Its account is charged by the observer, before a result is processed: the last reply of a
    request says what it has cost."""

    place = "account"

    def __init__(self, account: Account, features: Features) -> None:
        self.account = account
        self._features = features

    @classmethod
    def of(cls, controller: Any) -> DeviceCost:
        account = Account(controller.predictor.estimate_s)
        if port.parallel().plans:  # elsewhere it has its payers only
            controller.observer.account = account
        return cls(account, controller.features)

    def on_arrival(self, request: TrackedRequest) -> None:
        request.payer = self.account.payer(request.tenant, request.request_class)

    def on_admitted(self, request: TrackedRequest) -> None:
        kv = self._features.get(KvManager)
        if kv is not None and kv.plans:
            self.account.reused(request.payer.key, kv.path_of(request))

    def on_result(self, iteration: Iteration, batch: Any) -> None:
        """A chunk of each prompt was computed; the last chunk of a prompt is in the tree now."""
        kv = self._features.get(KvManager)
        if kv is not None and kv.plans:
            for req in batch.reqs[: len(iteration.shape.prefills)]:
                self.account.computed(req.cosched.payer.key, kv.path_of(req.cosched))
