"""A decision log written step by step, with views and batches made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from cosched.core.batch import BatchTotals
from cosched.core.request import Slo
from cosched.engine.decision_records import Header
from cosched.engine.decisions import DecisionLog
from cosched.engine.observe import Iteration
from cosched.engine.port import shape_of
from cosched.latency.calibration import Calibrator
from cosched.policy.base import PolicySettings
from cosched.policy.sarathi import SarathiPolicy
from tests.factories import FakeRequest, FakeView, make_caps


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
    return SimpleNamespace(reqs=reqs, forward_mode=_Mode(), seq_lens_cpu=lengths)


@dataclass
class Recorder:
    """Writes a log the way the engine does. `policy` makes the plans."""

    path: Path
    policy: object = field(default_factory=SarathiPolicy)
    predictor: Calibrator | None = None
    max_bytes: int = 1_000_000
    name: str = "sarathi"

    def __post_init__(self):
        self.carry = self.policy.initial
        self.log = DecisionLog(
            self.path,
            header=Header(
                policy=self.name,
                settings=PolicySettings(
                    caps=make_caps(partial_decode=True), slo=Slo(ttft_s=1.0, tpot_s=0.05)
                ),
                versions={"cosched": "0"},
            ),
            predictor=self.predictor,
            max_bytes=self.max_bytes,
        )

    def plan(self, view: FakeView):
        carry = self.carry
        plan, self.carry = self.policy.plan(self.log.watch(view), carry)
        self.iteration = Iteration(plan=plan, planning_s=100e-6)
        self.log.planned(self.iteration, carry)
        return plan

    def launch(self, batch: SimpleNamespace | None) -> Iteration:
        if batch is not None:
            self.iteration.shape = shape_of(batch)
            if self.predictor is not None:
                self.iteration.predicted_s = self.predictor.predict_s(
                    BatchTotals.of(self.iteration.shape)
                )
        self.log.launched(self.iteration, batch)
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
        self.log.finished(iteration, batch)

    def run(self, view: FakeView, *batch: FakeRequest, finishing: tuple[str, ...] = ()):
        """One iteration, whole: planned, run, ended."""
        plan = self.plan(view)
        ran = batch_of(*batch, finishing=finishing)
        iteration = self.launch(ran)
        self.end(iteration, ran, start_s=max(view.now_s, view.start_s))
        return plan
