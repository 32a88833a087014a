"""Designed batches on a real scheduler: a scripted policy plans each as designed, and the engine's
observer measures it."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from cosched.core.plan import EMPTY_PLAN, Plan
from cosched.core.request import Request
from cosched.core.view import View
from cosched.engine import port
from cosched.engine.iteration import Iteration
from cosched.errors import ConfigError
from cosched.lab.local_engine import LocalEngine
from cosched.lab.profiling.design import DesignedBatch, Limits, Round
from cosched.papers.hygen.sarathi import SarathiPolicy
from cosched.predict.profile_file import MeasuredPoint
from cosched.schedule.ledger import Ledger

DOUBTFUL = 0.1
"""If the median deviation of repeats from their median is above this share of it, the batch is
repeated once more, then discarded."""

_FIRST_ID = 10
_SPARE_TOKENS = 16
"""Tokens that a request of the pool may generate while the script waits for requests."""

_MAX_ITERATIONS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """points: one per batch, the median of its repeats; num_discarded: batches whose repeats
    disagree; num_not_run: batches that the engine never ran as designed."""

    points: tuple[MeasuredPoint, ...]
    num_discarded: int
    num_not_run: int


def limits_of(scheduler: Any, *, max_context: int | None = None) -> Limits:
    """The limits of an engine. max_context: do not go beyond this context [tokens]."""
    caps = scheduler.cosched.caps
    chunk = caps.max_chunk_tokens
    longest = port.longest_prompt(scheduler)
    return Limits(
        max_tokens=min(caps.max_prefill_tokens, chunk or caps.max_prefill_tokens),
        max_running=caps.max_running_requests,
        kv_tokens=port.kv_total(scheduler),
        max_context=longest if max_context is None else min(max_context, longest),
        mixed=caps.mixed_batches,
        page_size=caps.page_size,
    )


def measure_rounds(
    engine: LocalEngine,
    rounds: Sequence[Round],
    *,
    repeats: int,
    seed: int = 0,
    on_iteration: Callable[[], None] = lambda: None,
) -> Measured:
    """Run every batch `repeats` times in a row. The engine is idle before and after.

    `on_iteration` is called for each measured iteration. ConfigError when the engine cannot leave
    running requests out of an iteration.
    """
    controller = engine.scheduler.cosched
    if not controller.caps.partial_decode:
        raise ConfigError("this engine cannot leave out running requests: it cannot be measured")
    script = _Script(on_iteration)
    controller.observer.add_listener(script.on_result)
    own_policy = controller.planner.use_policy(script)
    prompts = _Prompts(engine.scheduler.model_config.vocab_size, seed)
    points: list[MeasuredPoint] = []
    num_discarded = num_not_run = 0
    try:
        for number, one in enumerate(rounds):
            run = _RoundRun(engine, script, prompts, one, number=number, repeats=repeats)
            run.run()
            for results in run.results:
                if not results:
                    num_not_run += 1
                elif _is_doubtful(results):
                    num_discarded += 1
                else:
                    middle = sorted(results, key=lambda r: r.seconds)[len(results) // 2]
                    points.append(MeasuredPoint(batch=middle.shape, seconds=middle.seconds))
    finally:
        controller.planner.use_policy(own_policy)
        controller.observer.remove_listener(script.on_result)
    return Measured(points=tuple(points), num_discarded=num_discarded, num_not_run=num_not_run)


def _is_doubtful(results: Sequence[Iteration]) -> bool:
    times = [result.seconds for result in results]
    middle = statistics.median(times)
    return statistics.median(abs(t - middle) for t in times) > DOUBTFUL * middle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One iteration to run; index: the batch whose time it gives, None: it only warms up."""

    index: int | None
    prefill: dict[str, int]
    decodes: frozenset[str]


class _Phase(Enum):
    FILL = "prefill waiting requests without decodes"
    FOLLOW = "follow the steps; one request decodes when there are none"
    DRAIN = "all requests decode"


class _Script:
    """A policy that runs the steps it was given, one per iteration."""

    initial = None

    def __init__(self, on_iteration: Callable[[], None]) -> None:
        self.phase = _Phase.FILL
        self._on_iteration = on_iteration
        self._fill_policy = SarathiPolicy()
        self._steps: deque[_Step] = deque()
        self._launched: list[tuple[Plan, _Step]] = []
        self._results: list[tuple[int, Iteration]] = []

    @property
    def is_done(self) -> bool:
        """No step is left, and all results are in."""
        return not self._steps and not self._launched

    def follow(self, steps: Iterable[_Step]) -> None:
        self.phase = _Phase.FOLLOW
        self._steps.extend(steps)

    def take_results(self) -> list[tuple[int, Iteration]]:
        results, self._results = self._results, []
        return results

    def plan(self, view: View, carry: None) -> tuple[Plan, None]:
        return self._plan(view), None

    def _plan(self, view: View) -> Plan:
        if self.phase is _Phase.DRAIN:
            return EMPTY_PLAN
        running = [request.rid for request in view.running]
        if self.phase is _Phase.FILL:
            plan, _ = self._fill_policy.plan(view, None)
            if plan.prefill:
                return msgspec.structs.replace(plan, paused=frozenset(running))
            self.phase = _Phase.FOLLOW
        if view.unfinished:
            return self._rest(view.unfinished[0], view)
        if not self._steps:
            return Plan(paused=frozenset(running[1:]))
        step = self._steps.popleft()
        plan = Plan(
            prefill=step.prefill,
            decodes=not step.prefill or view.caps.mixed_batches,
            paused=frozenset(running) - step.decodes,
        )
        self._launched.append((plan, step))
        return plan

    def _rest(self, request: Request, view: View) -> Plan:
        """Finish a prefill that had more to compute than designed, because its prefix was not
        cached. Its batch counts as not run."""
        num_tokens = Ledger(view).chunk(request, None)
        running = frozenset(r.rid for r in view.running)
        return Plan(
            prefill={request.rid: num_tokens}, decodes=view.caps.mixed_batches, paused=running
        )

    def on_result(self, iteration: Iteration) -> None:
        step = next((step for plan, step in self._launched if plan is iteration.plan), None)
        if step is None:
            return
        self._launched = [entry for entry in self._launched if entry[1] is not step]
        if step.index is None:
            return
        self._on_iteration()
        shape = iteration.shape
        as_designed = (
            sum(prefill.num_new for prefill in shape.prefills) == sum(step.prefill.values())
            and len(shape.prefills) == len(step.prefill)
            and len(shape.decodes) == len(step.decodes)
        )
        if as_designed and iteration.seconds > 0:
            self._results.append((step.index, iteration))


class _RoundRun:
    """One round on the engine; `results` holds the repeats of each batch."""

    def __init__(
        self,
        engine: LocalEngine,
        script: _Script,
        prompts: _Prompts,
        one: Round,
        *,
        number: int,
        repeats: int,
    ) -> None:
        self.results: list[list[Iteration]] = [[] for _ in one.batches]
        self._engine = engine
        self._script = script
        self._prompts = prompts
        self._round = one
        self._name = f"measure{number}"
        self._repeats = repeats
        self._num_sent = 0
        self._pool = [prompts.make(length) for length in one.pool]

    def run(self) -> None:
        actions = self._actions()
        next(actions)

        def act(iteration: int) -> None:
            if self._script.phase is not _Phase.DRAIN and self._is_ready():
                next(actions)

        self._engine.run_until_idle(on_iteration=act, max_iterations=_MAX_ITERATIONS)

    def _is_ready(self) -> bool:
        return self._script.phase is _Phase.FOLLOW and self._script.is_done

    def _actions(self) -> Iterator[None]:
        """One step for each time the script is done."""
        every = range(len(self._round.batches))
        self._script.phase = _Phase.FILL
        self._send_pool()
        yield
        self._send_steps(every)
        yield
        self._collect()
        doubtful = [i for i in every if not self.results[i] or _is_doubtful(self.results[i])]
        if doubtful:
            self._send_steps(doubtful)
            yield
            self._collect()
        self._script.phase = _Phase.DRAIN
        self._engine.abort(self._name)  # of all whose id begins so
        yield

    def _collect(self) -> None:
        for index, result in self._script.take_results():
            self.results[index].append(result)

    def _send_pool(self) -> None:
        num_decodes = Counter(i for batch in self._round.batches for i in batch.decodes)
        for i, prompt in enumerate(self._pool):
            # Twice: doubtful batches run again.
            most = 2 * (self._repeats + 2) * num_decodes[i] + _SPARE_TOKENS
            self._engine.submit(self._pool_rid(i), prompt, max_new_tokens=most)

    def _pool_rid(self, index: int) -> str:
        return f"{self._name}-pool{index}"

    def _send_steps(self, indices: Sequence[int]) -> None:
        """Send the prefills of these batches, then run them: the repeats of each in a row, between
        two that do not count. Where the device is done before the launch of the next iteration, its
        end is seen late, and the next one seems as much shorter: among its like that is no
        error."""
        steps = []
        for index in indices:
            counts = (False, *(True for _ in range(self._repeats)), False)
            steps += [self._step(index, counts=each) for each in counts]
        self._script.follow(steps)

    def _step(self, index: int, *, counts: bool) -> _Step:
        batch: DesignedBatch = self._round.batches[index]
        prefill = {}
        for chunk in batch.prefills:
            rid = f"{self._name}-{self._num_sent}"
            self._num_sent += 1
            head = self._pool[chunk.prefix][: chunk.num_cached]
            prompt = [*head, *self._prompts.make(chunk.num_new)]
            self._engine.submit(rid, prompt, max_new_tokens=1)
            prefill[rid] = chunk.num_new
        return _Step(
            index=index if counts else None,
            prefill=prefill,
            decodes=frozenset(map(self._pool_rid, batch.decodes)),
        )


class _Prompts:
    """Random prompts with different first tokens, so that only designed prefixes are cached."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._num = 0

    def make(self, length: int) -> list[int]:
        tokens: list[int] = self._rng.integers(_FIRST_ID, self._vocab_size, length).tolist()
        tokens[0] = _FIRST_ID + self._num % (self._vocab_size - _FIRST_ID)
        self._num += 1
        return tokens
