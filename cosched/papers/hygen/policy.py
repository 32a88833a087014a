"""HyGen: milliseconds instead of tokens (HyGen §4, Algorithm 1).

Idea         every iteration has a time budget. Online decodes are in it, online prefills take what
             they need, and offline work fills what the latency predictor says is left.
Assumptions  the predictor knows how long a batch takes before it runs; prefill and decode share an
             iteration; a running request can pause for an iteration with its KV kept.
Good         keeps the token gap whatever the batch is made of; needs no tuned chunk size; fills
             idle hours with large chunks.
Bad          only as good as the predictor; spends slack that a burst a moment later would need.
Parameters   TTFT and TPOT targets [s], per request or the server's; `Budgets` in `base`. With
             `latency_budget_s` the budget of an iteration is fixed, as the SLO-aware profiler finds
             it (HyGen §4.2); without, it follows from the deadlines.

The budget is that of `cosched.schedule.deadlines`.

Deviations from the paper
* Algorithm 1 subtracts a time per request; the predicted time of the whole batch is used instead,
  since times of requests in one batch do not add up.
* Offline requests are never preempted for time, only left out of an iteration (partial decode).
* The offline order is that of the pool.
* Of the offline requests to preempt: `cosched.papers.hygen.victims`.
* The paper's offline scheduler is a process of its own (Algorithm 2, ASYNC_SCHEDULER): it plans the
  next batch from the expected state after this one while this one runs, gets and sends batches by
  message queues, and the main process corrects what it gets for requests that arrived meanwhile.
  Here SGLang's overlap scheduler has that effect in one process: the GPU runs an iteration while
  the next one is planned, from the state that it will leave. It is planned at the last moment, so
  that arrivals are in the plan and need no correction (`cosched.engine.features.plan_timing`);
  ``plan_early`` plans as early as the paper does. The history of K steps for a pipeline of K stages
  is the engine's (docs/architecture.md, Pipeline parallelism).
* `hygen` predicts with cosched's predictor, which learns while the server runs. `hygen-literal`
  predicts with the paper's, fitted to a profile, with no correction and no margin (`predictor`).
"""

from __future__ import annotations

from cosched.core.group import RankNeeds
from cosched.core.plan import Plan
from cosched.core.view import View
from cosched.papers.hygen.victims import largest_of_latest
from cosched.schedule.base import PolicySettings
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.online_order import rank_needs, time_budget
from cosched.schedule.phases import Steps, two_phases


class HygenPolicy:
    """Two phases over a budget of predicted time. See the module's docstring and `phases`."""

    initial = None
    steps = Steps(victims=largest_of_latest)

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def plan(self, view: View, state: None) -> tuple[Plan, None]:
        builder = PlanBuilder(view)
        pace = time_budget(builder, self._settings)
        two_phases(builder, pace, self.steps)
        return builder.build(limits=pace.limits()), None

    def needs(self, view: View) -> RankNeeds:
        return rank_needs(view, self._settings)
