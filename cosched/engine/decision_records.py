"""The format of a decision log: what its lines hold (docs/decision_log.md).

Requests are named by their `arrival_seq`. A part describes each request in the first record that
names it, so every part of a rotated log can be read alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias, TypeVar

import msgspec

from cosched.core.estimates import LengthEstimate
from cosched.core.plan import PreemptMode, SkipReason
from cosched.core.request import PLAIN, LateReason, RequestClass, Slo, Traits
from cosched.core.view import BatchRules, Ended, KvState, Match, OfflineLimits, Room
from cosched.latency.calibration import CalibratorState
from cosched.policy.base import PolicySettings

__all__ = [
    "FORMAT",
    "QUESTIONS",
    "Decision",
    "Header",
    "OrderStep",
    "Outcome",
    "PlanState",
    "RecordedRequest",
    "RequestFacts",
    "RequestRow",
    "Result",
    "Shapes",
    "ViewState",
    "without_defaults",
]

_S = TypeVar("_S", bound=msgspec.Struct)

FORMAT = 3
"""Raised when a reader of the last format could not read the new one."""

RequestRow: TypeAlias = tuple[int, ...]
"""A request as it stood: (seq, num_output_tokens, num_computed_tokens), and num_own_tokens where
there are any."""

Shapes: TypeAlias = tuple[dict[str, Any] | None, dict[str, Any] | None]
"""The shapes of a `cosched.latency.calibration.CalibratorState`, as `FittedPredictor.to_dict` gives
them."""


class Header(msgspec.Struct, kw_only=True, tag_field="kind", tag="header"):
    """First line of each part. settings: what the policy was built with; part: its number, from
    0."""

    policy: str
    settings: PolicySettings
    versions: dict[str, str]
    format: int = FORMAT
    part: int = 0


class RequestFacts(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What seldom changes of a request; fields as in `cosched.core.request.Request`. It is written
    where a part names the request for the first time, and where one of them has changed."""

    arrival_seq: int = msgspec.field(name="seq")
    rid: str
    request_class: RequestClass
    arrival_s: float
    num_prompt_tokens: int
    max_new_tokens: int
    slo: Slo = Slo()
    traits: Traits = PLAIN
    first_token_s: float | None = None
    num_preemptions: int = 0
    num_prefix_tokens: int = 0
    late: LateReason | None = None


class RecordedRequest(RequestFacts, kw_only=True, frozen=True):
    """Implements `cosched.core.request.Request`: one as it stood."""

    num_output_tokens: int
    num_computed_tokens: int
    num_own_tokens: int
    last_token_s: float | None


OrderStep: TypeAlias = int | tuple[str, list[int], Any] | None
"""A question to `cosched.core.view.OfflineOrder` and its answer: the seq of the next request, None
where there is no more, else (method, arguments, answer), requests by seq."""


class ViewState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the policy asked its view, and what it was told.

    A field that has the name of a member of `cosched.core.view.View` holds its value or, of a
    method in `QUESTIONS`, its answers: by the seq of the request, or by the number, it was asked
    about.

    online, offline  waiting requests that it looked at, in the order in which it saw them first
    online_is_all    it saw that there are no more
    asked            waiting requests that it asked for by name, and none of the above
    order            its pass over the offline requests, step by step
    knows_prefixes   as the order said
    last_token_s     when the last token of those that run came out, but for `last_tokens` [s]
    """

    now_s: float
    start_s: float
    kv: KvState
    free_slots: int
    num_offline: int
    mean_iteration_s: float = 0.0
    recompute_debt_s: float = 0.0
    room: Room | None = None
    rules: BatchRules = BatchRules()
    offline_limits: OfflineLimits = OfflineLimits()
    ended: Sequence[Ended] = ()
    running: list[RequestRow] = []
    unfinished: list[RequestRow] = []
    online: list[RequestRow] = []
    online_is_all: bool = False
    offline: list[RequestRow] = []
    asked: list[RequestRow] = []
    order: list[OrderStep] = []
    knows_prefixes: bool = False
    last_token_s: float = 0.0
    last_tokens: dict[int, float] = {}
    match: dict[int, Match] = {}
    can_hold: dict[int, bool] = {}
    why_barred: dict[int, SkipReason] = {}
    length: dict[int, LengthEstimate] = {}
    promised: dict[int, int] = {}
    eviction_loss_s: dict[int, float] = {}
    reserve_of: dict[int, int] = {}
    preemption_gain: dict[int, int] = {}
    num_shared: dict[int, int] = {}

    @property
    def is_all_offline(self) -> bool:
        """The policy saw that no more wait, and passed over nobody."""
        skips = any(isinstance(step, tuple) and step[0] == "skip_sharing" for step in self.order)
        return None in self.order and not skips


QUESTIONS = {
    "match": ...,
    "can_hold": True,
    "why_barred": None,
    "length": ...,
    "promised": None,
    "eviction_loss_s": ...,
    "reserve_of": ...,
    "preemption_gain": ...,
    "num_shared": 0,
}
"""Methods of `cosched.core.view.View` with one argument: a request or a number. The usual answer is
not written; ...: there is none."""


def without_defaults(struct: type[_S], values: dict[str, Any]) -> _S:
    """msgspec omits a default only where it is the same object."""
    defaults = _DEFAULTS[struct]
    return struct(**{name: v for name, v in values.items() if v != defaults[name]})


_DEFAULTS: dict[Any, dict[str, Any]] = {
    struct: {field.name: field.default for field in msgspec.structs.fields(struct)}
    for struct in (RequestFacts, ViewState)
}


class PlanState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`cosched.core.plan.Plan` by seq. prefill, promised: (seq, tokens), in its order; hosted:
    (seq of the guest, seq of its host, offset)."""

    prefill: list[tuple[int, int]] = []
    decodes: bool = True
    held: list[int] = []
    preempted: list[tuple[int, PreemptMode]] = []
    promised: list[tuple[int, int]] = []
    hosted: list[tuple[int, int, int]] = []
    late: dict[LateReason, list[int]] = {}
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
    carry       what the policy was given from the plan before
    requests    those that no earlier record of this part names, or names as they were
    calibrator  what the predictor predicts from, but for its shapes; None: as in the record before
    shapes      of it; None: as in the record before
    """

    number: int
    view: ViewState
    plan: PlanState
    result: Result
    carry: Any = None
    requests: list[RequestFacts] = []
    calibrator: CalibratorState | None = None
    shapes: Shapes | None = None
