"""SGLang's scheduler under a virtual clock: the same code as in production, no GPU, no waiting.

`VirtualEngine` builds a `LocalEngine` on a model of one tiny layer whose KV pool has the capacity
of the simulated GPU, and replaces one method: the model worker's forward. A cost model says how
long each forward takes, and the clock moves by that. Host time is in virtual time as a `HostTime`
says.

With the overlap scheduler the loop is SGLang's own: while iteration *n* occupies the modelled GPU,
*n+1* is planned from the results of *n-1*; waiting for a result moves the clock to the moment at
which it is done. The clock is the host's: it passes host time before a launch and after a result
was processed, and what of it is later than `device_done_s` is idle time of the device.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import psutil
import torch

from cosched.core.batch import BatchShape
from cosched.core.request import RequestClass
from cosched.core.wire import (
    HINT_KEY,
    OFFLINE_PRIORITY,
    PARAMS_KEY,
    class_of_priority,
    params_of_slo,
)
from cosched.engine import port
from cosched.engine.attach import use_virtual_device
from cosched.engine.identity import STANDS_FOR
from cosched.engine.observe import Iteration
from cosched.engine.port.attention import assuming_one_reading
from cosched.engine.port.local import LocalEngine, lengths_of, made_up
from cosched.engine.port.prefixes import RunningPrefixes, with_repeated
from cosched.errors import ConfigError
from cosched.lab.cost_models.base import PrefixReads
from cosched.lab.metrics.records import ColumnLog, IterationLog, IterationRecord, RequestRecord
from cosched.lab.simulation.arrivals import VOCAB_SIZE, Arrival, Source
from cosched.lab.simulation.host_time import HostTime, Load, NoHostTime
from cosched.lab.simulation.virtual_host import VirtualTransfers
from cosched.memory.occupancy import HostOccupancy, KvOccupancy
from cosched.memory.reuse import BLOCK, block_hashes
from cosched.predict.fitted import GraphSizes
from cosched.predict.profile_file import EngineIdentity

EOS_ID = 2

_BYTES_PER_PROMPT_TOKEN = 30
"""Host memory that a request under way takes, here and in SGLang's queues."""

_MEMORY_SHARE = 0.8
"""Of the host memory that is free when an engine is made: what requests under way may take."""
_FIRST_ID = 10

_KV_FIELDS = tuple(f.name for f in msgspec.structs.fields(KvOccupancy) if f.type in (int, bool))
_HOST_FIELDS = HostOccupancy.__struct_fields__

KV_COLUMNS = (
    "time_s",
    *(f"recomputed_{request_class.value}" for request_class in RequestClass),
    *_KV_FIELDS,
    *(f"host_{name}" for name in _HOST_FIELDS),
)
"""Of `VirtualEngine.kv`. recomputed_*: prefill tokens since the start that had been computed
before, by whomever, and were evicted."""

KV_PERIOD_S = 1.0
"""Between two rows of who has the KV memory; it takes O(nodes)."""

_IDLE_ITERATIONS = 3
"""Iterations without a batch before the scheduler counts as idle. One alone means nothing: when a
whole running batch has ended, SGLang takes an iteration to notice before it admits the next."""


class VirtualClock:
    """Seconds since the simulation began. Moved by the simulation alone."""

    def __init__(self, after_wait_s: float = NoHostTime.after_wait_s) -> None:
        """after_wait_s: as of `HostTime`."""
        self._now_s = 0.0
        self._after_wait_s = after_wait_s
        self.ready_s = 0.0
        """When the host has done what it is at, before a launch."""
        self.device_done_s = 0.0
        """When the modelled GPU has done what was launched."""

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Never goes back: a time that has passed changes nothing."""
        self._now_s = max(self._now_s, time_s)

    def launches_in(self, seconds: float) -> None:
        """The host needs that long to the next launch, beside what it does after a wait."""
        self.ready_s = max(self.ready_s, self._now_s) + seconds

    def wait_until(self, time_s: float, is_over: Callable[[], bool]) -> bool:
        """Until then or until `device_done_s`, of which alone `is_over` may speak. Whoever waits
        has something to do afterwards: `ready_s`."""
        self.advance_to(min(time_s, self.device_done_s))
        self.ready_s = self._now_s + self._after_wait_s
        return self.device_done_s <= time_s


class TimeModel(Protocol):
    """The modelled GPU. graph_sizes: what it has CUDA graphs for; None: nothing."""

    @property
    def graph_sizes(self) -> GraphSizes | None: ...

    def iteration_s(self, batch: BatchShape) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The way to host memory (``--enable-hierarchical-cache``).

    s_per_token  to copy a token's KV, either way [s]
    num_layers   of the modelled model, which is loaded layer by layer
    """

    s_per_token: float
    num_layers: int


class _Following:
    """What the simulation knows of a request under way."""

    __slots__ = (
        "admitted_s",
        "arrival",
        "furthest",
        "num_cached",
        "num_computed",
        "num_known",
        "pauses",
        "token_times",
    )

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.admitted_s: float | None = None
        self.num_cached: int | None = None
        self.num_computed = 0
        self.num_known = 0
        """First prompt tokens that somebody had computed when it was admitted, in whole blocks."""
        self.furthest = 0
        """First tokens that have ever been computed, by it or before it."""
        self.pauses: list[tuple[float, float | None]] = []
        self.token_times: array[float] = array("d")

    def record(self, req: Any | None, finish_s: float | None) -> RequestRecord:
        """The record as things stand. `req` is None for a request that never ran."""
        arrival = self.arrival
        reason = None
        if req is not None and finish_s is not None:
            reason = str(req.finished_reason.to_json()["type"])
        return RequestRecord(
            rid=arrival.rid,
            request_class=arrival.request_class,
            arrival_s=arrival.arrival_s,
            num_prompt_tokens=len(arrival.input_ids),
            num_output_tokens=len(self.token_times),
            admitted_s=self.admitted_s,
            first_token_s=self.token_times[0] if self.token_times else None,
            finish_s=finish_s,
            token_times=self.token_times,
            num_cached_tokens=self.num_cached,
            num_lost_tokens=self._num_lost(),
            num_recomputed_tokens=self._num_recomputed(),
            num_preemptions=0 if req is None else port.num_retractions(req),
            pauses=tuple(self.pauses),
            finish_reason=reason,
            ok=reason != "abort",
            slo=arrival.slo,
        )

    def runs(self, time_s: float) -> None:
        """It is in an iteration that begins then."""
        if self.pauses and self.pauses[-1][1] is None:
            self.pauses[-1] = self.pauses[-1][0], time_s

    def computed(self, start: int, end: int) -> int:
        """Its tokens from `start` to `end` have been computed. How many of them not for the first
        time."""
        num_again = max(min(end, self.furthest) - start, 0)
        self.furthest = max(self.furthest, end)
        return num_again

    def _num_lost(self) -> int | None:
        return None if self.num_cached is None else max(self.num_known - self.num_cached, 0)

    def _num_recomputed(self) -> int:
        """Prefill beyond what the prompt took when it was first admitted."""
        first = len(self.arrival.input_ids) - (self.num_cached or 0)
        return max(self.num_computed - first, 0)


class _Computed:
    """All prompts and replies that were ever computed, as hashes of their blocks: what a prefix
    cache without limit would hold."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def add(self, token_ids: array[int]) -> None:
        self._blocks.update(block_hashes(token_ids))

    def num_known(self, token_ids: array[int]) -> int:
        """First tokens of a prompt that are there, in whole blocks; its last token is always
        computed anew."""
        known = takewhile(self._blocks.__contains__, block_hashes(token_ids[:-1]))
        return BLOCK * sum(1 for _ in known)


class _Event(NamedTuple):
    """What SGLang records behind a batch, as it asks for it. done_s: when the device is there."""

    clock: VirtualClock
    done_s: float

    def record(self, *_: Any) -> None:
        """It is made behind the batch."""

    def synchronize(self) -> None:
        """Whoever waits moves the clock himself."""

    def query(self) -> bool:
        """Whether the device is there once the host has done what it is at."""
        return max(self.clock.now_s(), self.clock.ready_s) >= self.done_s


@dataclass(slots=True)
class _Launched:
    """An iteration on the modelled GPU."""

    shape: BatchShape
    start_s: float
    done_s: float


class VirtualEngine:
    """A scheduler, a modelled GPU and a virtual clock.

    `flags` are SGLang's flags; the KV capacity and everything else of the simulated machine is
    among them. Use as a context manager; one per process at a time.

    records     of the requests that ended, in that order
    iterations  one row per forward pass
    kv          who has the KV memory, once a second; empty where cosched does not watch it
    local       the engine underneath, for requests beside the sources'
    """

    def __init__(
        self,
        *,
        flags: Sequence[str],
        cost_model: TimeModel,
        identity: EngineIdentity | None = None,
        host_link: HostLink | None = None,
        prefix_reads: PrefixReads = PrefixReads.EACH,
        host: HostTime | None = None,
    ) -> None:
        """identity: of the simulated engine, for a policy that starts from a profile of it.
        host_link: where the flags give it host memory. prefix_reads: as the cost model has
        them. host: what the host costs; None: nothing."""
        self._host = host or NoHostTime()
        self.clock = VirtualClock(self._host.after_wait_s)
        self.records: list[RequestRecord] = []
        self.iterations = IterationLog()
        self.kv = ColumnLog(KV_COLUMNS)
        self._kv_due_s = 0.0
        self._computed = _Computed()
        self._num_again = dict.fromkeys(RequestClass, 0)
        """Prefill tokens that were not computed for the first time."""
        self.num_finished_offline = 0
        self._cost_model = cost_model
        self._sources: Sequence[Source] = ()
        self._following: dict[str, _Following] = {}
        self._num_prompt_tokens = 0
        """Of the requests under way."""
        free_bytes = psutil.virtual_memory().available
        self._max_prompt_tokens = int(_MEMORY_SHARE * free_bytes / _BYTES_PER_PROMPT_TOKEN)
        self._reqs: dict[str, Any] = {}
        self._num_launched = 0
        self._num_in_flight = 0
        with (
            tempfile.TemporaryDirectory(prefix="cosched-model-") as folder,
            assuming_one_reading(prefix_reads is PrefixReads.ONCE),
        ):
            _write_model_config(Path(folder), identity)
            self.local = LocalEngine(
                [
                    *("--model-path", folder, "--load-format", "dummy"),
                    *("--device", "cpu", "--attention-backend", "torch_native"),
                    *("--dtype", "bfloat16", "--log-level", "error"),
                    # Of the host's memory; the pool's size is given in tokens and tiny in bytes.
                    *("--mem-fraction-static", "0.2"),
                    *flags,
                ]
            )
        self.scheduler = self.local.scheduler
        self._prefixes: RunningPrefixes | None = None
        if prefix_reads is not PrefixReads.EACH:
            self._prefixes = RunningPrefixes.of(self.scheduler)
        controller = getattr(self.scheduler, "cosched", None)
        self._tells_lengths = (
            controller is not None and controller.config.named_length().needs_hints
        )
        """Requests come with their true length as a hint, which nothing else may know."""
        self._transfers: VirtualTransfers | None = None
        if host_link is not None:
            self._use_host(host_link)
        self._take_over()

    def close(self) -> None:
        self.local.close()

    def __enter__(self) -> VirtualEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, sources: Sequence[Source], *, until: Callable[[], bool] | None = None) -> None:
        """Serve the sources until they are done and everything is answered, or `until` says so
        (asked once per iteration).

        RuntimeError when requests wait, nothing runs and nothing more will happen: a hang.
        """
        self._sources = sources
        last_launched = -1
        num_idle = 0

        def until_done() -> bool:
            with self._host.left_out():
                return is_done()

        def is_done() -> bool:
            nonlocal last_launched, num_idle
            if until is not None and until():
                return True
            # Between two iterations: everybody who holds memory is under way.
            self._log_kv(self.clock.now_s())
            delivered = self._deliver()
            has_run = last_launched != self._num_launched or self._num_in_flight > 0
            last_launched = self._num_launched
            if delivered or has_run:
                num_idle = 0
                return False
            num_idle += 1
            if num_idle < _IDLE_ITERATIONS:
                return False
            num_idle = 0
            return not self._skip_idle_time()

        with _quiet_host():
            self.local.run(until_done)

    def open_records(self) -> list[RequestRecord]:
        """Records of the requests that have not ended, in the order of arrival."""
        return [f.record(self._reqs.get(rid), None) for rid, f in self._following.items()]

    def _deliver(self) -> bool:
        now_s = self.clock.now_s()
        delivered = False
        for source in self._sources:
            for arrival in source.due(now_s):
                self._submit(arrival)
                delivered = True
        return delivered

    def _skip_idle_time(self) -> bool:
        """Move the clock to the next thing that happens. False when nothing will."""
        times = [time_s for s in self._sources if (time_s := s.next_s()) is not None]
        if self._transfers is not None and self._following:
            done_s = self._transfers.next_done_s()
            times += [] if done_s is None else [done_s]
        if times:
            self.clock.advance_to(min(times))
            self._deliver()
            return True
        if self._following:
            raise RuntimeError(
                f"the scheduler hangs at {self.clock.now_s():.3f} s: "
                f"{len(self._following)} requests are unanswered and nothing runs"
            )
        return False

    def _use_host(self, link: HostLink) -> None:
        self._transfers = VirtualTransfers(
            clock=self.clock,
            s_per_token=link.s_per_token,
            num_layers=link.num_layers,
            gpu_free_s=lambda: self.clock.device_done_s,
        )
        self.local.replace_transfers(self._transfers)
        controller = getattr(self.scheduler, "cosched", None)
        if controller is not None:
            controller.use_transfer(link.s_per_token)

    def _take_over(self) -> None:
        use_virtual_device(self.scheduler, self.clock, self._cost_model.graph_sizes)
        self.local.replace_forward(self._forward)
        self.local.replace_events(lambda: _Event(self.clock, self.clock.device_done_s))
        self.local.watch_stops(self._on_stop)

        def launch_when_ready(batch: Any, *args: Any) -> Any:
            if controller is None:
                self._is_built(batch)
            self.clock.advance_to(self.clock.ready_s)
            return launch(batch, *args)

        launch = self.local.replace_launch(launch_when_ready)
        controller = getattr(self.scheduler, "cosched", None)
        if controller is not None:
            note_launch = controller.launched

            def when_built(batch: Any | None, running_batch: Any) -> Any:
                """Before it asks whether the device has run dry."""
                if batch is not None:
                    self._is_built(batch)
                return note_launch(batch, running_batch)

            controller.launched = when_built

        def process_when_done(batch: Any, result: Any) -> None:
            launched: _Launched = result.virtual
            self._num_in_flight -= 1
            self.clock.advance_to(launched.done_s)
            with self._host.left_out():
                before = [len(req.output_ids) for req in batch.reqs]
                self._log_iteration(batch, launched, result.cosched)
                load = self._load(len(batch.reqs), len(launched.shape.prefills))
            process(batch, result)
            self.clock.advance_to(self.clock.now_s() + self._host.result_s(load))
            with self._host.left_out():
                self._record(batch, before, launched)

        process = self.local.replace_processing(process_when_done)

    def _is_built(self, batch: Any) -> None:
        """The batch is about to be launched."""
        load = self._load(port.num_slots_taken(self.scheduler), port.num_prefills(batch))
        self.clock.launches_in(self._host.launch_s(load))

    def _load(self, num_running: int, num_prefills: int) -> Load:
        return Load(
            num_running=num_running,
            num_prefills=num_prefills,
            num_waiting=len(self.scheduler.waiting_queue),
        )

    def _check_memory(self) -> None:
        """ConfigError when the requests under way would not fit into host memory."""
        if self._num_prompt_tokens > self._max_prompt_tokens:
            raise ConfigError(
                f"{len(self._following):,} requests with {self._num_prompt_tokens:,} prompt tokens "
                f"are unanswered after {self.clock.now_s():.3g} s of virtual time, and this "
                f"machine's memory holds {self._max_prompt_tokens:,} tokens: lower the rate, the "
                "number of offline requests or the duration"
            )

    def _submit(self, arrival: Arrival) -> None:
        assert arrival.rid not in self._following, f"rid used twice: {arrival.rid}"
        self._following[arrival.rid] = _Following(arrival)
        self._num_prompt_tokens += len(arrival.input_ids)
        self._check_memory()
        offline = arrival.request_class is RequestClass.OFFLINE
        params: dict[str, float] = dict(params_of_slo(arrival.slo))
        if self._tells_lengths:
            params[HINT_KEY] = arrival.num_output_tokens
        self.local.submit(
            arrival.rid,
            arrival.input_ids,
            max_new_tokens=arrival.max_new_tokens,
            priority=OFFLINE_PRIORITY if offline else 0,
            custom_params={PARAMS_KEY: params} if params else None,
            ignore_eos=False,
            stream=False,
            created_s=arrival.arrival_s,
        )

    def _on_stop(self, rid: str) -> None:
        following = self._following.get(rid)
        if following is not None:
            following.pauses.append((self.clock.now_s(), None))

    def _forward(self, batch: Any, **options: Any) -> Any:
        """Takes the place of the model worker's forward: no computation, modelled time."""
        with self._host.left_out():
            return self._modelled(batch)

    def _modelled(self, batch: Any) -> Any:
        shape = port.shape_of(batch)
        if self._prefixes is not None:
            shape = with_repeated(shape, batch, self._prefixes)
        start_s = max(self.clock.now_s(), self.clock.device_done_s)
        seconds = self._cost_model.iteration_s(shape)
        if shape.num_loaded and self._transfers is not None:
            seconds = self._transfers.iteration_s(start_s, seconds)
        self.clock.device_done_s = start_s + seconds
        self._num_launched += 1
        result = made_up(self._tokens(batch))
        result.virtual = _Launched(shape, start_s, self.clock.device_done_s)
        self._num_in_flight += 1
        for req in batch.reqs:
            following = self._following.get(req.rid)
            if following is None:
                continue
            following.runs(start_s)
            if following.admitted_s is None:
                following.admitted_s = start_s
                known = self._computed.num_known(following.arrival.input_ids)
                following.num_known = following.furthest = known
                self._reqs[req.rid] = req
        return result

    def _tokens(self, batch: Any) -> list[int]:
        """The next token of each request: the reply's own where the arrival gives it, else a
        function of the length; EOS at its end.

        Equal prompts get equal outputs, as greedy decoding would give them.
        """
        tokens = []
        for req, length in zip(batch.reqs, lengths_of(batch), strict=True):
            num_output = length - len(req.origin_input_ids) + 1
            following = self._following.get(req.rid)
            if following is None or num_output >= following.arrival.num_output_tokens:
                tokens.append(EOS_ID)
            elif 0 < num_output <= len(following.arrival.output_ids):
                tokens.append(following.arrival.output_ids[num_output - 1])
            else:
                tokens.append(_FIRST_ID + length % (VOCAB_SIZE - _FIRST_ID))
        return tokens

    def _record(self, batch: Any, before: list[int], launched: _Launched) -> None:
        now_s = self.clock.now_s()
        for req, prefill in zip(batch.reqs, launched.shape.prefills, strict=False):
            following = self._following.get(req.rid)
            if following is None:
                continue
            following.num_computed += prefill.num_new
            end = prefill.num_cached + prefill.num_new
            num_again = following.computed(prefill.num_cached, end)
            self._num_again[following.arrival.request_class] += num_again
            if following.num_cached is None:
                following.num_cached = prefill.num_cached
        for req, num_before in zip(batch.reqs, before, strict=True):
            following = self._following.get(req.rid)
            if following is None:
                continue  # it ended while this iteration was already on its way
            if len(req.output_ids) > num_before:
                if not following.token_times:
                    self._computed.add(following.arrival.input_ids)
                following.token_times.append(now_s)
                # The newest token has no KV yet.
                num_done = len(following.arrival.input_ids) + len(following.token_times) - 1
                following.furthest = max(following.furthest, num_done)
            if req.finished():
                self._computed.add(port.token_ids(req)[:-1])
                del self._following[req.rid], self._reqs[req.rid]
                self._num_prompt_tokens -= len(following.arrival.input_ids)
                record = following.record(req, now_s)
                self.records.append(record)
                self.num_finished_offline += record.request_class is RequestClass.OFFLINE
                for source in self._sources:
                    source.on_finish(record)

    def _log_kv(self, now_s: float) -> None:
        controller = getattr(self.scheduler, "cosched", None)
        if controller is None or controller.kv is None or now_s < self._kv_due_s:
            return
        self._kv_due_s = now_s + KV_PERIOD_S
        occupancy = controller.kv.occupancy()
        tokens = (getattr(occupancy, name) for name in _KV_FIELDS)
        on_host = (getattr(occupancy.host, name, 0) for name in _HOST_FIELDS)
        self.kv.append((now_s, *self._num_again.values(), *tokens, *on_host))

    def _log_iteration(self, batch: Any, launched: _Launched, iteration: Iteration) -> None:
        shape = launched.shape
        scheduler = self.scheduler
        counts = {RequestClass.ONLINE: [0, 0, 0, 0], RequestClass.OFFLINE: [0, 0, 0, 0]}
        num_prefills = len(shape.prefills)
        for index, req in enumerate(batch.reqs):
            count = counts[class_of_priority(req.priority)]
            if index < num_prefills:
                count[0] += shape.prefills[index].num_new
                count[1] += 1
            else:
                count[2] += 1
            count[3] += port.num_committed(req)
        in_batch = {req.rid for req in batch.reqs}
        for req in port.in_flight(scheduler):  # those that sit this one out hold theirs too
            if req.rid not in in_batch:
                counts[class_of_priority(req.priority)][3] += port.num_committed(req)
        on, off = counts[RequestClass.ONLINE], counts[RequestClass.OFFLINE]
        free = port.kv_free(scheduler)
        cached = port.kv_evictable(scheduler)
        held = port.kv_total(scheduler) - free - cached
        held_online = min(on[3], held)
        self.iterations.append(
            IterationRecord(
                start_s=launched.start_s,
                duration_s=launched.done_s - launched.start_s,
                predicted_s=iteration.predicted_s,
                planning_s=iteration.planning_s,
                num_online_prefill_tokens=on[0],
                num_offline_prefill_tokens=off[0],
                num_online_prefills=on[1],
                num_offline_prefills=off[1],
                num_online_decodes=on[2],
                num_offline_decodes=off[2],
                kv_online_tokens=held_online,
                kv_offline_tokens=held - held_online,
                kv_cached_tokens=cached,
                kv_free_tokens=free,
            )
        )


@contextlib.contextmanager
def _quiet_host() -> Iterator[None]:
    """Keep torch's threads and the garbage collector out of a loop of many tiny operations: what
    was allocated before it is not looked at again, and collections within it are rare.

    A process that froze its objects itself is left with them: frozen anew after each run, all that
    SGLang imports would be looked at each time.
    """
    num_threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    freezes = not _is_frozen()
    if freezes:
        gc.collect()
        gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if freezes:
            gc.unfreeze()
        torch.set_num_threads(num_threads)


_was_frozen = False


def _is_frozen() -> bool:
    """Whether the process froze objects itself. Counting them is the slower the more there are, so
    that it is asked only until there are some."""
    global _was_frozen
    _was_frozen = _was_frozen or gc.get_freeze_count() > 0
    return _was_frozen


def _write_model_config(folder: Path, identity: EngineIdentity | None) -> None:
    """A one-layer model without weights (SGLang fills them with ``--load-format dummy``)."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    if identity is not None:
        config[STANDS_FOR] = asdict(identity)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
