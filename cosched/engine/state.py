"""What a replica says of itself: ``GET /cosched``, ``/get_server_info`` and Prometheus."""

from __future__ import annotations

from typing import Any

import msgspec

from cosched.core.view import OfflineLimits
from cosched.engine.isolated import AloneState
from cosched.memory.occupancy import KvOccupancy
from cosched.pool.prefix_pool import PoolStats


class PlanningTimes(msgspec.Struct, kw_only=True, frozen=True):
    """Host time of views, plans and checks [µs]; the percentiles are of the latest plans."""

    mean: float
    p50: float
    p99: float


class OfflineProgress(msgspec.Struct, kw_only=True, frozen=True):
    """How far offline requests are, for forecasts of batches.

    begun            of each offline request that has begun: prompt tokens, output tokens so far,
                     and at most
    tail_decode_s    predicted time of an iteration of decodes while no more begin and the last of
                     them run beside the online requests; 0: nothing is predicted [s]
    prefill_token_s  predicted time of one more prompt token in it [s]
    """

    begun: tuple[tuple[int, int, int], ...]
    tail_decode_s: float = 0.0
    prefill_token_s: float = 0.0


class ReplicaState(msgspec.Struct, kw_only=True, frozen=True):
    """The state of one scheduler. docs/metrics.md describes each field.

    num_safe_plans   plans made by the safe rule, because the policy failed
    policy_given_up  it failed too often in a row, and the safe rule stays until a restart
    failures         what failed and was left out (`cosched.engine.guard`) -> how often
    recomputed_tokens  prompt and output tokens computed again because a stop had lost them
    num_aborted_online, num_aborted_offline  requests that ended without their whole reply
    num_cancelled_online, num_cancelled_offline  aborted requests that their client took back
    budget_s         most time that plans gave their iterations, of those that were limited [s]
    budget_used_s    measured time of the same [s]
    attainment       target -> (requests that met it, requests that missed it)
    late             why online requests were judged late -> (how many, of these met their target)
    alone            online requests against what they would have alone; None: nothing is promised
    num_waits        iterations that were planned at the last moment (`cosched.engine.last_moment`)
    num_dry          of these, those for which the device had to wait
    lead_s           so long before the device is done requests are looked for; 0: as soon as it is
                     at work, or once it is done [s]
    times_s          ``online_ttft`` and the like -> (sum [s], number of them) since the start
    offline_work_s   predicted device time of finished offline requests in the best batch alone [s]
    skipped          why waiting requests that the latest plan looked at were left out -> how many
    pool             None: offline requests wait in the order of arrival
    kv               None: the engine's own order of eviction holds
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
    budget_s: float
    budget_used_s: float
    num_waits: int
    num_dry: int
    lead_s: float
    num_plans: int
    num_replans: int
    num_safe_plans: int
    policy_given_up: bool
    failures: dict[str, int]
    planning_us: PlanningTimes
    online_prefill_tokens: int
    offline_prefill_tokens: int
    recomputed_tokens: int
    online_output_tokens: int
    offline_output_tokens: int
    offline_work_s: float
    attainment: dict[str, tuple[int, int]]
    late: dict[str, tuple[int, int]]
    times_s: dict[str, tuple[float, int]]
    skipped: dict[str, int]
    offline_limits: OfflineLimits
    pool: PoolStats | None
    kv: KvOccupancy | None
    logs_off: tuple[str, ...]
    alone: AloneState | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON and SGLang's messages."""
        result: dict[str, Any] = msgspec.to_builtins(self)
        return result
