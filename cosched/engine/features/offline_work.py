"""What the offline requests that have ended cost in the best batch."""

from __future__ import annotations

from typing import Any

from cosched.core.batch import BatchShape, BatchTotals
from cosched.core.request import RequestClass
from cosched.engine import port
from cosched.engine.feature import Feature
from cosched.engine.tracked import TrackedRequest
from cosched.predict.calibration import Calibrator
from cosched.predict.line_cost import prompt_cost_s, token_cost_s


class OfflineWork(Feature):
    """work_s: since the start [s]."""

    place = "offline_work"

    def __init__(self, controller: Any) -> None:
        self.work_s = 0.0
        self._predictor: Calibrator = controller.predictor
        self._num_kv_tokens = port.kv_total(controller.scheduler)
        self._max_running_requests = controller.caps.max_running_requests

    @classmethod
    def of(cls, controller: Any) -> OfflineWork | None:
        return cls(controller) if controller.is_timed else None

    def on_finished(self, request: Any) -> None:
        self.work_s += _work_s(
            request,
            self._predictor,
            num_kv_tokens=self._num_kv_tokens,
            max_running_requests=self._max_running_requests,
        )


def _work_s(
    tracked: TrackedRequest,
    predictor: Calibrator,
    *,
    num_kv_tokens: int,
    max_running_requests: int,
) -> float:
    """What an offline request that has ended costs in the best batch: its prompt without what was
    cached, and its share of decodes in a batch as large as memory allows [s]; 0 of others. Before
    iteration times are learned they are guessed, many times too long: then at most what the request
    has cost, since no batch is better than the best."""
    num_output = tracked.num_output_tokens
    if tracked.request_class is not RequestClass.OFFLINE or not num_output:
        return 0.0

    def iteration_s(shape: BatchShape) -> float:
        return predictor.estimate_s(BatchTotals.of(shape))

    num_cached = min(port.num_cached_at_first(tracked.req), tracked.num_prompt_tokens)
    prompt_s = prompt_cost_s(iteration_s, num_cached, tracked.num_prompt_tokens - num_cached)
    context = tracked.num_prompt_tokens + num_output // 2
    num_decodes = max(1, min(max_running_requests, num_kv_tokens // max(context, 1)))
    tokens_s = (num_output - 1) * token_cost_s(iteration_s, context, num_decodes=num_decodes)
    work_s = prompt_s + tokens_s
    return work_s if predictor.is_known else min(work_s, tracked.device_s)
