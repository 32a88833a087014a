"""The format of a decision log: what its lines hold (docs/decision_log.md).

Requests are named by their `arrival_seq`. A part describes each request in the first record that
names it, so every part of a rotated log can be read alone.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

import msgspec

from cosched.core.caps import EngineCaps
from cosched.core.estimates import Predictor
from cosched.core.plan import PreemptMode, SkipReason
from cosched.core.request import RequestClass, Slo, Traits
from cosched.core.view import BatchRules, Ended, KvState, OfflineLimits
from cosched.latency.calibration import CalibratorState
from cosched.policy.base import Budgets, PolicySettings

__all__ = [
    "FORMAT",
    "CalibratorRecord",
    "Decision",
    "Header",
    "Outcome",
    "PlanState",
    "RequestFacts",
    "RequestRow",
    "Result",
    "Shapes",
    "ViewState",
]

FORMAT = 2
"""Raised when a reader of the last format could not read the new one."""

RequestRow: TypeAlias = tuple[int, ...]
"""A request as it stood: (seq, num_output_tokens, num_computed_tokens), and num_own_tokens where
there are any."""

Shapes: TypeAlias = tuple[dict[str, Any] | None, dict[str, Any] | None]
"""The shapes of a `cosched.latency.calibration.CalibratorState`, as `FittedPredictor.to_dict` gives
them."""


class Header(msgspec.Struct, kw_only=True, tag_field="kind", tag="header"):
    """First line of each part.

    part  number of the part, from 0
    caps, slo, latency_budget_s, budgets, offline_rate  what the policy was built with
    """

    policy: str
    caps: EngineCaps
    slo: Slo
    latency_budget_s: float | None
    budgets: Budgets
    offline_rate: float | None
    versions: dict[str, str]
    format: int = FORMAT
    part: int = 0

    @classmethod
    def of(cls, policy: str, settings: PolicySettings, *, versions: dict[str, str]) -> Header:
        return cls(
            policy=policy,
            caps=settings.caps,
            slo=settings.slo,
            latency_budget_s=settings.latency_budget_s,
            budgets=settings.budgets,
            offline_rate=settings.offline_rate,
            versions=versions,
        )

    def settings(self) -> PolicySettings:
        """What the policy was built with."""
        return PolicySettings(
            caps=self.caps,
            slo=self.slo,
            latency_budget_s=self.latency_budget_s,
            budgets=self.budgets,
            offline_rate=self.offline_rate,
        )


class RequestFacts(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What never changes of a request. slo: None where it has no targets of its own; traits: None
    where there is nothing special about it."""

    seq: int
    rid: str
    request_class: RequestClass
    arrival_s: float
    num_prompt_tokens: int
    max_new_tokens: int
    slo: Slo | None = None
    traits: Traits | None = None


class ViewState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the policy could read, and of that which is costly or long, what it did read.

    online, offline      waiting requests that it looked at, from the front
    *_is_all             it saw that there are no more
    offline_is_sharing   `cosched.core.view.OfflineOrder.knows_prefixes`
    asked                waiting requests that it asked for by name, and none of the above
    skips                (requests given out before, seq, num_tokens): the calls of `skip_sharing`
    candidates           (per_bucket, seqs of each bucket): the calls of
                         `cosched.core.view.OfflineOrder.candidates`; `offline` holds the requests
    takes                (calls of `candidates` before, seq): the calls of `take`
    matches              seq -> [cached, evictable, host] of the requests it asked about
    barred, restoring    those it asked about that the engine had refused a moment ago, and whose KV
                         was on its way from host memory
    prefixes             seq -> num_prefix_tokens of those that run and have no output yet; of
                         others it says nothing any more
    unholdable           the same of `View.can_hold`: those that could not sit out
    losses               tokens -> `View.eviction_loss_s`, where it asked; None: nobody knew
    reserves, gains      seq -> `View.reserve_of`, `View.preemption_gain`, where it asked
    lengths, promises    seq -> `View.length`, `View.promised`, where it asked and there is one
    preemptions          seq -> num_preemptions, where there were any
    last_token_s         when the last token of those that run came out, but for `last_tokens` [s]
    offline_limits       None: the operator sets none
    """

    now_s: float
    start_s: float
    kv: KvState
    free_slots: int
    num_offline: int
    mean_iteration_s: float = 0.0
    recompute_debt_s: float = 0.0
    rules: BatchRules | None = None
    running: list[RequestRow] = []
    unfinished: list[RequestRow] = []
    online: list[RequestRow] = []
    online_is_all: bool = False
    offline: list[RequestRow] = []
    offline_is_all: bool = False
    offline_is_sharing: bool = False
    asked: list[RequestRow] = []
    skips: list[tuple[int, int, int]] = []
    candidates: list[tuple[int, list[list[int]]]] = []
    takes: list[tuple[int, int]] = []
    prefixes: dict[int, int] = {}
    preemptions: dict[int, int] = {}
    last_token_s: float = 0.0
    last_tokens: dict[int, float] = {}
    ended: list[Ended] = []
    matches: dict[int, list[int]] = {}
    barred: list[int] = []
    restoring: list[int] = []
    unholdable: list[int] = []
    losses: dict[int, float] | None = None
    reserves: dict[int, int] = {}
    gains: dict[int, int] = {}
    lengths: dict[int, tuple[int, int]] = {}
    promises: dict[int, int] = {}
    offline_limits: OfflineLimits | None = None


class CalibratorRecord(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """`cosched.latency.calibration.CalibratorState` without its shapes; its fields have the same
    names."""

    scales: tuple[float, float]
    cold_scale: float
    drift: float
    margin: float
    seen: tuple[int, int, int, int] | None
    error: float = 1.0
    load_s_per_token: float = 0.0

    @classmethod
    def of(cls, state: CalibratorState) -> CalibratorRecord:
        return cls(**{name: getattr(state, name) for name in cls.__struct_fields__})

    def with_shapes(self, shapes: tuple[Predictor | None, Predictor | None]) -> CalibratorState:
        """What was recorded."""
        return CalibratorState(shapes=shapes, **msgspec.structs.asdict(self))


class PlanState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`cosched.core.plan.Plan` by seq. prefill: (seq, tokens), in its order."""

    prefill: list[tuple[int, int]] = []
    decodes: bool = True
    held: list[int] = []
    preempted: list[tuple[int, PreemptMode]] = []
    skipped: dict[SkipReason, list[int]] = {}
    limits: dict[str, float] = {}


class Outcome(Enum):
    """What became of a plan.

    RAN        the engine ran a batch
    NO_BATCH   it was applied, and there was nothing to run
    REPLANNED  it was dropped: results still on their way had to be known before it could stop
               anyone; the next record is the plan made after that
    """

    RAN = "ran"
    NO_BATCH = "no_batch"
    REPLANNED = "replanned"


class Result(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What came of it.

    refused      requests of the plan's prefill that the engine did not take
    num_decodes  requests that decoded a token
    predicted_s  of the batch that ran, as it was estimated when the plan was made [s]; None: the
                 policy predicts nothing
    start_s      when it began, as measured [s]
    measured_s   how long it took [s]
    finished     (seq, SGLang's reason, output tokens)
    planning_s   host time that view and policy took [s]
    """

    outcome: Outcome
    planning_s: float
    refused: list[int] = []
    num_decodes: int = 0
    predicted_s: float | None = None
    start_s: float | None = None
    measured_s: float | None = None
    finished: list[tuple[int, str, int]] = []


class Decision(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag="decision"):
    """One plan.

    number        of the plan, from 0
    carry         what the policy was given from the plan before
    requests      those that no earlier record of this part names
    first_tokens  seq -> when its first token came out [s]; where it has changed
    calibrator    what the predictor predicts from; None: as in the record before
    shapes        the same
    """

    number: int
    view: ViewState
    plan: PlanState
    result: Result
    carry: Any = None
    requests: list[RequestFacts] = []
    first_tokens: dict[int, float] = {}
    calibrator: CalibratorRecord | None = None
    shapes: Shapes | None = None
