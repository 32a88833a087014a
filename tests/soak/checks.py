"""What must hold while a scheduler runs, whatever it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from cosched.core.request import RequestClass
from cosched.core.view import Decodes
from cosched.engine.running import own_tokens
from cosched.engine.waiting import WaitingQueue
from cosched.lab.local_engine import Reply
from cosched.pool.prefix_pool import PrefixPool
from cosched.wire import class_of_priority
from tests.engine.conftest import view_now
from tests.factories import outlook_of, progress_of
from tests.pool.integrity import check_pool
from tests.soak.engine import SoakEngine
from tests.soak.traffic import Ask

DEEP_EVERY, VIEW_EVERY = 50, 7
"""Iterations between two checks that walk everything, and that compute a view anew."""
PATIENCE = 200
"""Iterations that a request may make no progress though it could."""
LOST = 6
"""Iterations that a request may be nowhere: just received, or its last result on the way."""


class SoakFailure(AssertionError):
    """A check failed; `check` is its name."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"[{check}] {message}")
        self.check = check


class Checks:
    """Looks at a scheduler between iterations. SGLang's own memory checks run besides."""

    def __init__(self, engine: SoakEngine) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._count = 0
        self._last_launched = -1
        self._progress: dict[str, object] = {}
        self._stuck: Counter[str] = Counter()
        self._nowhere: Counter[str] = Counter()
        self._num_sent = self._num_ended = 0
        self.moments: dict[str, str] = {}
        """Of each request that is somewhere: waiting, prefilling, decoding, held, preempted."""

    def sent(self, ask: Ask) -> None:
        self._num_sent += 1

    def each_iteration(self, asks: Mapping[str, Ask]) -> None:
        """asks: those under way."""
        waiting = {req.rid: req for req in self._scheduler.waiting_queue}
        running = self._running()
        self._moments(waiting, running)
        if self._engine.num_launched == self._last_launched or self._engine.is_paused:
            return
        self._last_launched = self._engine.num_launched
        self._count += 1
        for rid in asks:
            if rid in self.moments or rid in self._in_grammar():
                self._nowhere.pop(rid, None)
                continue
            self._nowhere[rid] += 1
            if self._nowhere[rid] > LOST:
                raise SoakFailure("lost", f"{rid} neither waits nor runs and has not ended")
        both = waiting.keys() & {rid for rid, req in running.items() if not req.finished()}
        if both:
            raise SoakFailure("queues", f"{min(both)} waits and runs")
        self._check_rows(running)
        self._check_progress(asks, waiting, running)
        if self._count % DEEP_EVERY == 0:
            self._check_queues(waiting)
        if self._count % VIEW_EVERY == 0 and self._engine.controller is not None:
            check_view(view_now(self._scheduler), asks)

    def ended(self, ask: Ask, reply: Reply) -> None:
        """A request ended: it got what it asked for."""
        self._num_ended += 1
        for counts in (self._stuck, self._nowhere):
            counts.pop(ask.rid, None)
        self._progress.pop(ask.rid, None)
        most = ask.sampling["max_new_tokens"]
        # Keeping a request from ending takes probabilities; without a model there are none.
        least = ask.sampling.get("min_new_tokens", 0) if self._engine.spec.compute else 0
        got = len(reply.output_ids)
        if "beam_width" in ask.sampling:
            return
        wrong = None
        room = self._scheduler.max_req_len - len(ask.tokens) - 1
        if reply.finish_reason == "length":
            # SGLang's own reading: 0 means that one token is computed and none returned, or one.
            if got != min(most, room) and most > 0 and ask.session is None:
                wrong = f"{got} of {min(most, room)} tokens, ended by length"
        elif reply.finish_reason == "stop":
            if not least <= got <= most:
                wrong = f"{got} tokens, ended by stop, {least=} {most=}"
            stops = ask.sampling.get("stop_token_ids")
            if stops and "regex" not in ask.sampling and reply.output_ids[-1] not in stops:
                eos = self._scheduler.model_config.hf_eos_token_id or ()
                if reply.output_ids[-1] not in eos:
                    wrong = f"ended by stop at {reply.output_ids[-1]}"
        elif got > most > 0:
            wrong = f"{got} tokens, {most=}, ended by {reply.finish_reason}"
        if ask.logprob_start is not None and reply.finish_reason != "abort":
            num_logprobs = self._engine.ears.num_output_logprobs[ask.rid]
            # Of no token asked for SGLang computes one, with its log probability.
            if num_logprobs != got and (num_logprobs, most) != (1, 0):
                wrong = f"{num_logprobs} log probabilities of {got} tokens"
            if ask.logprob_start >= 0:
                num_of_prompt = self._engine.ears.num_input_logprobs[ask.rid]
                if num_of_prompt != len(ask.tokens) - ask.logprob_start:
                    wrong = (
                        f"{num_of_prompt} log probabilities of the {len(ask.tokens)} prompt "
                        f"tokens from {ask.logprob_start}"
                    )
        if wrong is not None:
            raise SoakFailure("reply", f"{ask.rid}: {wrong}; {ask}")

    def drained(self) -> None:
        """Nothing waits or runs: nothing may be held."""
        scheduler = self._scheduler
        if len(scheduler.waiting_queue) or not scheduler.is_fully_idle():
            return  # an iteration that was under way when the last reply came out
        sessions = scheduler.pool_stats_observer.session_held_req_count()
        rows = scheduler.req_to_token_pool
        if rows.available_size() + sessions != rows.size:
            raise SoakFailure(
                "rows", f"{rows.available_size()} of {rows.size} rows free, {sessions=}, when idle"
            )
        free = scheduler.token_to_kv_pool_allocator.available_size()
        cached = scheduler.tree_cache.evictable_size()
        in_sessions = scheduler.pool_stats_observer.session_held_tokens()
        total = scheduler.max_total_num_tokens
        if free + cached + in_sessions != total and not sessions:
            raise SoakFailure("tokens", f"{free=} {cached=} {in_sessions=} of {total=}, when idle")
        self._check_queues({})
        if self._num_sent != self._num_ended:
            raise SoakFailure("answers", f"{self._num_sent} sent, {self._num_ended} ended")

    def where(self, asks: Mapping[str, Ask]) -> str:
        shown = [f"{rid} {self.moments.get(rid, 'nowhere')}" for rid in asks]
        return ", ".join(shown[:10])

    def _running(self) -> dict[str, Any]:
        scheduler = self._scheduler
        batches = (scheduler.running_batch, scheduler.last_batch)
        reqs = {req.rid: req for batch in batches if batch is not None for req in batch.reqs}
        if scheduler.chunked_req is not None:
            reqs[scheduler.chunked_req.rid] = scheduler.chunked_req
        return reqs

    def _moments(self, waiting: Mapping[str, Any], running: Mapping[str, Any]) -> None:
        held = self._engine.held()
        chunked = self._scheduler.chunked_req
        self.moments = {}
        for rid, req in waiting.items():
            self.moments[rid] = "preempted" if req.retraction_count else "waiting"
        for rid, req in running.items():
            if req is chunked or not req.output_ids:
                self.moments[rid] = "prefilling"
            else:
                self.moments[rid] = "held" if rid in held else "decoding"

    def _in_grammar(self) -> set[str]:
        return {req.rid for req in self._scheduler.grammar_manager.grammar_queue}

    def _check_rows(self, running: Mapping[str, Any]) -> None:
        """Every row is free, of one request, or of a session."""
        scheduler = self._scheduler
        rows = scheduler.req_to_token_pool
        held = [
            req.kv.req_pool_idx
            for req in running.values()
            if req.kv.holds_kv and req.kv.req_pool_idx is not None
        ]
        if len(set(held)) != len(held) or set(held) & set(rows.free_slots):
            raise SoakFailure("rows", f"a row has two owners: {sorted(held)=} {rows.free_slots=}")
        if scheduler.result_queue if self._engine.spec.overlap else ():
            return  # a request that just ended may still hold its row
        if any(req.beam_group is not None for req in running.values()):
            return  # members of a group hold rows of their own
        sessions = scheduler.pool_stats_observer.session_held_req_count()
        if not sessions and len(held) + rows.available_size() != rows.size:
            raise SoakFailure(
                "rows", f"{len(held)} held, {rows.available_size()} free of {rows.size}"
            )

    def _check_progress(
        self, asks: Mapping[str, Ask], waiting: Mapping[str, Any], running: Mapping[str, Any]
    ) -> None:
        online_live = any(not ask.offline for ask in asks.values())
        num_free_rows = self._scheduler.req_to_token_pool.available_size()
        free = (
            self._scheduler.token_to_kv_pool_allocator.available_size()
            + self._scheduler.tree_cache.evictable_size()
        )
        unfinished = [req for req in running.values() if not req.finished()]
        promised = sum(
            _page_up(_to_come(req) + 1, self._engine.spec.page_size) for req in unfinished
        )
        moved = False
        stuck = []
        for rid, ask in asks.items():
            req = running.get(rid) or waiting.get(rid)
            if req is None:
                continue
            state = (rid in running, len(req.output_ids), req.kv.kv_committed_len)
            if self._progress.get(rid) != state:
                self._progress[rid] = state
                self._stuck.pop(rid, None)
                moved = moved or (rid in running and not req.output_ids)
            elif not ask.offline or not online_live:
                if rid not in running:
                    need = _page_up(req.seqlen + _to_come(req) + 1, self._engine.spec.page_size)
                    if num_free_rows < 1 or (free < need + promised and unfinished):
                        continue
                stuck.append(rid)
        for rid in stuck:
            if moved and rid in waiting:
                self._stuck.pop(rid, None)  # others are admitted or prefilled: its turn will come
                continue
            self._stuck[rid] += 1
            if self._stuck[rid] > PATIENCE:
                raise SoakFailure(
                    "starved",
                    f"{rid} ({self.moments[rid]}) got nothing in {PATIENCE} iterations in which it "
                    f"could run; under way: {self.where(asks)}",
                )

    def _check_queues(self, waiting: Mapping[str, Any]) -> None:
        queue = self._scheduler.waiting_queue
        if not isinstance(queue, WaitingQueue):
            return
        if len(queue.online) + len(queue.offline) != len(queue) or len(queue) != len(waiting):
            raise SoakFailure("queues", f"{len(queue.online)=} {len(queue.offline)=} {len(queue)=}")
        tokens = sum(req.cosched.num_queued_tokens for req in waiting.values())
        if queue.num_tokens != tokens:
            raise SoakFailure("queues", f"{queue.num_tokens=}, in truth {tokens}")
        for rid, req in waiting.items():
            if req.kv.holds_kv and not (req.session and req.session.streaming):
                raise SoakFailure("queues", f"{rid} waits and holds KV")
            is_offline = rid in queue.offline
            if is_offline != (class_of_priority(req.priority).value == "offline"):
                raise SoakFailure("queues", f"{rid} waits in the queue of the other class")
        if isinstance(queue.offline, PrefixPool):
            check_pool(queue.offline)


def check_view(view: Any, rids: Iterable[str]) -> None:
    """What is kept from plan to plan equals what is computed from each request."""
    kept, asked = view.outlook(), outlook_of(view)
    assert kept.held.tolist() == asked.held
    kept_ends, asked_ends = (
        [[n for n in of if n > 0] or [1] for of in zip(*ends, strict=True)]
        for ends in (kept.ends.tolist(), asked.ends)
    )
    assert kept_ends == asked_ends
    assert view.progress() == progress_of(view)
    running = {request.rid: request for request in view.running}
    assert view.running_named({*rids, *running, "unknown"}) == running
    own = own_tokens([*view.running, *view.unfinished])
    assert (view.kv.online, view.kv.offline) == tuple(own[c] for c in RequestClass)
    for request_class in RequestClass:
        requests = [r for r in view.running if r.request_class is request_class]
        pairs = zip(view.running_of(request_class), Decodes.of(requests), strict=True)
        assert all([*kept] == [*asked] for kept, asked in pairs)
        longest = max((view.length(r).upper for r in requests), default=0)
        assert view.longest_left(request_class) == longest


def _to_come(req: Any) -> int:
    return max(int(req.sampling_params.max_new_tokens) - len(req.output_ids), 0)


def _page_up(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size
