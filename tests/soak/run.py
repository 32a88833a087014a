"""A soak: clients, engine and checks together."""

from __future__ import annotations

import heapq
import itertools
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from cosched.lab.simulation.clock import quiet_host
from tests.adapters import make_adapters, without_pinned_memory
from tests.soak.checks import Checks, SoakFailure
from tests.soak.engine import SoakEngine
from tests.soak.spec import EPISODES_PER_HOUR, SoakSpec
from tests.soak.traffic import ADAPTERS, Action, Ask, Client, Command, Post, Send, Sleep, Traffic

_IDLE_ITERATIONS = 3
_TICK_S = 0.005
_MAX_IDLE_TICKS = 1_000
"""How long nothing may run while requests wait: 5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a soak.

    failure    None: it went well; else what broke and in which episode
    counts     what happened, for the judgement whether enough did
    """

    spec: SoakSpec
    failure: str | None = None
    episode: int | None = None
    trace: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    virtual_s: float = 0.0
    wall_s: float = 0.0


@dataclass(slots=True)
class _Waiting:
    """A client that waits for replies."""

    client: Client
    rids: tuple[str, ...]
    missing: set[str]


class Soak:
    """One run. `counts` and `episode` tell how far it got."""

    def __init__(
        self, spec: SoakSpec, engine: SoakEngine, on_progress: Callable[[float], None]
    ) -> None:
        self.spec = spec
        self.engine = engine
        self.checks = Checks(engine)
        self.counts: Counter[str] = Counter()
        self.episode = -1
        self.asks: dict[str, Ask] = {}
        self.outputs: dict[str, tuple[Ask, list[int], str]] = {}
        self._on_progress = on_progress
        self._traffic = Traffic(spec)
        self._episodes = iter(range(spec.num_episodes) if spec.episodes is None else spec.episodes)
        self._events: list[tuple[float, int, Client | None]] = []
        self._order = itertools.count()
        self._waiting: list[_Waiting] = []
        self._unsent: list[tuple[Client, Action]] = []
        self._num_idle = 0
        self._num_idle_ticks = 0
        self._last_seen: tuple[int, int] = (-1, -1)
        self._moments: dict[str, int] = {}
        self._last_moments: dict[str, str] = {}
        self._next_episode()

    def run(self) -> None:
        self.engine.local.run(self._is_over)
        self.checks.drained()

    # The loop's side: asked once per iteration, before requests are received.

    def _is_over(self) -> bool:
        self._collect()
        self._deliver()
        self.checks.each_iteration(self.asks)
        self._abort_at_moments()
        seen = (self.engine.num_launched, self.engine.ears.num_events)
        if seen != self._last_seen or self.engine.local._inbox:
            self._last_seen = seen
            self._num_idle = self._num_idle_ticks = 0
            self.counts["iterations"] = self.engine.num_launched
            return False
        self._num_idle += 1
        if self._num_idle < _IDLE_ITERATIONS:
            return False  # one alone means nothing: results may be on the way
        return not self._pass_time()

    def _pass_time(self) -> bool:
        """Nothing runs. False when the soak is over."""
        clock = self.engine.clock
        now_s = clock.now_s()
        next_s = self._events[0][0] if self._events else None
        if self.asks:
            if not self.engine.is_paused:
                self._num_idle_ticks += 1
            if self._num_idle_ticks > _MAX_IDLE_TICKS or (next_s is None and self.engine.is_paused):
                raise SoakFailure(
                    "stall",
                    f"nothing has run for {self._num_idle_ticks * _TICK_S:.1f} s: "
                    + self.checks.where(self.asks),
                )
            tick_s = now_s + _TICK_S
            clock.advance_to(tick_s if next_s is None else min(tick_s, max(next_s, now_s)))
            return True
        if next_s is not None and not self._waiting and self._all_later(next_s):
            self.checks.drained()
        if next_s is not None:
            clock.advance_to(next_s)
            return True
        return False

    def _all_later(self, next_s: float) -> bool:
        return next_s > self.engine.clock.now_s() + 1

    # The clients' side.

    def _next_episode(self) -> None:
        index = next(self._episodes, None)
        if index is None:
            return
        self.episode = index
        hour_s = 3600 / EPISODES_PER_HOUR
        start_s = max(index * hour_s, self.engine.clock.now_s())
        self._on_progress(start_s)
        for client in self._traffic.episode(index):
            self._push(start_s, client)
        # Mostly the next stretch begins when this one is long over, sometimes right after it.
        gap_s = Random(f"{self.spec.seed}/gap/{index}").choice((2.0, hour_s, hour_s))
        heapq.heappush(self._events, (start_s + gap_s, next(self._order), None))

    def _push(self, at_s: float, client: Client) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), client))

    def _deliver(self) -> None:
        now_s = self.engine.clock.now_s()
        while self._events and self._events[0][0] <= now_s:
            _, _, client = heapq.heappop(self._events)
            if client is None:
                self._next_episode()
            else:
                self._go_on(client, None)

    def _go_on(self, client: Client, outputs: dict[str, list[int]] | None) -> None:
        while True:
            try:
                action = next(client) if outputs is None else client.send(outputs)
            except StopIteration:
                return
            outputs = None
            match action:
                case Sleep(seconds):
                    self._push(self.engine.clock.now_s() + seconds, client)
                    return
                case Send(asks):
                    self._send(asks)
                    rids = tuple(ask.rid for ask in asks)
                    self._waiting.append(_Waiting(client, rids, set(rids)))
                    return
                case Post(asks):
                    self._send(asks)
                case Command():
                    self.counts[action.name] += 1
                    self.engine.command(action)

    def _send(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self.asks[ask.rid] = ask
            self.checks.sent(ask)
            self.engine.send(ask)
            self.counts["sent offline" if ask.offline else "sent online"] += 1
            if ask.abort is not None and ask.abort == ("sent", 0):
                self._abort(ask, "sent")

    def _collect(self) -> None:
        """Note what ended, and let those who waited for it go on."""
        ended = [
            rid
            for rid in self.asks
            if rid in self.engine.replies and self.engine.replies[rid].finish_reason is not None
        ]
        for rid in ended:
            ask, reply = self.asks.pop(rid), self.engine.replies[rid]
            self.checks.ended(ask, reply)
            self._moments.pop(rid, None)
            assert reply.finish_reason is not None
            self.counts[f"ended by {reply.finish_reason}"] += 1
            self.counts["retracted or preempted"] += bool(reply.num_retractions)
            self.outputs[rid] = ask, list(reply.output_ids), reply.finish_reason
        if not ended:
            return
        for waiting in [*self._waiting]:
            waiting.missing.difference_update(ended)
            if not waiting.missing:
                self._waiting.remove(waiting)
                outputs = {rid: self.outputs[rid][1] for rid in waiting.rids}
                self._go_on(waiting.client, outputs)

    def _abort_at_moments(self) -> None:
        for rid, moment in self.checks.moments.items():
            ask = self.asks.get(rid)
            if ask is None:
                continue
            if moment != self._last_moments.get(rid):
                self.counts[f"became {moment}"] += 1
            if ask.abort is None or moment != ask.abort[0]:
                continue
            since = self._moments.get(rid, 0)
            self._moments[rid] = since + 1
            if since == ask.abort[1]:
                self._abort(ask, moment)
        self._last_moments = self.checks.moments
        held = self.engine.held()
        self.counts["iterations with held"] += bool(held)

    def _abort(self, ask: Ask, moment: str) -> None:
        self.counts[f"aborted {moment}"] += 1
        self.engine.abort(ask.rid)


def run(
    spec: SoakSpec,
    *,
    num_compared: int = 200,
    on_progress: Callable[[float], None] = lambda now_s: None,
) -> Outcome:
    """Run a soak in this process. The outcome tells of a failure; nothing is raised for it."""
    began_s = time.perf_counter()
    soak: Soak | None = None
    with tempfile.TemporaryDirectory() as folder, without_pinned_memory(), quiet_host():
        folders = make_adapters(Path(folder), ADAPTERS) if spec.has("lora") else {}
        failure: BaseException | None = None
        try:
            with SoakEngine(spec, folders) as engine:
                soak = Soak(spec, engine, on_progress)
                soak.run()
                counts = soak.counts | _engine_counts(engine)
            if num_compared:
                counts["compared"] = _compare(spec, folders, soak, num_compared)
        except (Exception, SystemExit) as error:
            failure = error
            counts = Counter() if soak is None else soak.counts
    return Outcome(
        spec=spec,
        failure=None if failure is None else f"{type(failure).__name__}: {failure}"[:2000],
        episode=None if soak is None or failure is None else soak.episode,
        trace="" if failure is None else "".join(traceback.format_exception(failure)),
        counts=dict(sorted(counts.items())),
        virtual_s=0.0 if soak is None else soak.engine.clock.now_s(),
        wall_s=time.perf_counter() - began_s,
    )


def _compare(spec: SoakSpec, folders: dict[str, Path], soak: Soak, num_compared: int) -> int:
    """Ask for some outputs again, one after the other and undisturbed: they must be the same."""
    chosen = [
        (ask, output, reason)
        for ask, output, reason in soak.outputs.values()
        if ask.is_repeatable(overlap=spec.overlap)
        and output
        # Refused, for its length say: SGLang computes a token of an empty prompt for it. With more
        # memory it would not be.
        and (reason != "abort" or ask.abort is not None)
        and len(ask.tokens) + len(output) < spec.capacity
    ]
    Random(spec.seed).shuffle(chosen)
    chosen = chosen[:num_compared]
    calm = replace(spec, policy="sglang", overlap=False, mixed=False, kv_tokens=None)
    with SoakEngine(calm, folders) as engine:
        for ask, _, _ in chosen:
            engine.send(replace(ask, priority=None))
            engine.local.run_until_idle()
        for ask, output, reason in chosen:
            reply = engine.replies[ask.rid]
            if reply.finish_reason == reason == "abort":
                continue  # refused by both
            wanted = reply.output_ids[: len(output)] if reason == "abort" else reply.output_ids
            if output != wanted:
                raise SoakFailure("output", f"{ask.rid}: {output}, undisturbed {wanted}; {ask}")
    return len(chosen)


def _engine_counts(engine: SoakEngine) -> Counter[str]:
    counts: Counter[str] = Counter()
    counts["flushed"] = engine.ears.num_flushes[True]
    counts["not flushed"] = engine.ears.num_flushes[False]
    if engine.controller is not None:
        counters = engine.controller.counters
        for name in ("num_plans", "num_replans", "num_preemptions", "num_engine_refusals"):
            counts[name.removeprefix("num_").replace("_", " ")] = getattr(counters, name)
    return counts
