"""A scheduler that was just built is taken over: its controller is put together here."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from cosched.config import Config
from cosched.core.caps import EngineCaps
from cosched.engine import port
from cosched.engine.clock import Clock, EngineClock
from cosched.engine.controller import Controller
from cosched.engine.decode_role import DecodeRole
from cosched.engine.faults import RequestFaults
from cosched.engine.features import all_features
from cosched.engine.features.kv_manager import transfer_s_of
from cosched.engine.guard import Guard
from cosched.engine.identity import calibrator_of
from cosched.engine.intake import Arrivals, Intake
from cosched.engine.observe import IterationObserver
from cosched.engine.offline_gate import OfflineGate
from cosched.engine.planner import Planner
from cosched.engine.port.attention import describe_sharing, prefills_wait
from cosched.engine.port.grammar_compilers import take_compilers
from cosched.engine.rank_agreement import Group, Microbatches
from cosched.engine.ranks import Ranks
from cosched.engine.reply_lengths import ReplyLengths
from cosched.engine.running_table import RunningTable
from cosched.engine.startup import describe
from cosched.engine.timekeeper import Timekeeper
from cosched.engine.tracked import TrackedRequest, num_cached
from cosched.engine.waiting import WaitingQueue, WaitingSummary
from cosched.policies import PolicyEntry, policy_entry
from cosched.pool.pool import ArrivalQueue, OfflinePool
from cosched.pool.prefix_pool import PrefixPool
from cosched.pool.tenants import TenantPool
from cosched.predict.fitted import GraphSizes
from cosched.schedule.base import PolicySettings

logger = logging.getLogger(__name__)


def attach(scheduler: Any, config: Config) -> None:
    """Give it an observer (``cosched_observer``), a gate for offline work (``cosched_offline``), a
    guard against requests on which it fails (``cosched_faults``) and, unless SGLang's own
    scheduling stays, a controller (``cosched``)."""
    guard = Guard(is_strict=config.strict)
    observer = IterationObserver(
        scheduler,
        clock=EngineClock(),
        guard=guard,
        num_stages=port.parallel().num_stages,
        prefills_wait=prefills_wait(scheduler),
    )
    scheduler.cosched_observer = observer
    scheduler.cosched_faults = RequestFaults(scheduler, guard)
    entry = policy_entry(config.policy)
    scheduler.cosched_offline = OfflineGate(scheduler, max_waiting=config.max_offline_waiting)
    port.leave_a_page(scheduler)
    take_compilers(scheduler, num_schedulers=port.num_local_schedulers(scheduler))
    if port.parallel().plans:
        logger.info("cosched: %s", describe_sharing(scheduler.server_args))
    if entry.make is None:
        return
    port.mix_only_decodes(scheduler)
    if port.parallel().plans:
        logger.info("cosched: %s", describe(config, scheduler.server_args))
    scheduler.cosched = _controller(scheduler, entry, config, observer, guard)


def _controller(
    scheduler: Any,
    entry: PolicyEntry,
    config: Config,
    observer: IterationObserver,
    guard: Guard,
) -> Controller:
    """The controller of a scheduler, in charge of its waiting queue for as long as it lives."""
    assert entry.make is not None, f"{entry.name} plans nothing"
    plans = port.parallel().plans
    caps = port.caps_of(scheduler)
    lengths = ReplyLengths(config.named_length(), guard)
    intake = Intake(config.target_bounds(), config.online_tiers(), Arrivals(observer))
    waiting = WaitingQueue(
        pool=_pool_of(scheduler, config, lengths) if plans else ArrivalQueue(),
        clock=observer.clock,
        guard=guard,
        intake=intake,
    )
    controller = Controller(
        scheduler=scheduler,
        config=config,
        caps=caps,
        observer=observer,
        predictor=calibrator_of(
            scheduler.server_args,
            lambda: scheduler.model_config,
            config,
            graphs=port.graph_sizes_of(scheduler),
        ),
        waiting=waiting,
        table=RunningTable(
            lengths,
            port.row_generations(scheduler),
            page_size=caps.page_size,
            decode_reserve=caps.decode_reserve,
        ),
        ranks=_ranks_of(scheduler),
        group=_group_of(scheduler, caps, guard),
    )
    if plans:
        settings = _settings_of(entry, config, caps)
        controller.planner = Planner(controller, entry.make(settings), _timekeeper_of(controller))
    for kind in all_features():  # one may ask for those before it
        feature = kind.of(controller)
        if feature is not None:
            controller.features.add(feature)
    if port.host_total(scheduler):
        controller.use_transfer(transfer_s_of(scheduler, config.kv.host_bandwidth_gb_s))
    if port.only_decodes():
        scheduler.cosched_decode_role = DecodeRole(controller)
        return controller
    for req in scheduler.waiting_queue:
        waiting.append(req)
    scheduler.waiting_queue = waiting
    port.report_waiting(scheduler, WaitingSummary(waiting))
    return controller


def _settings_of(entry: PolicyEntry, config: Config, caps: EngineCaps) -> PolicySettings:
    return PolicySettings(
        caps=caps,
        slo=config.slo.targets(),
        latency_budget_s=config.latency_budget_s,
        budgets=config.budgets,
        offline_rate=config.offline_rate,
        tiers=config.online_tiers(),
        own=getattr(config, entry.section) if entry.section else None,
    )


def _timekeeper_of(controller: Controller) -> Timekeeper:
    return Timekeeper(
        clock=controller.clock,
        observer=controller.observer,
        predictor=controller.predictor if controller.is_timed else None,
        in_step=port.parallel().group_size > 1,
    )


def _ranks_of(scheduler: Any) -> Ranks | None:
    parallel = port.parallel()
    if parallel.is_alone:
        return None
    return Ranks(
        port.rank_group(scheduler) if parallel.tp_size > 1 and parallel.stage == 0 else None,
        is_source=parallel.plans,
        relay=port.Relay(scheduler) if parallel.num_stages > 1 else None,
    )


def _group_of(scheduler: Any, caps: EngineCaps, guard: Guard) -> Group | Microbatches | None:
    parallel = port.parallel()
    if parallel.group_size > 1:
        assert parallel.dp_rank is not None
        port.drop_prefill_delayer(scheduler)
        return Group(
            partial(port.exchange, scheduler),
            guard,
            rank=parallel.dp_rank,
            plans_ahead=port.overlaps(scheduler) and not port.runs_on_cpu(scheduler),
            takes_turns=caps.takes_turns,
        )
    if parallel.num_stages > 1 and parallel.plans:
        return Microbatches(partial(port.microbatch, scheduler), guard)
    return None


def _pool_of(scheduler: Any, config: Config, lengths: ReplyLengths) -> OfflinePool[TrackedRequest]:
    pool_config = config.named_pool()
    if pool_config is None:
        return ArrivalQueue()
    return TenantPool(
        make_pool=lambda: PrefixPool(
            pool_config,
            num_cached=partial(num_cached, scheduler.tree_cache),
            num_left=lambda request: lengths.remaining(request).median,
        ),
        lag_s=None if pool_config.tenant_lag_s == "off" else pool_config.tenant_lag_s,
        weights=config.batches.tenant_weights,
        most_running=config.most_running_offline(),
    )


def use_virtual_device(
    scheduler: Any, clock: Clock, graphs: GraphSizes | None, *, prefills_wait: bool = False
) -> None:
    """Take time from another clock and CUDA graphs from a modelled GPU; before the first request
    comes. prefills_wait: launches of prefills there wait for the device."""
    observer = scheduler.cosched_observer
    observer.use_virtual_clock(clock, prefills_wait=prefills_wait)
    controller: Controller | None = getattr(scheduler, "cosched", None)
    if controller is not None:
        controller.predictor.use_graphs(graphs)
        if isinstance(controller.group, Group):
            controller.group.plans_ahead = port.overlaps(scheduler)
