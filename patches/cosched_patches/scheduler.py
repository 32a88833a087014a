"""Hooks in the scheduler process: its loop, the requests it receives, what the operator asks.

`take_over` attaches cosched to a scheduler (`cosched.engine.attach`). Before that, and in an engine
without a configuration, the other hooks call SGLang's code as it is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.managers.scheduler import NextBatchPlan

from cosched.config import load_config, planning_config
from cosched.core.request import RequestClass
from cosched.cpu.torch_native import run_uncompiled
from cosched.engine.attach import attach
from cosched.engine.features.kv_manager import with_tree_core
from cosched.engine.features.storage_reads import StorageReads
from cosched.engine.guard import note_or_raise
from cosched.engine.offline_gate import is_for_gate
from cosched.engine.port import finish_by_pattern as finish
from cosched.engine.port import forget_last, most_tail_tokens, refuse, under_way
from cosched.engine.port.building import adder_class
from cosched.engine.port.grammar_compilers import compile_for, ready_requests
from cosched.engine.port.penalties import count_outputs
from cosched.engine.port.read_once import launching
from cosched.engine.read_state import shown_state
from cosched.engine.support import check_arguments, chooses_evictions
from cosched.engine.waiting import WaitingQueue, online_requests
from cosched.errors import ConfigError, RequestError
from cosched.papers.bros.sglang_pages import share_pages
from cosched.server.checks import check_received, scope_of
from cosched.wire import PARAMS_KEY, SERVER_KEY, class_of_priority
from cosched_patches.seam import Seam, after, around, before

logger = logging.getLogger(__name__)


def _controller(scheduler: Any) -> Any | None:
    """None: SGLang's own policy schedules."""
    return getattr(scheduler, "cosched", None)


def _faults(scheduler: Any) -> Any | None:
    return getattr(scheduler, "cosched_faults", None)


def _decode_role(scheduler: Any) -> Any | None:
    """None: this is not a decode server, or SGLang's own policy schedules."""
    return getattr(scheduler, "cosched_decode_role", None)


def _is_offline(req: Any) -> bool:
    return class_of_priority(req.priority) is RequestClass.OFFLINE


@contextlib.contextmanager
def _showing(scheduler: Any, reqs: Iterable[Any]) -> Iterator[list[Any]]:
    """SGLang sees only these waiting requests. Yields a list, which afterwards holds those that
    SGLang has removed."""
    waiting, shown, taken = scheduler.waiting_queue, list(reqs), list[Any]()
    scheduler.waiting_queue = list(shown)
    try:
        yield taken
    finally:
        left = {id(req) for req in scheduler.waiting_queue}
        scheduler.waiting_queue = waiting
        taken += [req for req in shown if id(req) not in left]


# --- Start ---


def take_over(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Attaches controller and observer to a scheduler, and replaces SGLang's list of waiting
    requests by online queue and offline pool. Arguments that the policy does not support are
    refused before the model is loaded. (sgl-project/sglang#5603)"""
    config, planning = load_config(), planning_config()
    try:
        if config is not None:
            check_arguments(server_args, config)
        is_ours = planning is not None and chooses_evictions(server_args, planning)
        with with_tree_core() if is_ours else contextlib.nullcontext():
            original(scheduler, server_args, *args, **kwargs)
        share_pages(scheduler)
        if config is not None:
            run_uncompiled(server_args)
            attach(scheduler, config)
    except ConfigError as error:
        logger.error("cosched: %s", error)  # SGLang logs a traceback after it
        raise


# --- Requests ---


def wait_for_requests(scheduler: Any, *_: Any, **__: Any) -> None:
    """Requests are received just before the next iteration must be planned, so that its plan
    includes recent ones. Under the overlap scheduler SGLang plans an iteration as soon as the
    previous one has begun."""
    controller = _controller(scheduler)
    if controller is not None:
        controller.wait_for_requests()


def receive(original: Any, scheduler: Any, recv_req: Any, **kwargs: Any) -> None:
    """An exception while a request is built ends that request with the reason; stock ends the
    scheduler and all its requests."""
    handle = partial(original, scheduler, recv_req, **kwargs)
    faults = _faults(scheduler)
    if faults is None:
        handle()
    else:
        faults.receive(handle, recv_req)


def check_bounds(original: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """The bounds of fields hold for requests of all front ends: HTTP, gRPC, a program around the
    engine, batches."""
    try:
        check_received(recv_req, scope_of(scheduler))
    except RequestError as error:
        refuse(scheduler, recv_req, str(error))
        return
    original(scheduler, recv_req, *args, **kwargs)


def keep_owner(refusal: Any, coordinator: Any, req: Any, recv_req: Any) -> Any:
    """A beam search keeps its targets and its owner. Stock gives it sampling parameters of its own,
    the only ones that the scheduler makes: its cost would have no owner."""
    custom = recv_req.sampling_params.custom_params
    if isinstance(custom, dict):
        kept = {key: custom[key] for key in (PARAMS_KEY, SERVER_KEY) if key in custom}
        req.sampling_params.custom_params = kept or None
    return refusal


def limit_online_queue(original: Any, scheduler: Any, recv_req: Any) -> bool:
    """``--max-queued-requests`` counts and refuses online requests only. Stock counts offline
    requests too, answers them with 503, and aborts waiting ones for requests of higher priority.
    Offline requests have ``--cosched-max-offline-waiting``; a server that is shutting down takes
    none. (sgl-project/sglang#8743)"""
    if _is_offline(recv_req):
        gate = getattr(scheduler, "cosched_offline", None)
        return gate is not None and gate.turns_away(recv_req)
    if scheduler.max_queued_requests is None:
        return False
    try:
        with _showing(scheduler, online_requests(scheduler.waiting_queue)) as aborted:
            is_refused: bool = original(scheduler, recv_req)
    except Exception as error:
        note_or_raise(scheduler, "queue_limit", error)
        return False
    for req in aborted:
        scheduler.waiting_queue.remove(req)
    return is_refused


def read_when_next(original: Any, scheduler: Any, req: Any, storage_hit_end: Any = None) -> Any:
    """A storage of KV below host memory is asked about offline requests when they are next
    (`StorageReads`). Stock asks about each request that comes: about 100,000 lines of a
    batch, of which most will run hours later."""
    controller = _controller(scheduler)
    if controller is not None and _is_offline(req):
        reads = controller.features.get(StorageReads)
        if reads is None or req not in reads.asked:
            return None
    return original(scheduler, req, storage_hit_end)


def time_out_online(original: Any, scheduler: Any) -> Any:
    """``SGLANG_REQ_WAITING_TIMEOUT`` and ``SGLANG_REQ_RUNNING_TIMEOUT`` are for online requests.
    Stock would answer offline requests with 503; the running timeout counts from the first
    admission, whatever preemptions follow."""
    timeouts = (envs.SGLANG_REQ_WAITING_TIMEOUT, envs.SGLANG_REQ_RUNNING_TIMEOUT)
    if not any(timeout.get() > 0 for timeout in timeouts):
        return original(scheduler)
    try:
        with _showing(scheduler, online_requests(scheduler.waiting_queue)):
            aborts = original(scheduler)
    except Exception as error:
        note_or_raise(scheduler, "waiting_timeout", error)
        return []
    offline = {req.rid for req in under_way(scheduler) if _is_offline(req)}
    return [abort for abort in aborts if abort.rid not in offline]


def compile_in_turn(manager: Any, req: Any) -> None:
    """Grammars are compiled for online requests first, and for the owners of API keys in turn
    (`cosched.engine.port.grammar_compilers`). Stock starts all at once, each on eight threads."""
    compile_for(manager, req)


def admit_compiled(original: Any, manager: Any) -> list[Any]:
    """The time limit of a grammar counts from the start of its compilation, and reaching it is not
    kept as a verdict on the grammar. Stock counts from the arrival of the request, and refuses the
    grammar from then on; iterations wait for grammars."""
    return ready_requests(partial(original, manager), manager)


def abort(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Finds the waiting requests of an abort by their ids. Stock walks the whole queue: with 50,000
    requests in the offline pool every client that disconnects would cost 11 ms."""
    waiting = scheduler.waiting_queue
    if not isinstance(waiting, WaitingQueue):
        return original(scheduler, recv_req)
    # SGLang aborts all requests whose ids begin with the given one.
    meant = waiting if recv_req.abort_all else waiting.beginning_with(recv_req.rid)
    # An abort with a reason comes from the server, for instance a timeout.
    by_client = not (recv_req.abort_message or recv_req.finished_reason)
    take_out = waiting.cancel_rid if by_client else waiting.abort_rid
    aborted: list[Any] = []
    try:
        with _showing(scheduler, meant) as aborted:
            return original(scheduler, recv_req)
    finally:
        for req in aborted:
            take_out(req.rid)


# --- The loop ---


def plan_prefill(
    original: Any, scheduler: Any, prefill_delayer_single_pass: Any, running_batch: Any
) -> Any:
    """The policy plans the iteration before SGLang builds a prefill batch. Stock resumes a started
    offline prefill before it looks at the queue, preempts only when request slots run out, and
    drops the KV of preempted requests. (sgl-project/sglang#34623, sgl-project/sglang#22904,
    sgl-project/sglang#26276)"""
    faults, controller = _faults(scheduler), _controller(scheduler)
    build = partial(original, scheduler)
    arguments = {
        "prefill_delayer_single_pass": prefill_delayer_single_pass,
        "running_batch": running_batch,
    }
    if faults is not None and faults.is_isolating:
        return faults.build_group(build, **arguments)
    if controller is None:
        return build(**arguments)
    return controller.step(build, **arguments)


def use_planned_adder(stock: Any, scheduler: Any) -> Any:
    """The plan says how many tokens each request gets; SGLang has one chunk size for all."""
    return adder_class(scheduler)


def count_paused_adapters(
    original: Any, scheduler: Any, req: Any, running_loras: set[str | None]
) -> bool:
    """The LoRA adapters of requests whose decode is paused stay in use. Stock counts only the
    batch that runs, and would admit one too many."""
    controller = _controller(scheduler)
    if controller is not None:
        running_loras = running_loras | controller.paused_adapters
    return bool(original(scheduler, req, running_loras))


def count_penalties(original: Any, batch: Any) -> None:
    """Penalties count the tokens of requests that were paused, or preempted and resumed. A decode
    adds only the latest token of each request, so these would miss tokens."""
    if not count_outputs(batch):
        original(batch)


def complete_batch(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Partial decode: an iteration may decode a part of the running batch, and all other code sees
    the whole. SGLang decodes its whole running batch or none of it. An exception while a batch is
    built is attributed to a request (`cosched.engine.faults`)."""

    def build() -> Any:
        unfinished = scheduler.chunked_req
        plan = original(scheduler, *args, **kwargs)
        controller = _controller(scheduler)
        if controller is not None:
            controller.look_after(unfinished)
            plan.running_batch = controller.launched(plan.batch_to_run, plan.running_batch)
            if plan.batch_to_run is None:
                forget_last(scheduler)
        return plan

    faults = _faults(scheduler)
    plan = build() if faults is None else faults.next_batch(build)
    if plan is None:
        return NextBatchPlan(batch_to_run=None, running_batch=scheduler.running_batch)
    return plan


def admit_to_decode(original: Any, scheduler: Any) -> None:
    """Decode servers (PD disaggregation): online requests get KV memory first. Stock gives it in
    the order of arrival."""
    role = _decode_role(scheduler)
    if role is None:
        original(scheduler)
    else:
        role.admit(partial(original, scheduler))


def decode_batch(original: Any, scheduler: Any, running_batch: Any) -> Any:
    """Decode servers: as `complete_batch`."""
    role, build = _decode_role(scheduler), partial(original, scheduler, running_batch)
    return build() if role is None else role.next_batch(build)


def decode_part(original: Any, scheduler: Any, batch: Any) -> Any:
    """Decode servers: the policy plans whose decode pauses. Elsewhere `plan_prefill` has done so.
    Where memory runs out, stock takes the requests with the shortest output, of either class."""
    role = _decode_role(scheduler)
    update = partial(original, scheduler)
    return update(batch) if role is None else role.decode(update, batch)


def drop_unreachable(original: Any, scheduler: Any) -> None:
    """Prefill servers: requests whose decode server is gone leave the queue, which SGLang replaces
    by a new list."""
    waiting = scheduler.waiting_queue
    if not isinstance(waiting, WaitingQueue):
        original(scheduler)
        return
    with _showing(scheduler, waiting) as failed:
        original(scheduler)
    for req in failed:
        waiting.abort_rid(req.rid)


def end_sent(result: Any, scheduler: Any, rids_to_check: Any = None) -> Any:
    """Prefill servers: a request has ended when its KV is at the decode server."""
    controller = _controller(scheduler)
    if controller is not None and result:
        controller.on_result(None, result)
    return result


def launch(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The time of an iteration starts with the launch of its batch. Shared-prefix attention plans
    from the requests of the batch; a forward pass knows only the rows of their KV. An exception is
    attributed to a request; stock ends the scheduler."""
    run = partial(original, scheduler, batch, *args, **kwargs)
    observer = getattr(scheduler, "cosched_observer", None)
    if observer is None:
        return run()
    with launching(batch):
        return scheduler.cosched_faults.run(partial(observer.launch, run, batch), batch)


def sample(original: Any, scheduler: Any, batch_result: Any, cur_batch: Any) -> Any:
    """An exception in sampling is attributed to a request. With grammars under the overlap
    scheduler, sampling is launched apart from the forward pass."""
    faults = _faults(scheduler)
    run = partial(original, scheduler, batch_result, cur_batch)
    return run() if faults is None else faults.sample(run, cur_batch)


def process_result(original: Any, scheduler: Any, batch: Any, result: Any) -> Any:
    """The time of an iteration ends when its result is there. Under the overlap scheduler that is
    known only here, after the next batch was launched. An exception is attributed to a request;
    stock ends the scheduler."""

    def process() -> Any:
        observer, controller = getattr(scheduler, "cosched_observer", None), _controller(scheduler)
        iteration = None if observer is None else observer.finish(batch, result)
        answer = original(scheduler, batch, result)
        if controller is not None:
            controller.finished(iteration, batch)
        return answer

    faults = _faults(scheduler)
    return process() if faults is None else faults.process(process, batch, result)


def finish_by_pattern(original: Any, req: Any, new_accepted_len: int = 1) -> bool:
    """``stop_regex`` is matched in linear time at the end of the output. SGLang matches with
    Python's `re` at every step, on the scheduler's thread: ``(a+)+$`` takes time exponential in the
    text."""
    params = req.sampling_params
    patterns = params.stop_regex_strs
    if not patterns:
        return bool(original(req, new_accepted_len))
    if params.stop_strs:
        params.stop_regex_strs = []
        try:
            if original(req, new_accepted_len):
                return True
        finally:
            params.stop_regex_strs = patterns
    return finish(req, new_accepted_len)


def bound_stop_tail(num_tokens: int, req: Any, new_accepted_len: int) -> int:
    """For a pattern without a longest match SGLang decodes the whole output to text at every step,
    on the scheduler's thread; here only the end of the output."""
    return min(num_tokens, most_tail_tokens(req, new_accepted_len))


# --- The operator ---


def add_state(result: Any, scheduler: Any, recv_req: Any) -> Any:
    """``/get_server_info`` shows waiting and running requests by class, preemptions and planning
    time."""
    controller = _controller(scheduler)
    if controller is not None:
        try:
            result.internal_state["cosched"] = shown_state(controller)
        except Exception as error:
            result.internal_state["cosched"] = {"error": repr(error)}
            controller.guard.note("state", error)
    elif (config := load_config()) is not None:
        # Clients ask whether requests have classes here: not under "sglang".
        result.internal_state["cosched"] = {"policy": config.policy}
    return result


def set_offline_limits(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """The operator pauses and limits offline work while the server runs, and the server ends it at
    shutdown. SGLang sends this message to all ranks, which must plan alike."""
    gate = getattr(scheduler, "cosched_offline", None)
    if gate is None or not is_for_gate(recv_req.server_args):
        return original(scheduler, recv_req)
    return SetInternalStateReqOutput(updated=gate.set(recv_req.server_args))


def ignore_paused_pool(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """A paused offline pool does not count as work. Otherwise ``/flush_cache`` would be refused,
    and ``/health`` would wait for an iteration that never comes."""
    controller = _controller(scheduler)
    if controller is None or _decode_role(scheduler) is not None or controller.waiting.may_admit:
        return bool(original(scheduler, *args, **kwargs))
    with _showing(scheduler, ()):
        return bool(original(scheduler, *args, **kwargs))


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_GRAMMARS = "sglang.srt.constrained.grammar_manager.GrammarManager"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_BEAMS = "sglang.srt.beam_search.coordinator.BeamCoordinator"
_HANDLED = "self, recv_req, mm_input_error"
_BUILT = "self, recv_req, mm_cleanup, mm_input_error"

SEAMS: tuple[Seam, ...] = (
    around(f"{_SCHEDULER}.__init__", "self, server_args, port_args", take_over),
    before(f"{_SCHEDULER}.ingest_requests", "self, stop_at_pause", wait_for_requests),
    around(f"{_SCHEDULER}.handle_generate_request", _HANDLED, receive),
    around(f"{_SCHEDULER}.handle_embedding_request", _HANDLED, receive),
    around(f"{_SCHEDULER}._handle_generate_request", _BUILT, check_bounds),
    around(f"{_SCHEDULER}._handle_embedding_request", _BUILT, check_bounds),
    after(f"{_BEAMS}.validate_and_init", "self, req, recv_req", keep_owner),
    around(f"{_SCHEDULER}._abort_on_queued_limit", "self, recv_req", limit_online_queue),
    around(f"{_SCHEDULER}._prefetch_kvcache", "self, req, storage_hit_end", read_when_next),
    around(f"{_SCHEDULER}._poll_timeout_aborts", "self", time_out_online),
    before(f"{_GRAMMARS}.process_req_with_grammar", "self, req", compile_in_turn),
    around(f"{_GRAMMARS}.get_ready_grammar_requests", "self", admit_compiled),
    around(f"{_SCHEDULER}.abort_request", "self, recv_req", abort),
    around(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        "self, prefill_delayer_single_pass, running_batch",
        plan_prefill,
    ),
    after(f"{_SCHEDULER}.get_prefill_adder_class", "self", use_planned_adder),
    around(
        f"{_SCHEDULER}.can_schedule_lora_req", "self, req, running_loras", count_paused_adapters
    ),
    around(f"{_BATCH}.cumulate_penalty_output_tokens", "self", count_penalties),
    around(
        f"{_SCHEDULER}.get_next_batch_to_run", "self, running_batch, last_batch", complete_batch
    ),
    around(
        f"{_SCHEDULER}.get_next_disagg_prefill_batch_to_run",
        "self, running_batch, last_batch, should_retry_storage_prefetch",
        complete_batch,
    ),
    around(f"{_SCHEDULER}.resolve_waiting_queue_bootstrap", "self", drop_unreachable),
    after(f"{_SCHEDULER}.process_disagg_prefill_inflight_queue", "self, rids_to_check", end_sent),
    around(f"{_SCHEDULER}.process_decode_queue", "self", admit_to_decode),
    around(
        f"{_SCHEDULER}.get_next_disagg_decode_batch_to_run", "self, running_batch", decode_batch
    ),
    around(f"{_SCHEDULER}.update_running_batch", "self, batch", decode_part),
    around(f"{_SCHEDULER}.run_batch", "self, batch, pp_proxy_tensors", launch),
    around(f"{_SCHEDULER}.launch_batch_sample_if_needed", "self, batch_result, cur_batch", sample),
    around(f"{_SCHEDULER}.process_batch_result", "self, batch, result", process_result),
    around(f"{_REQ}._check_str_based_finish", "self, new_accepted_len", finish_by_pattern),
    after(f"{_REQ}._stop_match_tail_len", "self, new_accepted_len", bound_stop_tail),
    after(f"{_SCHEDULER}.get_internal_state", "self, recv_req", add_state),
    around(f"{_SCHEDULER}.set_internal_state", "self, recv_req", set_offline_limits),
    around(
        f"{_SCHEDULER}.is_fully_idle", "self, for_health_check, ignore_waiting", ignore_paused_pool
    ),
)
