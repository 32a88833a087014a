"""SGLang's own scheduler in this process, without server, sockets or other processes.

Tests drive it step by step; the simulator drives it through a trace. The event loop is SGLang's:
only where requests come from and where outputs go is replaced.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sglang.srt.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args


@dataclass(slots=True, kw_only=True)
class Reply:
    """What a request got so far. `finish_reason` is SGLang's type: ``length``, ``stop``,
    ``abort``; None while it is unfinished."""

    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    message: str = ""
    num_retractions: int = 0


_LEFT_OUT = ("create_scheduler_watchdog", "create_load_snapshot_writer")
"""A scheduler's watchdog thread never ends, keeps the scheduler alive, and kills the parent of this
process when nothing has run for a while: right in a server, wrong here. Reports of its load would
go to a server that is not there; they walk the queues at every prefill, and each scheduler leaves a
file of them in memory."""


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _ports(server_args: Any) -> PortArgs:
    """Names of sockets at whose other ends nobody is. SGLang makes a file of each and leaves it."""
    ports = PortArgs.init_new(server_args)
    for name in vars(ports).values():
        if isinstance(name, str) and name.startswith("ipc://"):
            Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
    return ports


class _Outbox:
    """Takes the place of the sockets to the tokenizer and detokenizer processes."""

    def __init__(self, replies: dict[str, Reply]) -> None:
        self._replies = replies

    def send_output(self, output: Any, request: Any = None) -> None:
        if isinstance(output, BatchTokenIDOutput):
            for i, rid in enumerate(output.rids):
                reply = self._replies.setdefault(rid, Reply())
                reply.output_ids.extend(output.output_ids[i])
                reply.num_retractions = output.retraction_counts[i]
                self._finish(reply, output.finished_reasons[i])
        elif isinstance(output, AbortReq):
            reply = self._replies.setdefault(output.rid, Reply())
            self._finish(reply, output.finished_reason or {"type": "abort"})

    @staticmethod
    def _finish(reply: Reply, reason: Mapping[str, Any] | None) -> None:
        if reason is not None:
            assert reply.finish_reason is None, f"finished twice: {reason=}"
            reply.finish_reason = str(reason["type"])
            reply.message = str(reason.get("message") or "")


class _DeviceModule:
    """`torch.cpu` or another device's module, with other events."""

    def __init__(self, module: Any, make_event: Callable[[], Any]) -> None:
        self._module = module
        self.Event = make_event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _release_groups() -> None:
    """SGLang's process groups, of which a process has one set."""
    destroy_model_parallel()
    destroy_distributed_environment()


class LocalEngine:
    """One scheduler and the requests given to it.

    `flags` are SGLang's command line flags. With ``COSCHED_CONFIG`` set, cosched schedules. One
    engine at a time per process, because SGLang keeps its configuration in process-wide state:
    `close` the last one first (it is a context manager).
    """

    def __init__(self, flags: Sequence[str], *, tokenizer: bool = False) -> None:
        """tokenizer: load the model's, which grammars and ``min_new_tokens`` need."""
        load_plugins()
        without = [] if tokenizer else ["--skip-tokenizer-init"]
        server_args = prepare_server_args([*flags, *without])
        server_args.resolve_once()
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        left_out: dict[str, Any] = dict.fromkeys(_LEFT_OUT, _nothing)
        with mock.patch.multiple(scheduler_module, **left_out):
            try:
                self.scheduler: Any = Scheduler(server_args, _ports(server_args))
            except BaseException:
                _release_groups()
                raise
        self.replies: dict[str, Reply] = {}
        self._inbox: list[Any] = []
        self._zmq_context = self.scheduler.ipc_channels.recv_from_tokenizer.context
        self.outbox: Any = None
        self.send_to(_Outbox(self.replies))

    def close(self) -> None:
        """Release what the process can have only once. The engine cannot be used afterwards."""
        # Nobody reads the other ends of these sockets: closing them must not wait for it.
        self._zmq_context.destroy(linger=0)
        _release_groups()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send_to(self, outbox: Any) -> None:
        """Have another object take all outputs, by ``send_output(output, request)``; it may hand
        them on to the `outbox` before it."""
        self.outbox = outbox
        channels = self.scheduler.ipc_channels
        # Frozen dataclasses that the scheduler builds for itself.
        object.__setattr__(channels, "send_to_tokenizer", outbox)
        object.__setattr__(channels, "send_to_detokenizer", outbox)
        object.__setattr__(self.scheduler.output_streamer, "send_to_detokenizer", outbox)

    def replace_forward(
        self, forward: Callable[..., Any], *, computes: bool = False
    ) -> Callable[..., Any]:
        """Have `forward` take the place of the model worker's, which is returned; it gets a batch
        and options and returns what `made_up` does.

        computes: it may still read or write the batch when it has returned, so SGLang guards that
        """
        scheduler = self.scheduler
        if not computes:
            scheduler._forward_isolation = lambda batch, *, overlap: contextlib.nullcontext()
        before: Callable[..., Any] = scheduler.model_worker.forward_batch_generation
        scheduler.model_worker.forward_batch_generation = forward
        return before

    def replace_launch(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Have `launch` get each batch that is to run in the place of SGLang's own, which is
        returned."""
        before: Callable[..., Any] = self.scheduler.run_batch
        self.scheduler.run_batch = launch
        return before

    def replace_events(self, make: Callable[[], Any]) -> None:
        """Have `make` give the events that SGLang records behind a batch and asks for it."""
        scheduler = self.scheduler
        scheduler.device_module = _DeviceModule(scheduler.device_module, make)

    def replace_transfers(self, transfers: Any) -> None:
        """Have `transfers` move the bytes between device and host memory, as SGLang's
        `L2TransferEngine` does."""
        self.scheduler.tree_cache.cache_controller.l2_transfer_engine = transfers

    def replace_processing(self, process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Have `process` get each batch and its result in the place of SGLang's own, which is
        returned."""
        before: Callable[[Any, Any], None] = self.scheduler.process_batch_result
        self.scheduler.process_batch_result = process
        return before

    def watch_stops(self, on_stop: Callable[[str], None]) -> None:
        """Call `on_stop` with the id of each running request that goes back to the queue, whoever
        decides that."""
        queue = self.scheduler._add_request_to_queue

        def add(req: Any, is_retracted: bool = False) -> None:
            if is_retracted:
                on_stop(req.rid)
            queue(req, is_retracted)

        self.scheduler._add_request_to_queue = add

    def submit(
        self,
        rid: str,
        input_ids: Iterable[int],
        *,
        max_new_tokens: int,
        priority: int | None = None,
        custom_params: Mapping[str, Any] | None = None,
        ignore_eos: bool = True,
        stream: bool = True,
        created_s: float = 0.0,
        **fields: Any,
    ) -> None:
        """Give the scheduler a request; it arrives at the next iteration. Greedy."""
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=0.0,
            ignore_eos=ignore_eos,
            custom_params=dict(custom_params) if custom_params is not None else None,
        )
        params.normalize(None)
        self._inbox.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text="",
                input_ids=array("q", input_ids),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=stream,
                priority=priority,
                time_stats=APIServerReqTimeStats(created_time=created_s),
                **fields,
            )
        )

    def abort(self, rid: str) -> None:
        self._inbox.append(AbortReq(rid=rid))

    def send(self, request: Any) -> None:
        """Any other request of SGLang's (flush the cache, read the internal state, ...)."""
        self._inbox.append(request)

    def run(self, until: Callable[[], bool]) -> None:
        """Run SGLang's event loop. `until` is asked before each iteration, when requests would be
        received; the iteration in which it first returns True is the last one."""
        scheduler = self.scheduler

        def ingest(**options: Any) -> list[Any]:
            controller = getattr(scheduler, "cosched", None)
            if controller is not None:
                controller.wait_for_requests()
            if until():
                scheduler.gracefully_exit = True
            inbox, self._inbox[:] = list(self._inbox), []
            scheduler.process_input_requests(inbox)
            return inbox

        scheduler.ingest_requests = ingest
        scheduler.gracefully_exit = False
        try:
            scheduler.run_event_loop()
        finally:
            scheduler.gracefully_exit = False
            del scheduler.ingest_requests

    def run_until_idle(
        self,
        *,
        on_iteration: Callable[[int], None] = lambda iteration: None,
        max_iterations: int = 100_000,
    ) -> int:
        """Run until nothing is left to do and return the number of iterations.

        `on_iteration` gets the iteration's number before its requests are received.
        """
        count = 0

        def until() -> bool:
            nonlocal count
            assert count < max_iterations, f"not idle after {max_iterations} iterations"
            on_iteration(count)
            count += 1
            return not self._inbox and self.scheduler.is_fully_idle()

        self.run(until)
        return count


def lengths_of(batch: Any) -> list[int]:
    """Tokens that each request of a batch has once it has run, without the next one."""
    lengths: list[int] = batch.seq_lens_cpu.tolist()
    return lengths


def made_up(next_tokens: Sequence[int]) -> Any:
    """The result of a forward that was not computed: the next token of each request."""
    ids = torch.tensor(next_tokens, dtype=torch.int64)
    return GenerationBatchResult(next_token_ids=ids)


def load_adapters(scheduler: Any, folders: Mapping[str, Path]) -> dict[str, str]:
    """Load adapters into a running scheduler; name -> the id that requests carry."""
    manager = scheduler.tp_worker.model_runner.lora_manager
    for name, folder in folders.items():
        loaded = manager.load_lora_adapter(
            LoRARef(lora_name=name, lora_path=str(folder), pinned=False)
        )
        assert loaded.success, loaded.error_message
    return {ref.lora_name: lora_id for lora_id, ref in manager.lora_refs.items()}
