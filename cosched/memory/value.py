"""What KV is worth keeping: the time that is expected to be lost if a node is evicted.

What is lost is what must be recomputed, times the chance that a request needs it. Where a copy is
left in host memory only loading it is lost.
"""

from __future__ import annotations

import itertools
import math

from cosched.core.batch import BatchTotals
from cosched.core.estimates import Predictor
from cosched.memory.node import KvNode
from cosched.memory.reuse import ReuseModel

_CERTAIN = 1000.0
"""Factor on the cost of KV that a waiting online request will use: above all other values."""

_BESIDE = 0.1
"""Weight of a second of copying for which no request waits."""


class RecomputeCosts:
    """Time to compute prompt tokens at each depth [s], from the predictor of iterations."""

    _STEP = 1024
    _NUM_STEPS = 128

    def __init__(self) -> None:
        self._per_token = [0.0] * self._NUM_STEPS
        self._sums = [0.0] * (self._NUM_STEPS + 1)
        self._next = 0

    def refresh(self, predictor: Predictor, num_steps: int = _NUM_STEPS) -> None:
        """Ask the predictor again, which learns: at `num_steps` depths, at the others in later
        calls."""
        for step in range(self._next, self._next + num_steps):
            step %= self._NUM_STEPS
            totals = BatchTotals()
            totals.add_prefill(self._STEP, step * self._STEP)
            self._per_token[step] = predictor.predict_s(totals) / self._STEP
        self._next = (self._next + num_steps) % self._NUM_STEPS
        self._sums = [0.0, *itertools.accumulate(n * self._STEP for n in self._per_token)]

    def per_token(self, depth: int) -> float:
        """Seconds for one token with `depth` tokens before it."""
        return self._per_token[min(depth // self._STEP, self._NUM_STEPS - 1)]

    def to_units(self, seconds: float) -> float:
        """Seconds in costs of a token with none before it; 0.0 where that is not known."""
        unit_s = self._per_token[0]
        return seconds / unit_s if unit_s else 0.0

    def relative(self, depth: int) -> float:
        """`per_token`, relative to depth 0: learning how fast the device is hardly changes it."""
        unit_s = self._per_token[0]
        return self.per_token(depth) / unit_s if unit_s else 1.0

    def seconds(self, start: int, end: int) -> float:
        """For the tokens from `start` to `end`."""
        return self._until(end) - self._until(start)

    def _until(self, depth: int) -> float:
        step, rest = divmod(depth, self._STEP)
        if step >= self._NUM_STEPS:
            beyond = depth - self._NUM_STEPS * self._STEP
            return self._sums[-1] + beyond * self._per_token[-1]
        return self._sums[step] + rest * self._per_token[step]


class KvValue:
    """Value of a node: the cost per token that is expected if it is evicted, in costs of a token
    with none before it.

    *Offline*: the waiting requests that need it are known. Requests that share a prefix run one
    after the other, so what is evicted is recomputed once; each further request makes it more
    likely that one comes before memory is short again.

    *Waiting online requests*, new or preempted: it is certain that they resume, and a user waits.
    What they will use has `_CERTAIN` times its cost and is evicted last.

    *Online*: the chance that the session continues (`ReuseModel`), times what is recomputed then. A
    second of recomputation that makes a chat user wait weighs more than one of throughput, by
    `late_weight`: each beyond `free_share` of the TTFT target, which goes unnoticed (the idea of
    tail-optimized LRU, Zhang et al. 2025), up to the target. What is lost beyond the target makes
    no further request late: so one context is evicted whole rather than the ends of many.

    *Host memory*: what has a copy there costs `transfer_s` per token, if that is less.
    """

    def __init__(
        self,
        reuse: ReuseModel,
        costs: RecomputeCosts,
        *,
        late_weight: float = 4.0,
        free_share: float = 0.1,
    ) -> None:
        self.reuse = reuse
        self.costs = costs
        self._late_weight = late_weight
        self._free_share = free_share
        self.transfer_s = math.inf
        """A token from or to host memory [s]; inf: there is none."""

    def __call__(self, node: KvNode, now_s: float) -> float:
        """Per token, of its place on the device."""
        return self._lost(node, now_s, is_loaded=node.on_host)

    def of_copy(self, node: KvNode, now_s: float) -> float:
        """Per token, of its copy in host memory, or of one if there were one, where it is on the
        device no longer: what recomputing it costs more than loading it."""
        if not self.has_host:
            return 0.0
        computed = self._lost(node, now_s, is_loaded=False, on_host=True)
        return max(computed - self._lost(node, now_s, is_loaded=True, on_host=True), 0.0)

    @property
    def has_host(self) -> bool:
        """There is host memory to copy to."""
        return self.transfer_s < math.inf

    @property
    def loading_share(self) -> float:
        """Cost of loading a token as a share of recomputing it, 0 to 1; 1: there is no host
        memory."""
        if not self.has_host:
            return 1.0
        return min(self.costs.to_units(self.transfer_s), 1.0)

    def gain_of_copying(self, node: KvNode, now_s: float, *, is_ahead: bool = True) -> float:
        """Per token, of copying it to host memory before it is evicted: `of_copy` less the way
        there. Above 0: it is worth it.

        is_ahead: iterations run during the copy, so that it costs little
        """
        if not self.has_host:
            return 0.0
        cost = self.costs.to_units(self.transfer_s) * (_BESIDE if is_ahead else 1.0)
        return self.of_copy(node, now_s) - cost

    def _lost(self, node: KvNode, now_s: float, *, is_loaded: bool, on_host: bool = False) -> float:
        """on_host: as long as it can stay in host memory, and not on the device."""
        if node.awaiting:
            return _CERTAIN * self._cost(node, is_loaded=is_loaded)
        chance = 0.0
        references = node.references
        if references:
            chance = 1.0 - 0.5**references
        visit = node.visit
        if visit is not None:
            returns = self.chance_of_reuse(node, now_s, on_host=on_host)
            if visit.ttft_s:
                returns *= 1.0 + self._late_weight * self._late_share(
                    node, max(visit.num_tokens, node.end), visit.ttft_s, is_loaded=is_loaded
                )
            chance = max(chance, returns)
        return chance * self._cost(node, is_loaded=is_loaded)

    def _cost(self, node: KvNode, *, is_loaded: bool) -> float:
        """Of a token of it that is computed or loaded again."""
        cost = self.costs.relative(node.start)
        return min(cost, self.costs.to_units(self.transfer_s)) if is_loaded else cost

    def _late_share(self, node: KvNode, end: int, ttft_s: float, *, is_loaded: bool) -> float:
        """Of the time to recompute a node's tokens, the share that brings a first
        token nearer to being late; what is behind the node, up to `end`, is lost already."""
        behind_s = self._seconds(node.end, end, is_loaded=is_loaded)
        lost_s = self._seconds(node.start, end, is_loaded=is_loaded)
        if lost_s <= behind_s:
            return 0.0
        late = self._late(lost_s / ttft_s) - self._late(behind_s / ttft_s)
        return late * ttft_s / (lost_s - behind_s)

    def lateness(self, num_tokens: int, ttft_s: float | None) -> float:
        """How near to being late a request comes that finds nothing of a context of so many tokens,
        0 to 1. ttft_s: its target; None: it has none."""
        return self._late(self.costs.seconds(0, num_tokens) / ttft_s) if ttft_s else 0.0

    def _late(self, share: float) -> float:
        """How near to being late, 0 to 1; share: of the target for the first token that goes into
        recomputing."""
        return min(max((share - self._free_share) / (1.0 - self._free_share), 0.0), 1.0)

    def _seconds(self, start: int, end: int, *, is_loaded: bool) -> float:
        seconds = self.costs.seconds(start, end)
        return min(seconds, (end - start) * self.transfer_s) if is_loaded else seconds

    def chance_of_reuse(self, node: KvNode, now_s: float, *, on_host: bool = False) -> float:
        """That the session of an online context continues while it can be kept on the device, or in
        host memory; 1 where its request waits already."""
        if node.awaiting:
            return 1.0
        visit = node.visit
        if visit is None:
            return 0.0
        return self.reuse.chance(visit.kind, now_s - visit.end_s, on_host=on_host)

    def next_change_s(self, node: KvNode, now_s: float) -> float:
        """When it changes by time alone [s]; inf: it does not."""
        if node.visit is None:
            return math.inf
        return node.visit.end_s + self.reuse.next_change_s(now_s - node.visit.end_s)
