"""A scheduler that was just built is taken over."""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cosched.config import Config
from cosched.engine import port
from cosched.engine.clock import Clock, EngineClock
from cosched.engine.controller import Controller, Log
from cosched.engine.cpu import run_uncompiled
from cosched.engine.decisions import DecisionLog
from cosched.engine.exporter import MetricsExporter
from cosched.engine.faults import RequestFaults
from cosched.engine.guard import Guard
from cosched.engine.observe import IterationLogFile, IterationObserver
from cosched.engine.offline_gate import OfflineGate
from cosched.engine.port import bidirectional
from cosched.engine.startup import describe
from cosched.errors import ConfigError
from cosched.policies import policy_entry
from cosched.predict.features import GraphSizes

logger = logging.getLogger(__name__)


def attach(scheduler: Any, config: Config) -> None:
    """Give it an observer (``cosched_observer``), a gate for offline work (``cosched_offline``), a
    guard against requests on which it fails (``cosched_faults``) and, unless SGLang's own
    scheduling stays, a controller (``cosched``).

    ConfigError when the policy cannot serve its model.
    """
    run_uncompiled(scheduler.server_args)
    clock = EngineClock()
    guard = Guard(is_strict=config.strict)
    observer = IterationObserver(scheduler, clock=clock, guard=guard)
    scheduler.cosched_observer = observer
    scheduler.cosched_faults = RequestFaults(scheduler, guard)
    logs: dict[str, Log] = {}
    if config.iteration_log is not None and port.parallel().tp_rank == 0:
        logs["iteration"] = iteration_log = IterationLogFile(_log_path(config.iteration_log))
        observer.add_listener(iteration_log)
    entry = policy_entry(config.policy)
    scheduler.cosched_offline = OfflineGate(scheduler, max_waiting=config.max_offline_waiting)
    port.leave_a_page(scheduler)
    if entry.make is None:
        return
    if not port.has_one_pool(scheduler):
        raise ConfigError(
            f"policy {config.policy!r} does not support models with sliding-window or state-space "
            "layers yet (their KV has a second pool); use --cosched-policy sglang"
        )
    if config.kv.bidirectional_pages:
        reason = bidirectional.why_not(scheduler)
        if reason is not None:
            raise ConfigError(f"kv.bidirectional_pages cannot be had here: {reason}")
        bidirectional.share_pages(scheduler)
    port.mix_only_decodes(scheduler)
    if port.parallel().tp_rank == 0:
        logger.info("cosched: %s", describe(config, scheduler.server_args))
    scheduler.cosched = controller = Controller(
        scheduler, entry=entry, config=config, clock=clock, observer=observer, guard=guard
    )
    controller.logs = logs
    labels = port.metric_labels(scheduler)
    if labels is not None:
        controller.export_to(MetricsExporter(controller, labels))
    if config.decision_log is not None and port.parallel().tp_rank == 0:
        logs["decision"] = decisions = DecisionLog(
            _log_path(config.decision_log),
            policy=config.policy,
            versions={name: version(name) for name in ("cosched", "sglang")},
            max_bytes=int(config.decision_log_mb * 1e6),
        )
        controller.log_decisions(decisions)


def use_virtual_device(scheduler: Any, clock: Clock, graphs: GraphSizes | None) -> None:
    """Take time from another clock and CUDA graphs from a modelled GPU; before the first request
    comes."""
    scheduler.cosched_observer.use_virtual_clock(clock)
    controller = getattr(scheduler, "cosched", None)
    if controller is not None:
        controller.predictor.use_graphs(graphs)


def _log_path(path: str) -> Path:
    """One file per replica: with data parallelism the replica's number is appended."""
    dp_rank = port.parallel().dp_rank
    return Path(path if dp_rank is None else f"{path}.{dp_rank}")
