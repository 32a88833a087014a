"""Writes the decision log of a scheduler that plans (docs/operate.md)."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from cosched.core.view import View
from cosched.engine import port
from cosched.engine.decisions import DecisionLog
from cosched.engine.feature import Feature
from cosched.engine.iteration import Iteration


class LogDecisions(Feature):
    """It ends where it fails: no line may be missing. With data parallelism the replica's number is
    appended to the file's name."""

    place = "decision_log"
    ends = True

    def __init__(self, log: DecisionLog) -> None:
        self.log = log

    @classmethod
    def of(cls, controller: Any) -> LogDecisions | None:
        config = controller.config
        if config.decision_log is None or not port.parallel().plans:
            return None
        dp_rank = port.parallel().dp_rank
        path = config.decision_log if dp_rank is None else f"{config.decision_log}.{dp_rank}"
        log = DecisionLog(
            Path(path),
            policy=config.policy,
            versions={name: version(name) for name in ("cosched", "sglang")},
            max_bytes=int(config.decision_log_mb * 1e6),
        )
        return cls(log)

    def on_plan(self, iteration: Iteration, view: View) -> None:
        self.log.planned(iteration, view)

    def on_launched(self, iteration: Iteration, batch: Any | None) -> None:
        self.log.launched(iteration, batch)

    def on_result(self, iteration: Iteration, batch: Any) -> None:
        self.log.finished(iteration, batch)

    def on_aborted(self, request: Any) -> None:
        self.log.aborted(request.rid)

    def on_abandoned(self) -> None:
        self.log.abandoned()
