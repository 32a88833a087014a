"""SGLang's scheduler under a virtual clock: the code of production, without a GPU.

`VirtualEngine` builds a `LocalEngine` on a model of one tiny layer whose KV pool has the capacity
of the simulated GPU, and replaces the model worker's forward: a cost model says how long it takes,
and the clock moves by that. A `HostTime` says what host time is part of virtual time.

With the overlap scheduler, iteration *n+1* is planned from the results of *n-1* while *n* occupies
the simulated GPU; waiting for a result moves the clock to its end. The clock is the host's: it
advances by host time before a launch and after a result was processed; the device is idle from
`device_done_s` to the next launch.
"""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # before anything of SGLang's

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from cosched.core.batch import BatchShape
from cosched.core.request import RequestClass
from cosched.engine import port
from cosched.engine.attach import use_virtual_device
from cosched.engine.port.prefixes import RunningPrefixes, with_repeated
from cosched.engine.port.read_once import assuming_one_reading
from cosched.engine.read_state import chat_state
from cosched.lab.cost_models.cost_model import PrefixReads
from cosched.lab.cost_models.overheads import Launches
from cosched.lab.local_engine import LocalEngine, lengths_of, made_up, made_up_drafts
from cosched.lab.metrics.records import ColumnLog, IterationLog, RequestRecord
from cosched.lab.simulation.arrivals import VOCAB_SIZE, Arrival, Source
from cosched.lab.simulation.clock import VirtualClock, VirtualEvent, quiet_host
from cosched.lab.simulation.drafts import NO_DRAFTS, Acceptance, verified_s
from cosched.lab.simulation.host_time import HostTime, Load, NoHostTime
from cosched.lab.simulation.logs import KV_COLUMNS, KV_PERIOD_S, iteration_row, kv_row
from cosched.lab.simulation.ranks import ALONE, Ranks
from cosched.lab.simulation.request_state import (
    ComputedPrefixes,
    RequestState,
    custom_params,
    too_many_open,
)
from cosched.lab.simulation.tiny_model import EOS_ID, draft_model_flags, write_model_config
from cosched.lab.simulation.virtual_host import HostLink, VirtualTransfers
from cosched.lab.simulation.windows import seen_through
from cosched.predict.fitted import GraphSizes
from cosched.predict.profile_file import EngineIdentity
from cosched.wire import OFFLINE_PRIORITY

_BYTES_PER_PROMPT_TOKEN = 30
"""Host memory of an unfinished request, here and in SGLang's queues."""

_MEMORY_SHARE = 0.8
"""Share of the free host memory that unfinished requests may take."""

_FIRST_ID = 10

_IDLE_ITERATIONS = 3
"""Before the scheduler counts as idle: after a running batch SGLang has one without a batch."""


class TimeModel(Protocol):
    """The simulated GPU. graph_sizes: sizes of its CUDA graphs; None: it has none."""

    @property
    def graph_sizes(self) -> GraphSizes | None: ...

    def iteration_s(self, batch: BatchShape) -> float: ...


@dataclass(slots=True)
class _Launched:
    """An iteration on the simulated GPU."""

    shape: BatchShape
    start_s: float
    done_s: float


class VirtualEngine:
    """A scheduler, a simulated GPU and a virtual clock. A context manager; one per process at a
    time. SGLang's `flags` describe the simulated machine.

    records     of the requests that ended, in that order
    iterations  one row per forward pass
    kv          KV memory by use, once a second; empty if cosched does not manage it
    saturation  `ChatState.saturation` once a second, once it is known
    local       the engine underneath, for requests that no source sends
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
        launches: Launches | None = None,
        acceptance: Acceptance = NO_DRAFTS,
        window: tuple[int, float] = (0, 0.0),
        ranks: Ranks = ALONE,
    ) -> None:
        """identity: of the simulated engine, for a policy that starts from a profile of it.
        host_link: if the flags give it host memory. prefix_reads: the cost model's. host:
        None: the host takes no time. launches: None: they take no time. acceptance: of drafted
        tokens, if the flags ask for speculative decoding. window: of sliding windows, the tokens
        (0: there are none) and the share of the layers. ranks: that step together, of which this
        process is one."""
        self._host = host or NoHostTime()
        self._launches = launches or Launches()
        self.clock = VirtualClock(self._host.after_wait_s)
        self.records: list[RequestRecord] = []
        self.iterations = IterationLog()
        self.kv = ColumnLog(KV_COLUMNS)
        self.saturation: list[float] = []
        self._kv_due_s = 0.0
        self._computed = ComputedPrefixes()
        self._num_again = dict.fromkeys(RequestClass, 0)
        """Prefill tokens that had been computed before."""
        self.num_finished_offline = 0
        self._cost_model = cost_model
        self._acceptance = acceptance
        self._window = window
        self._ranks = ranks
        self._ended: list[RequestRecord] = []
        """Of this rank, not in `records` yet."""
        self._num_open = 0
        """Unfinished requests of all ranks."""
        self._sources: Sequence[Source] = ()
        self._following: dict[str, RequestState] = {}
        self._num_prompt_tokens = 0
        """Of the unfinished requests."""
        free_bytes = psutil.virtual_memory().available
        most_bytes = _MEMORY_SHARE * free_bytes / ranks.number
        self._max_prompt_tokens = int(most_bytes / _BYTES_PER_PROMPT_TOKEN)
        self._reqs: dict[str, Any] = {}
        self._num_launched = 0
        self._num_in_flight = 0
        with (
            tempfile.TemporaryDirectory(prefix="cosched-model-") as folder,
            assuming_one_reading(prefix_reads is PrefixReads.ONCE),
        ):
            write_model_config(Path(folder), identity, flags, window_tokens=window[0])
            self.local = LocalEngine(
                [
                    *("--model-path", folder, "--load-format", "dummy"),
                    *("--device", "cpu", "--attention-backend", "torch_native"),
                    *("--dtype", "bfloat16", "--log-level", "error"),
                    # Of host memory; the size of the pool is given in tokens and small in bytes.
                    *("--mem-fraction-static", "0.2"),
                    *flags,
                    *draft_model_flags(folder, flags),
                    *ranks.flags(),
                ],
                rank=ranks.rank,
                dp_rank=ranks.rank if ranks.number > 1 else None,
            )
        ranks.join(self.local)
        self.scheduler = self.local.scheduler
        self._prefixes: RunningPrefixes | None = None
        if prefix_reads is not PrefixReads.EACH:
            self._prefixes = RunningPrefixes.of(self.scheduler)
        self._controller = getattr(self.scheduler, "cosched", None)
        self._tells_lengths = (
            self._controller is not None and self._controller.config.named_length().needs_hints
        )
        """Requests carry their true length as a hint."""
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
        """Serve the sources until all requests are answered, or until `until` (called once per
        iteration) is true. RuntimeError if requests wait, nothing runs and no event is left: a
        hang."""
        self._sources = sources
        last_launched = -1
        num_idle = 0

        def until_done() -> bool:
            with self._host.left_out():
                return is_done()

        def is_done() -> bool:
            nonlocal last_launched, num_idle
            self._hear_ended()
            if until is not None and until():
                return True
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

        with quiet_host():
            self.local.run(until_done)
        self._hear_ended()

    def open_records(self) -> list[RequestRecord]:
        """Records of the requests that have not ended, in the order of arrival at each rank."""
        own = [f.record(self._reqs.get(rid), None) for rid, f in self._following.items()]
        return self._ranks.gather(own)

    def abort(self, rid: str) -> None:
        """Its client wants no answer any more. It leaves no record."""
        self.local.abort(rid)
        state = self._following.pop(rid, None)
        self._reqs.pop(rid, None)
        if state is not None:
            self._num_prompt_tokens -= len(state.arrival.input_ids)

    def _hear_ended(self) -> None:
        """Requests have ended, on all ranks."""
        own, self._ended = self._ended, []
        now_s, ended, self._num_open = self._ranks.agree(
            self.clock.now_s(), own, len(self._following)
        )
        self.clock.advance_to(now_s)
        for record in ended:
            self.records.append(record)
            self.num_finished_offline += record.request_class is RequestClass.OFFLINE
            for source in self._sources:
                source.on_finish(record)

    def _deliver(self) -> bool:
        now_s = self.clock.now_s()
        delivered = False
        for source in self._sources:
            for arrival in source.due(now_s):
                if self._ranks.takes_next():
                    self._submit(arrival)
                delivered = True
        return delivered

    def _skip_idle_time(self) -> bool:
        """Move the clock to the next event; False without one."""
        times = [time_s for s in self._sources if (time_s := s.next_s()) is not None]
        if self._transfers is not None and self._following:
            done_s = self._transfers.next_done_s()
            times += [] if done_s is None else [done_s]
        if times:
            self.clock.advance_to(min(times))
            self._deliver()
            return True
        if self._num_open:
            raise RuntimeError(
                f"the scheduler hangs at {self.clock.now_s():.3f} s: "
                f"{self._num_open} requests are unanswered and nothing runs"
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
        if self._controller is not None:
            self._controller.use_transfer(link.s_per_token)

    def _take_over(self) -> None:
        use_virtual_device(
            self.scheduler,
            self.clock,
            self._cost_model.graph_sizes,
            prefills_wait=self._launches.prefills_wait,
        )
        self.local.replace_forward(self._forward)
        self.local.replace_events(lambda: VirtualEvent(self.clock, self.clock.device_done_s))
        self.local.watch_stops(self._on_stop)

        def launch_when_ready(batch: Any, *args: Any) -> Any:
            if controller is None:
                self._before_launch(batch)
            self.clock.advance_to(self.clock.ready_s)
            return launch(batch, *args)

        launch = self.local.replace_launch(launch_when_ready)
        controller = self._controller
        if controller is not None:
            note_launch = controller.launched

            def when_built(batch: Any | None, running_batch: Any) -> Any:
                """Before the controller asks whether the device is idle."""
                if batch is not None:
                    self._before_launch(batch)
                return note_launch(batch, running_batch)

            controller.launched = when_built

        def process_when_done(batch: Any, result: Any) -> None:
            launched: _Launched = result.virtual
            self._num_in_flight -= 1
            self.clock.advance_to(launched.done_s)
            with self._host.left_out():
                before = [len(req.output_ids) for req in batch.reqs]
                self.iterations.append(
                    iteration_row(
                        self.scheduler,
                        batch,
                        launched.shape,
                        self.scheduler.cosched_observer.finishing(batch),
                        start_s=launched.start_s,
                        done_s=launched.done_s,
                    )
                )
                load = self._load(len(batch.reqs), len(launched.shape.prefills))
            process(batch, result)
            self.clock.advance_to(self.clock.now_s() + self._host.result_s(load))
            with self._host.left_out():
                self._record(batch, before, launched)

        process = self.local.replace_processing(process_when_done)

    def _before_launch(self, batch: Any) -> None:
        """A batch will be launched next."""
        load = self._load(port.num_slots_taken(self.scheduler), port.num_prefills(batch))
        self.clock.launches_in(self._host.launch_s(load))

    def _load(self, num_running: int, num_prefills: int) -> Load:
        return Load(
            num_running=num_running,
            num_prefills=num_prefills,
            num_waiting=len(self.scheduler.waiting_queue),
        )

    def _submit(self, arrival: Arrival) -> None:
        assert arrival.rid not in self._following, f"rid used twice: {arrival.rid}"
        self._following[arrival.rid] = RequestState(arrival)
        self._num_prompt_tokens += len(arrival.input_ids)
        if self._num_prompt_tokens > self._max_prompt_tokens:
            raise too_many_open(
                len(self._following),
                self._num_prompt_tokens,
                self._max_prompt_tokens,
                now_s=self.clock.now_s(),
            )
        offline = arrival.request_class is RequestClass.OFFLINE
        self.local.submit(
            arrival.rid,
            arrival.input_ids,
            max_new_tokens=arrival.max_new_tokens,
            priority=OFFLINE_PRIORITY if offline else arrival.priority,
            custom_params=custom_params(arrival, tells_length=self._tells_lengths),
            ignore_eos=False,
            stream=False,
            created_s=arrival.arrival_s,
            media=arrival.media,
        )

    def _on_stop(self, rid: str) -> None:
        following = self._following.get(rid)
        if following is not None:
            following.pauses.append((self.clock.now_s(), None))

    def _forward(self, batch: Any, **options: Any) -> Any:
        """In place of the model worker's forward: no computation, simulated time."""
        with self._host.left_out():
            return self._modelled(batch)

    def _modelled(self, batch: Any) -> Any:
        shape, seconds = BatchShape(), 0.0
        start_s = max(self.clock.now_s(), self.clock.device_done_s)
        if port.runs_model(batch):  # else other ranks compute
            shape = port.shape_of(batch)
            if shape.encoded:
                self.local.keep_encodings(batch)
            start_s, returned_s = self._launches.launch(
                shape, now_s=self.clock.now_s(), device_done_s=self.clock.device_done_s
            )
            if self._prefixes is not None:
                shape = with_repeated(shape, batch, self._prefixes)
            seen = seen_through(shape, self._window)
            seconds = verified_s(seen, self._cost_model.iteration_s)
            seconds = max(seconds, returned_s - start_s)
            self.clock.advance_to(returned_s)
        if shape.num_loaded and self._transfers is not None:
            seconds = self._transfers.iteration_s(start_s, seconds)
        start_s, seconds = self._ranks.step(start_s, seconds)
        self.clock.device_done_s = start_s + seconds
        self._num_launched += 1
        if port.speculates(batch):
            result = made_up_drafts(batch, self._verified(batch, shape.num_drafts))
        else:
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
        """The next token of each request: that of `Arrival.output_ids` if given, else a function of
        the length, so that equal prompts get equal outputs; EOS at its end."""
        return [
            self._token(req, length)
            for req, length in zip(batch.reqs, lengths_of(batch), strict=True)
        ]

    def _token(self, req: Any, length: int) -> int:
        """The token behind the first `length` ones of a request."""
        num_output = length - len(req.origin_input_ids) + 1
        following = self._following.get(req.rid)
        if following is None or num_output >= following.arrival.num_output_tokens:
            return EOS_ID
        if 0 < num_output <= len(following.arrival.output_ids):
            return following.arrival.output_ids[num_output - 1]
        return _FIRST_ID + length % (VOCAB_SIZE - _FIRST_ID)

    def _verified(self, batch: Any, num_drafts: int) -> list[list[int]]:
        """The new tokens of each request. `num_drafts`: 0 with prefills in the batch."""
        if port.num_prefills(batch):
            return [[token] for token in self._tokens(batch)]
        tokens = []
        for req in batch.reqs:
            length = port.num_committed(req) + 1
            num_output = len(req.output_ids)
            number = self._acceptance.num_generated(req.rid, num_output, num_drafts=num_drafts)
            tokens.append([self._token(req, length + place) for place in range(number)])
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
                continue  # it ended while this iteration was running
            if len(req.output_ids) > num_before:
                if not following.token_times:
                    self._computed.add(following.arrival.input_ids)
                num_new = len(req.output_ids) - num_before
                following.token_times.extend([now_s] * num_new)
                # The newest token has no KV yet.
                num_done = len(following.arrival.input_ids) + len(following.token_times) - 1
                following.furthest = max(following.furthest, num_done)
            if req.finished():
                self._computed.add(port.token_ids(req)[:-1])
                del self._following[req.rid], self._reqs[req.rid]
                self._num_prompt_tokens -= len(following.arrival.input_ids)
                self._ended.append(following.record(req, now_s))

    def _log_kv(self, now_s: float) -> None:
        controller = self._controller
        if controller is None or now_s < self._kv_due_s:
            return
        self._kv_due_s = now_s + KV_PERIOD_S
        if (chat := chat_state(controller)) is not None:
            self.saturation.append(chat.saturation)
        if controller.kv is None:
            return
        row = kv_row(controller.kv.occupancy())
        self.kv.append((now_s, *self._num_again.values(), *row))
