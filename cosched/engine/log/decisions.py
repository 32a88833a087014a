"""The decision log: one line of JSON per plan, with what came of it (docs/operate.md).

Imports nothing of SGLang: a log can be read where SGLang is not installed.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

from cosched.core.kv_state import KvState
from cosched.core.plan import Plan
from cosched.core.request import RequestClass

FORMAT = 5
"""Raised when a reader of the last format could not read the new one."""


class Header(msgspec.Struct, kw_only=True, tag_field="kind", tag="header"):
    """First line of each part. part: its number in this log, from 0."""

    policy: str
    versions: dict[str, str]
    format: int = FORMAT
    part: int = 0


class RequestFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What does not change of a request; fields as in `cosched.core.request.Request`."""

    rid: str
    request_class: RequestClass = msgspec.field(name="class")
    arrival_s: float
    num_prompt_tokens: int
    max_new_tokens: int


PlanT = TypeVar("PlanT", Plan, msgspec.Raw)
"""A plan, or the bytes of one: the log writes those that other ranks get."""


class Decision(
    msgspec.Struct,
    Generic[PlanT],
    kw_only=True,
    omit_defaults=True,
    tag_field="kind",
    tag="decision",
):
    """One plan. Requests are named by rid; times are seconds on the engine's clock. Empty fields
    are left out.

    iteration         number of the plan, from 0
    outcome           ran; no_batch: the plan was applied and there was nothing to run; replanned:
                      it was dropped, because results still on their way had to be known before it
                      could preempt a running request. The next line is the plan that replaced it;
                      failed: the engine failed on it, and the iteration was taken back
    requests          facts of the requests that this part of the log names for the first time

    What the plan was made from:

    now_s             when it was made
    kv, free_slots, num_offline  as in `cosched.core.view.View`
    running           requests past their prefill
    unfinished        requests in the middle of their prefill
    aborted           requests that have left a queue without a result since the last plan

    The plan:

    plan              with the fields of `cosched.core.plan.Plan`

    What came of it:

    refused           requests in `plan.prefill` that the engine did not take
    cached            rid -> tokens of a request in `plan.prefill` whose KV was there already
    num_decodes       requests that decoded a token
    predicted_s       of the batch that ran; None: the policy predicts nothing
    start_s           when it began, as measured
    measured_s        how long it took
    planning_s        host time of view and policy
    finished          rid -> (SGLang's reason, output tokens)
    """

    iteration: int
    outcome: Literal["ran", "no_batch", "replanned", "failed"] = "no_batch"
    requests: list[RequestFacts] = []
    now_s: float
    kv: KvState
    free_slots: int
    num_offline: int
    running: list[str] = []
    unfinished: list[str] = []
    aborted: list[str] = []
    plan: PlanT
    refused: list[str] = []
    cached: dict[str, int] = {}
    num_decodes: int = 0
    predicted_s: float | None = None
    start_s: float | None = None
    measured_s: float | None = None
    planning_s: float
    finished: dict[str, tuple[str, int]] = {}
