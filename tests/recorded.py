"""A decision log written step by step, with plans, views and batches made by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from cosched.core.plan import EMPTY_PLAN, Plan
from cosched.engine.features.log_decisions import LogDecisions
from cosched.engine.iteration import Iteration
from cosched.engine.port import shape_of
from tests.factories import FakeRequest, FakeView


class _Mode:
    def is_decode(self):
        return True


class _Lengths(list):
    def tolist(self):
        return list(self)


def batch_of(*requests: FakeRequest, finishing: tuple[str, ...] = ()) -> SimpleNamespace:
    """A decode batch; those in `finishing` end in it."""
    reqs = [
        SimpleNamespace(
            rid=request.rid,
            cosched=request,
            finished=lambda rid=request.rid: rid in finishing,
            finished_reason=SimpleNamespace(to_json=lambda: {"type": "length"}),
        )
        for request in requests
    ]
    lengths = _Lengths(request.num_computed_tokens + 1 for request in requests)
    return SimpleNamespace(
        reqs=reqs, forward_mode=_Mode(), seq_lens_cpu=lengths, spec_algorithm=NO_DRAFTS
    )


NO_DRAFTS = SimpleNamespace(is_none=lambda: True)


@dataclass
class Recorder:
    """Writes a log the way the engine does."""

    path: Path
    max_bytes: int = 1_000_000

    def __post_init__(self):
        self.log = LogDecisions(
            self.path, policy="sarathi", versions={"cosched": "0"}, max_bytes=self.max_bytes
        )

    def plan(self, view: FakeView, plan: Plan = EMPTY_PLAN) -> None:
        self.iteration = Iteration(plan=plan, planning_s=100e-6)
        self.log.on_plan(self.iteration, view)

    def launch(
        self, batch: SimpleNamespace | None, *, predicted_s: float | None = None
    ) -> Iteration:
        if batch is not None:
            self.iteration.shape = shape_of(batch)
            self.iteration.predicted_s = predicted_s
        self.log.on_launched(self.iteration, batch)
        return self.iteration

    def end(
        self,
        iteration: Iteration,
        batch: SimpleNamespace,
        *,
        start_s: float,
        seconds: float = 0.01,
    ) -> None:
        iteration.start_s, iteration.duration_s = start_s, seconds
        self.log.on_result(iteration, batch)

    def run(
        self,
        view: FakeView,
        *batch: FakeRequest,
        plan: Plan = EMPTY_PLAN,
        finishing: tuple[str, ...] = (),
    ) -> None:
        """One iteration, whole: planned, run, ended."""
        self.plan(view, plan)
        ran = batch_of(*batch, finishing=finishing)
        self.end(self.launch(ran), ran, start_s=max(view.now_s, view.start_s))
