"""How requests are served, by class: first tokens, time per token, ends, targets met and missed.

Times are the scheduler's: from the arrival of a request in its process to the moment its tokens are
known there. Tokenizing, detokenizing and HTTP come on top for the client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cosched.core.request import LateReason, RequestClass, Slo
from cosched.core.tiers import Tier
from cosched.engine import port
from cosched.engine.chat_load import ChatLoad
from cosched.engine.feature import Feature
from cosched.engine.figures import TARGETS
from cosched.engine.latency_histogram import bucket_of
from cosched.engine.tracked import TrackedRequest


class ServiceListener(Protocol):
    """Gets what happens, as it happens."""

    def first_token(self, request_class: RequestClass, ttft_s: float) -> None: ...

    def finished(self, request_class: RequestClass, e2e_s: float, tpot_s: float | None) -> None:
        """tpot_s: None for a reply of one token."""
        ...


class Served:
    """Of some requests, since the start.

    attainment  target -> [met, missed]
    times_s     time -> (sum [s], number of them)
    histograms  time of online requests -> bucket (`bucket_of`) -> number of them
    """

    def __init__(self, request_class: RequestClass, *more: str) -> None:
        """more: times beside TTFT and TPOT."""
        is_online = request_class is RequestClass.ONLINE
        self.attainment = {target: [0, 0] for target in TARGETS[request_class]}
        self.times_s = dict.fromkeys(("ttft", "tpot", *more), (0.0, 0))
        self.histograms = {name: Counter[int]() for name in ("ttft", "tpot") if is_online}

    def add(self, name: str, seconds: float) -> None:
        if name in self.times_s:
            total_s, num = self.times_s[name]
            self.times_s[name] = (total_s + seconds, num + 1)
        if name in self.histograms:
            self.histograms[name][bucket_of(seconds)] += 1

    def to_dict(self, prefix: str = "") -> dict[str, Any]:
        """As in the state; prefix: of the names of times."""
        return {
            "attainment": {name: (met, missed) for name, (met, missed) in self.attainment.items()},
            "times_s": {
                f"{prefix}{name}": (round(total_s, 6), num)
                for name, (total_s, num) in self.times_s.items()
            },
            "histograms": {name: {**counts} for name, counts in self.histograms.items()},
        }


@dataclass(slots=True)
class _Reply:
    """num_tokens: that were counted; first_s: when the first of them was."""

    num_tokens: int
    first_s: float


class ClassCounters(Feature):
    """Counts since the start. Requests that are aborted are in no other count but that of their
    tokens and, where they had one, of their first token."""

    place = "service"

    @classmethod
    def of(cls, controller: Any) -> ClassCounters:
        config = controller.config
        return cls(slo=config.slo.targets(), tiers=config.online_tiers())

    def __init__(self, *, slo: Slo, tiers: Iterable[Tier] = ()) -> None:
        """slo: targets of online requests that name none."""
        self._slo = slo
        self._replies: dict[str, _Reply] = {}
        """Of requests with a token that have not ended, by rid."""
        self.by_class = {
            RequestClass.ONLINE: Served(RequestClass.ONLINE, "missed_ttft"),
            RequestClass.OFFLINE: Served(RequestClass.OFFLINE),
        }
        """missed_ttft: where the target was missed."""
        self.tiers = {tier.name: Served(RequestClass.ONLINE) for tier in tiers}
        self.listener: ServiceListener | None = None
        self.chat_load = ChatLoad()
        self.output_tokens: Counter[RequestClass] = Counter()
        self.aborted: Counter[RequestClass] = Counter()
        """Requests that were aborted after they had begun."""
        self.cancelled: Counter[RequestClass] = Counter()
        """Requests in `aborted` that their client took back."""
        self.late: dict[LateReason, list[int]] = {reason: [0, 0] for reason in LateReason}
        """Why online requests were judged late -> [how many, of these met their TTFT target]"""

    def on_late(self, request: Any, reason: LateReason) -> None:
        self.late[reason][0] += 1

    def on_aborted(self, request: Any) -> None:
        self._replies.pop(request.rid, None)

    def on_tokens(self, requests: Sequence[TrackedRequest], now_s: float) -> None:
        for tracked in requests:
            req = tracked.req
            if port.is_before_samples(req):
                continue
            num_tokens, reply = port.num_output(req), self._replies.get(tracked.rid)
            if num_tokens and reply is None:
                self._replies[tracked.rid] = reply = _Reply(0, now_s)
                self._first_token(tracked, now_s)
            if reply is not None and num_tokens > reply.num_tokens:
                self.output_tokens[tracked.request_class] += num_tokens - reply.num_tokens
                reply.num_tokens = num_tokens
            if req.finished_reason is not None:
                self._replies.pop(tracked.rid, None)
                if port.is_aborted(req):
                    self.aborted[tracked.request_class] += 1
                    if port.is_cancelled(req):
                        self.cancelled[tracked.request_class] += 1
                else:
                    self._finished(tracked, reply or _Reply(0, now_s), now_s)

    def _first_token(self, tracked: TrackedRequest, now_s: float) -> None:
        ttft_s = now_s - tracked.arrival_s
        self._add_time(tracked, "ttft", ttft_s)
        if self.listener is not None:
            self.listener.first_token(tracked.request_class, ttft_s)
        if tracked.request_class is RequestClass.ONLINE:
            self.chat_load.began(tracked, _target(tracked.slo.tpot_s, self._slo.tpot_s))
            most_s = _target(tracked.slo.ttft_s, self._slo.ttft_s)
            self._judge(tracked, "ttft", ttft_s, most_s)
            if most_s is not None and ttft_s > most_s:
                self._add_time(tracked, "missed_ttft", ttft_s)

    def _finished(self, tracked: TrackedRequest, reply: _Reply, now_s: float) -> None:
        num_gaps, first_s = reply.num_tokens - 1, reply.first_s
        tpot_s = None if num_gaps < 1 else (now_s - first_s) / num_gaps
        if tpot_s is not None:
            self._add_time(tracked, "tpot", tpot_s)
        e2e_s = now_s - tracked.arrival_s
        if self.listener is not None:
            self.listener.finished(tracked.request_class, e2e_s, tpot_s)
        slo = tracked.slo
        if tracked.request_class is RequestClass.OFFLINE:
            self._judge(tracked, "deadline", e2e_s, slo.deadline_s)
        elif reply.num_tokens:
            self.chat_load.ended(tracked, reply.num_tokens)
            most_ttft_s = _target(slo.ttft_s, self._slo.ttft_s)
            most_tpot_s = _target(slo.tpot_s, self._slo.tpot_s)
            # As docs/metrics.md has it: a reply of one token meets any TPOT.
            self._judge(tracked, "tpot", tpot_s or 0.0, most_tpot_s)
            if most_ttft_s is not None and most_tpot_s is not None:
                is_late = first_s - tracked.arrival_s > most_ttft_s
                is_slow = (tpot_s or 0.0) > most_tpot_s
                self._judge(tracked, "all", float(is_late or is_slow), 0.0)

    def _served(self, tracked: TrackedRequest) -> Iterator[Served]:
        """Where a request counts."""
        yield self.by_class[tracked.request_class]
        if self.tiers and tracked.request_class is RequestClass.ONLINE:
            yield [*self.tiers.values()][tracked.tier]

    def _add_time(self, tracked: TrackedRequest, name: str, seconds: float) -> None:
        for served in self._served(tracked):
            served.add(name, seconds)

    def _judge(
        self, tracked: TrackedRequest, target: str, value: float, most: float | None
    ) -> None:
        if most is None:
            return
        is_met = value <= most
        if target == "ttft" and is_met and tracked.late is not None:
            self.late[tracked.late][1] += 1
        for served in self._served(tracked):
            served.attainment[target][0 if is_met else 1] += 1


def _target(own: float | None, servers: float | None) -> float | None:
    return servers if own is None else own
