"""The state of a replica: ``GET /cosched``, ``/get_server_info`` and Prometheus."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cosched.core.plan import EMPTY_PLAN, Plan
from cosched.core.request import RequestClass
from cosched.core.view import OfflineLimits
from cosched.engine import port
from cosched.engine.chat_load import ChatState
from cosched.engine.features.isolated_watch import IsolatedState
from cosched.engine.features.shared_reads import SharingState
from cosched.engine.iteration import Iteration
from cosched.engine.tracked import TrackedRequest
from cosched.memory.occupancy import KvOccupancy
from cosched.pool.prefix_pool import PoolStats

PLANNING_WINDOW = 1000
"""Latest plans whose percentiles ``/get_server_info`` shows."""


@dataclass(slots=True)
class Counters:
    """Totals since the start.

    num_safe_plans  plans made by the safe rule, because the policy failed (`cosched.engine.guard`)
    planning_s      host time spent in views and policies [s]
    budget_s        most time that plans gave their iterations, of those that were limited [s]
    budget_used_s   measured time of the same [s]
    planning_times_s  of the latest plans
    """

    num_plans: int = 0
    num_replans: int = 0
    num_safe_plans: int = 0
    planning_s: float = 0.0
    num_preemptions: int = 0
    num_engine_refusals: int = 0
    online_prefill_tokens: int = 0
    offline_prefill_tokens: int = 0
    recomputed_tokens: int = 0
    encoded_tokens: int = 0
    budget_s: float = 0.0
    budget_used_s: float = 0.0
    planning_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=PLANNING_WINDOW))
    latest_plan: Plan = EMPTY_PLAN

    def count_plan(self, iteration: Iteration) -> None:
        planning_s = iteration.planning_s or 0.0
        self.num_plans += 1
        self.planning_s += planning_s
        self.planning_times_s.append(planning_s)
        self.latest_plan = iteration.plan

    def count_result(self, iteration: Iteration) -> None:
        self.encoded_tokens += sum(iteration.shape.encoded)
        if limits := iteration.plan.limits:
            self.budget_s += max(limits.values())
            self.budget_used_s += iteration.seconds

    def count_prefills(self, batch: Any) -> None:
        """A batch with prompt tokens was built."""
        for req, num_tokens in port.prefills_of(batch):
            tracked = TrackedRequest.of(req)
            if tracked is not None and tracked.request_class is RequestClass.OFFLINE:
                self.offline_prefill_tokens += num_tokens
            else:
                self.online_prefill_tokens += num_tokens


class PlanningTimes(msgspec.Struct, kw_only=True, frozen=True):
    """Host time of views, plans and checks [µs]; the percentiles are of the latest plans."""

    mean: float
    p50: float
    p99: float


class OfflineProgress(msgspec.Struct, kw_only=True, frozen=True):
    """Progress of offline requests, for forecasts of batches.

    begun            of each offline request that has begun: prompt tokens, output tokens so far,
                     most output tokens
    tail_decode_s    predicted time of an iteration of decodes when no more requests begin and the
                     last ones run beside online requests; 0: nothing is predicted [s]
    prefill_token_s  predicted time of one more prompt token in it [s]
    """

    begun: tuple[tuple[int, int, int], ...]
    tail_decode_s: float = 0.0
    prefill_token_s: float = 0.0


class TierState(msgspec.Struct, kw_only=True, frozen=True):
    """Online requests of one tier. attainment, times_s, histograms: as in `ReplicaState`."""

    num_waiting: int
    num_running: int
    attainment: dict[str, tuple[int, int]]
    times_s: dict[str, tuple[float, int]]
    histograms: dict[str, dict[int, int]]


class ReplicaState(msgspec.Struct, kw_only=True, frozen=True):
    """The state of one scheduler. docs/metrics.md describes each field.

    num_safe_plans   plans made by the safe rule, because the policy failed
    policy_given_up  it failed too often in a row: the safe rule plans until a restart
    failures         part that failed and was left out (`cosched.engine.guard`) -> number
    recomputed_tokens  prompt and output tokens computed again after a preemption
    encoded_tokens   tokens of images, video and sound that the model's encoder has computed
    num_aborted_online, num_aborted_offline  requests that ended without their whole reply
    num_cancelled_online, num_cancelled_offline  aborted requests that their client cancelled
    device_s         class -> tenant -> its share of `busy_s` (`cosched.predict.cost_account`) [s]
    budget_s         most time that plans gave their iterations, of those that were limited [s]
    budget_used_s    measured time of the same [s]
    attainment       target -> (requests that met it, requests that missed it)
    late             why online requests were judged late -> (number, of these met their target)
    alone            online requests against their isolated baseline; None: it is not known here
    num_waits        iterations that were planned at the last moment
    num_dry          of these, those for which the device had to wait
    lead_s           time before the predicted end of an iteration at which requests are received;
                     0: when it begins, or has ended [s]
    tokens_per_decode  tokens that an online request gets in an iteration without prefills, a moving
                     average; above 1 with speculative decoding
    times_s          ``online_ttft`` and the like -> (sum [s], number of them) since the start
    histograms       ``ttft`` and ``tpot`` of online requests -> bucket
                     (`cosched.engine.latency_histogram.bucket_of`) -> number of them
    offline_work_s   predicted device time of finished offline requests in the best batch alone [s]
    skipped          why waiting requests were left out of the latest plan -> number
    pool             None: offline requests wait in the order of arrival
    kv               None: the engine's own order of eviction holds
    shared_prefix    None: attention reads a shared prefix as often as requests share it
    chat             None: too little is known of online requests or of iteration times
    tiers            of online requests by name, the highest first; empty without tiers
    logs_off         logs that were switched off because a line could not be written
    """

    policy: str
    num_waiting_online: int
    num_waiting_offline: int
    num_waiting_tokens: int
    num_running_online: int
    num_running_offline: int
    num_preemptions: int
    num_engine_refusals: int
    num_turned_away: int
    num_aborted_online: int
    num_aborted_offline: int
    num_cancelled_online: int
    num_cancelled_offline: int
    num_iterations: int
    busy_s: float
    device_s: dict[str, dict[str, float]]
    budget_s: float
    budget_used_s: float
    num_waits: int
    num_dry: int
    lead_s: float
    tokens_per_decode: float
    num_plans: int
    num_replans: int
    num_safe_plans: int
    policy_given_up: bool
    failures: dict[str, int]
    planning_us: PlanningTimes
    online_prefill_tokens: int
    offline_prefill_tokens: int
    recomputed_tokens: int
    encoded_tokens: int
    online_output_tokens: int
    offline_output_tokens: int
    offline_work_s: float
    attainment: dict[str, tuple[int, int]]
    late: dict[str, tuple[int, int]]
    times_s: dict[str, tuple[float, int]]
    histograms: dict[str, dict[int, int]]
    skipped: dict[str, int]
    offline_limits: OfflineLimits
    pool: PoolStats | None
    kv: KvOccupancy | None
    logs_off: tuple[str, ...]
    shared_prefix: SharingState | None = None
    alone: IsolatedState | None = None
    chat: ChatState | None = None
    tiers: dict[str, TierState] = {}

    def to_dict(self) -> dict[str, Any]:
        """For JSON and SGLang's messages."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result


def in_json(state: Any, lost: list[str], path: str = "") -> Any:
    """The state with None for each number that is not finite, which JSON does not have and SGLang
    answers with 400. `lost` gets where these were, as ``.chat.saturation``."""
    if isinstance(state, dict):
        return {key: in_json(value, lost, f"{path}.{key}") for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [in_json(value, lost, f"{path}.{at}") for at, value in enumerate(state)]
    if isinstance(state, float) and not math.isfinite(state):
        lost.append(path)
        return None
    return state
