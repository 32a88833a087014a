"""SGLang's scheduler in this process, without a server, sockets or other processes.

For tests, profiling and the simulator. The event loop is SGLang's; the sources of requests and the
destinations of outputs are replaced. Beside the engine this is the only module of cosched that uses
SGLang's names.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import zmq
from sglang.srt.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)
from sglang.srt.managers import mm_schedule
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, get_resources, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args

from cosched.cpu.lookup_drafts import num_verified, result_of


@dataclass(slots=True, kw_only=True)
class Reply:
    """The output of a request. `finish_reason`: ``length``, ``stop``, ``abort``; None: it has not
    finished."""

    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    message: str = ""
    num_retractions: int = 0


_LEFT_OUT = ("create_scheduler_watchdog", "create_load_snapshot_writer")
"""The watchdog thread never ends and kills the parent of this process when nothing runs for a
while. Load snapshots leave files in memory."""


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _ports(server_args: Any) -> PortArgs:
    """Sockets that nothing is connected to. Removes the files that SGLang makes for them."""
    with mock.patch("sglang.srt.server_args.wait_port_available", _nothing):
        ports = PortArgs.init_new(server_args)
    for name, value in vars(ports).items():
        if isinstance(value, str) and value.startswith("tcp://"):  # DP attention
            setattr(ports, name, f"ipc://{tempfile.mktemp()}")
    for name in vars(ports).values():
        if isinstance(name, str) and name.startswith("ipc://"):
            Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
    return ports


_ENCODING_BYTES = 8192
"""Of a token of an image: 4,096 values of bfloat16."""


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
    """The torch module of a device, with other events."""

    def __init__(self, module: Any, make_event: Callable[[], Any]) -> None:
        self._module = module
        self.Event = make_event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _close_sockets() -> None:
    """Close the sockets of a scheduler that failed while it was built. When they are collected as
    garbage they would wait for their messages to be read, for ever."""
    for found in gc.get_objects():
        if isinstance(found, zmq.Context) and not found.closed:
            found.destroy(linger=0)


def _release_groups() -> None:
    """Destroy SGLang's process groups, and forget where the model's experts are."""
    get_resources().expert_location_metadata = None
    destroy_model_parallel()
    destroy_distributed_environment()


@cache
def freeze_imports() -> None:
    """Exclude all modules from garbage collection. SGLang collects garbage for each engine, and 70
    % of the time to build a small one went into searching the modules."""
    import sglang.srt.models.registry  # noqa: F401  # imports all models, as a scheduler does

    gc.freeze()


class _StopsLoop(Exception):
    """Of an event loop."""


_STOP = ["stop"]
"""In place of requests, to later stages of a pipeline."""


class LocalEngine:
    """One scheduler and its requests; a context manager.

    `flags`: SGLang's command line. With ``COSCHED_CONFIG`` set, cosched schedules. A process can
    have one at a time, because SGLang's configuration is global: `close` the last one first.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        tokenizer: bool = False,
        rank: int = 0,
        dp_rank: int | None = None,
    ) -> None:
        """tokenizer: load it, for grammars and ``min_new_tokens``. rank: of several processes with
        one engine each, which meet at ``--nccl-port``; dp_rank: with DP attention."""
        load_plugins()
        freeze_imports()
        without = [] if tokenizer else ["--skip-tokenizer-init"]
        server_args = prepare_server_args([*flags, *without])
        server_args.resolve_once()
        publish(server_args, role="scheduler", ranks=SpawnRanks(rank, dp_rank, gpu_id=rank))
        left_out: dict[str, Any] = dict.fromkeys(_LEFT_OUT, _nothing)
        with mock.patch.multiple(scheduler_module, **left_out):
            try:
                self.scheduler: Any = Scheduler(server_args, _ports(server_args))
            except BaseException:
                _close_sockets()
                _release_groups()
                raise
        self.replies: dict[str, Reply] = {}
        self._inbox: list[Any] = []
        receiver = self.scheduler.ipc_channels.recv_from_tokenizer
        # Only the first of several attention ranks has one.
        self._zmq_context = zmq.Context() if receiver is None else receiver.context
        self.outbox: Any = None
        self.send_to(_Outbox(self.replies))

    def close(self) -> None:
        """Release the global state. The engine cannot be used afterwards."""
        # Nothing reads from these sockets, so closing them must not wait.
        self._zmq_context.destroy(linger=0)
        _release_groups()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send_to(self, outbox: Any) -> None:
        """Send all outputs to another object, by ``send_output(output, request)``. It may pass
        them to the previous `outbox`."""
        self.outbox = outbox
        channels = self.scheduler.ipc_channels
        # Frozen dataclasses.
        object.__setattr__(channels, "send_to_tokenizer", outbox)
        object.__setattr__(channels, "send_to_detokenizer", outbox)
        object.__setattr__(self.scheduler.output_streamer, "send_to_detokenizer", outbox)

    def replace_forward(
        self, forward: Callable[..., Any], *, computes: bool = False
    ) -> Callable[..., Any]:
        """Replace the forward pass of the model worker, which is returned. `forward` gets a batch
        and options and returns a result (`made_up`). computes: it may use the batch after it has
        returned, which SGLang must guard."""
        scheduler = self.scheduler
        if not computes:
            scheduler._forward_isolation = lambda batch, *, overlap: contextlib.nullcontext()
        before: Callable[..., Any] = scheduler.model_worker.forward_batch_generation
        scheduler.model_worker.forward_batch_generation = forward
        return before

    def replace_launch(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """Replace `Scheduler.run_batch`, which is returned."""
        before: Callable[..., Any] = self.scheduler.run_batch
        self.scheduler.run_batch = launch
        return before

    def replace_events(self, make: Callable[[], Any]) -> None:
        """Replace the constructor of the events that SGLang records after each batch."""
        scheduler = self.scheduler
        scheduler.device_module = _DeviceModule(scheduler.device_module, make)

    def replace_transfers(self, transfers: Any) -> None:
        """Replace SGLang's `L2TransferEngine`, which copies between device and host memory."""
        self.scheduler.tree_cache.cache_controller.l2_transfer_engine = transfers

    def replace_processing(self, process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Replace `Scheduler.process_batch_result`, which is returned."""
        before: Callable[[Any, Any], None] = self.scheduler.process_batch_result
        self.scheduler.process_batch_result = process
        return before

    def watch_stops(self, on_stop: Callable[[str], None]) -> None:
        """Call `on_stop` with the id of each running request that is preempted, by a plan or by the
        engine."""
        queue = self.scheduler._add_request_to_queue

        def add(req: Any, is_retracted: bool = False) -> None:
            if is_retracted:
                on_stop(req.rid)
            queue(req, is_retracted)

        self.scheduler._add_request_to_queue = add

    def gather(self, own: Any) -> list[Any]:
        """The objects of all ranks; all of them call it."""
        group = self.scheduler.tp_cpu_group
        gathered = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, own, group=group)
        return gathered

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
        media: Iterable[tuple[int, int, int]] = (),
        mm_inputs: Any = None,
        **fields: Any,
    ) -> None:
        """Send a request, which arrives at the next iteration. Sampling is greedy. media: images
        that nothing computes (`made_up_media`); mm_inputs: real ones, by SGLang's processor."""
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
                mm_inputs=mm_inputs or made_up_media(media),
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

    @staticmethod
    def keep_encodings(batch: Any) -> None:
        """Put into SGLang's cache what the encoder would have computed for a prefill batch."""
        chunks = zip(batch.multimodal_inputs, batch.prefix_lens, batch.extend_lens, strict=True)
        for mm_inputs, begin, num_new in chunks:
            for item in () if mm_inputs is None else mm_inputs.mm_items:
                ((first, last),) = item.offsets
                if last >= begin and first < begin + num_new:
                    size = (last - first + 1) * _ENCODING_BYTES
                    kept = torch.empty(size, dtype=torch.uint8, device="meta")  # takes no memory
                    mm_schedule.embedding_cache.set(item.hash, EmbeddingResult(embedding=kept))

    def abort(self, rid: str) -> None:
        self._inbox.append(AbortReq(rid=rid))

    def send(self, request: Any) -> None:
        """Send any other message of SGLang's (flush the cache, read the internal state, ...)."""
        self._inbox.append(request)

    def run(self, until: Callable[[], bool]) -> None:
        """Run SGLang's event loop. `until` is called before each iteration; the first iteration in
        which it returns True is the last one. Later stages of a pipeline follow the first one."""
        scheduler = self.scheduler

        stages = scheduler.pp_group
        num_more = 0 if stages.world_size == 1 else 2 * stages.world_size
        """Iterations after the last one, in which the outputs reach the later stages."""

        def later_ingest(**options: Any) -> list[Any]:
            received: list[Any] = scheduler.request_receiver._pull_raw_reqs()
            if received == _STOP:
                stop()
            scheduler.process_input_requests(received)
            return received

        def stop() -> None:
            if not stages.is_last_rank:
                scheduler._pp_send_pyobj_to_next_stage(_STOP)
            raise _StopsLoop  # that of a pipeline has no end

        def ingest(**options: Any) -> list[Any]:
            nonlocal num_more
            controller = getattr(scheduler, "cosched", None)
            if controller is not None:
                controller.wait_for_requests()
            if until() or scheduler.gracefully_exit:
                scheduler.gracefully_exit = True
                num_more -= 1
                if num_more == 0:
                    stop()
            inbox, self._inbox[:] = list(self._inbox), []
            scheduler.process_input_requests(inbox)
            return inbox

        scheduler.ingest_requests = ingest if stages.is_first_rank else later_ingest
        scheduler.gracefully_exit = False
        try:
            with contextlib.suppress(_StopsLoop):
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
        """Run until the engine is idle and return the number of iterations. `on_iteration` gets the
        number of an iteration before its requests are received."""
        count = 0

        def until() -> bool:
            nonlocal count
            assert count < max_iterations, f"not idle after {max_iterations} iterations"
            on_iteration(count)
            count += 1
            return not self._inbox and self.scheduler.is_fully_idle()

        self.run(until)
        return count


def made_up_media(media: Iterable[tuple[int, int, int]]) -> Any:
    """The images of a request as SGLang's processors give them: of each a number that tells it from
    others, the place of its first token, and its tokens. None: there are none."""
    items = [
        MultimodalDataItem(
            modality=Modality.IMAGE,
            hash=key,
            pad_value=key,
            offsets=[(begin, begin + num_tokens - 1)],
        )
        for key, begin, num_tokens in media
    ]
    return MultimodalProcessorOutput(mm_items=items) if items else None


def lengths_of(batch: Any) -> list[int]:
    """Tokens of each request of a batch after it has run, without the next one."""
    lengths: list[int] = batch.seq_lens_cpu.tolist()
    return lengths


def made_up(next_tokens: Sequence[int]) -> Any:
    """A result that was not computed: the next token of each request."""
    ids = torch.tensor(next_tokens, dtype=torch.int64)
    return GenerationBatchResult(next_token_ids=ids)


def made_up_drafts(batch: Any, tokens: Sequence[Sequence[int]]) -> Any:
    """The same under speculative decoding: the new tokens of each request."""
    width = num_verified() if batch.forward_mode.is_decode() else 1
    padded = [[*new, *[0] * (width - len(new))] for new in tokens]
    generated = torch.tensor([len(new) for new in tokens], dtype=torch.int32)
    return result_of(batch, torch.tensor(padded, dtype=torch.int64).flatten(), generated)
