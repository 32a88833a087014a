"""What happened to one request, in plain sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cosched.core.plan import Plan, PreemptMode, SkipReason
from cosched.core.request import LateReason, RequestClass
from cosched.engine.log.decisions import Decision, RequestFacts
from cosched.engine.log.read import Entry

_NOT_NAMED = "not its turn"
"""Why a request waits that the plan does not name: the policy stopped at it, or before it."""

_KV = {
    PreemptMode.KEEP_KV: "its KV kept in the radix tree",
    PreemptMode.RECOMPUTE: "its KV freed",
    PreemptMode.CHECKPOINT: "its KV kept in host memory",
}

_MOST_NAMES = 3


def words(reason: SkipReason | LateReason) -> str:
    value: str = reason.value
    return value.replace("_", " ")


class _Chapter(Protocol):
    """A part of the story. It ends when the next one begins."""

    def text(self, seconds: float) -> str:
        """seconds: how long it took."""
        ...


@dataclass(slots=True)
class _Event:
    what: str

    def text(self, seconds: float) -> str:
        return self.what


@dataclass(slots=True)
class _Wait:
    """reasons: iterations by reason."""

    reasons: Counter[str] = field(default_factory=Counter)

    def text(self, seconds: float) -> str:
        by_reason = self.reasons.most_common()
        why = ", ".join(f"{reason} in {num}" for reason, num in by_reason)
        if len(by_reason) == 1:
            why = by_reason[0][0]
        return f"waited {seconds:.3f} s in {_count(self.reasons.total(), 'iteration')}: {why}"


@dataclass(slots=True)
class _Prefill:
    """num_cached: tokens whose KV was there already; None: not recorded."""

    num_cached: int | None
    is_resumed: bool
    chunks: list[int] = field(default_factory=list)

    def text(self, seconds: float) -> str:
        text = "resumed" if self.is_resumed else "admitted"
        if self.num_cached is not None:
            text += f" with {_count(self.num_cached, 'token')} cached"
        tokens, chunks = _count(sum(self.chunks), "token"), _count(len(self.chunks), "chunk")
        return f"{text}; prefilled {tokens} in {chunks}, {seconds:.3f} s"


@dataclass(slots=True)
class _Decode:
    """num_idle: iterations in which no running request decoded; paused: iterations by reason."""

    num_tokens: int = 0
    num_idle: int = 0
    paused: Counter[str] = field(default_factory=Counter)
    longest_pause: int = 0
    _pause: int = 0

    def decode(self) -> None:
        self.num_tokens += 1
        self._pause = 0

    def pause(self, reason: str) -> None:
        self.paused[reason] += 1
        self._pause += 1
        self.longest_pause = max(self.longest_pause, self._pause)

    def text(self, seconds: float) -> str:
        text = f"decoded {_count(self.num_tokens, 'token')} in {seconds:.3f} s"
        if num_paused := self.paused.total():
            total = self.num_tokens + self.num_idle + num_paused
            text += (
                f"; paused in {num_paused} of {_count(total, 'iteration')} (at most "
                f"{self.longest_pause} in a row): {', '.join(self.paused)}"
            )
        if self.num_idle:
            text += f"; {_count(self.num_idle, 'iteration')} did not decode"
        return text


class Story:
    """Follows one request through a log."""

    def __init__(
        self, facts: RequestFacts, *, first: Decision[Plan], seen_s: Iterable[float]
    ) -> None:
        """first   decision of the log: if older ones are gone, the story begins there
        seen_s  when the plans were made that came before the first that names the request"""
        self._facts = facts
        self._chapters: list[tuple[float, _Chapter]] = []
        self._late: list[tuple[float, str]] = []
        self._is_over = False
        self._has_run = False
        self._last_s = facts.arrival_s
        if first.iteration and facts.arrival_s < first.now_s:
            self._event(first.now_s, "the log begins")
        for now_s in seen_s:
            if now_s >= facts.arrival_s:
                self._wait(_NOT_NAMED)

    def add(self, entry: Entry) -> None:
        decision, rid = entry.decision, self._facts.rid
        if self._is_over:
            return
        if rid in decision.aborted:
            self._is_over = True
            self._event(decision.now_s, "no longer waits: aborted")
            return
        if decision.outcome == "replanned":
            return
        self._follow(entry)
        self._last_s = decision.now_s
        if decision.start_s is not None and decision.measured_s is not None:
            self._last_s = decision.start_s + decision.measured_s
        if rid in decision.finished:
            reason, num_tokens = decision.finished[rid]
            self._is_over = True
            self._event(
                self._last_s, f"finished with {_count(num_tokens, 'output token')}: {reason}"
            )

    def lines(self) -> list[str]:
        facts = self._facts
        title = (
            f"{facts.rid}: {facts.request_class.value} request, {facts.num_prompt_tokens} prompt "
            f"tokens, at most {facts.max_new_tokens} output tokens. Seconds since it arrived, at "
            f"{facts.arrival_s:.3f} s of the engine's clock:"
        )
        return [
            title,
            *(f"{at_s - facts.arrival_s:10.3f}  {text}" for at_s, text in self._events()),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rid": self._facts.rid,
            "class": self._facts.request_class.value,
            "arrival_s": self._facts.arrival_s,
            "is_over": self._is_over,
            "events": [{"at_s": at_s, "text": text} for at_s, text in self._events()],
        }

    def _events(self) -> list[tuple[float, str]]:
        ends = [start_s for start_s, _ in self._chapters[1:]] + [self._last_s]
        events = [
            (start_s, chapter.text(end_s - start_s))
            for (start_s, chapter), end_s in zip(self._chapters, ends, strict=True)
        ]
        events = sorted([*events, *self._late], key=lambda event: event[0])
        return events if self._is_over else [*events, (self._last_s, "the log ends")]

    def _follow(self, entry: Entry) -> None:
        decision, rid = entry.decision, self._facts.rid
        plan, now_s, last = decision.plan, decision.now_s, self._last
        reason = plan.skipped.get(rid)
        why = _NOT_NAMED if reason is None else words(reason)
        if rid in plan.late:
            text = f"its TTFT target is unreachable: {words(plan.late[rid])}"
            self._late.append((now_s, text))
        mode = next((one.mode for one in plan.preempt if one.rid == rid), None)
        if mode is not None:
            self._has_run = True
            self._event(now_s, _preempted(entry, mode))
        elif rid in decision.refused:
            self._wait("the engine refused it")
        elif rid in plan.prefill:
            if not isinstance(last, _Prefill):
                last = _Prefill(decision.cached.get(rid), self._has_run)
                self._chapters.append((now_s, last))
            self._has_run = True
            last.chunks.append(plan.prefill[rid])
        elif rid in plan.paused or rid in decision.running:
            if not isinstance(last, _Decode):
                last = _Decode()
                self._chapters.append((now_s, last))
            self._has_run = True
            if rid in plan.paused:
                last.pause(why)
            elif decision.num_decodes:
                last.decode()
            else:
                last.num_idle += 1
        else:
            if isinstance(last, _Prefill | _Decode):
                is_unfinished = rid in decision.unfinished
                text = "its prefill pauses" if is_unfinished else "sent back to wait by the engine"
                self._event(now_s, text)
            self._wait(why)

    def _wait(self, reason: str) -> None:
        last = self._last
        if not isinstance(last, _Wait):
            last = _Wait()
            start_s = self._chapters[-1][0] if self._chapters else self._facts.arrival_s
            self._chapters.append((start_s, last))
        last.reasons[reason] += 1

    def _event(self, at_s: float, text: str) -> None:
        self._chapters.append((at_s, _Event(text)))

    @property
    def _last(self) -> _Chapter | None:
        return self._chapters[-1][1] if self._chapters else None


def _preempted(entry: Entry, mode: PreemptMode) -> str:
    # A plan does not say for which request it preempts another.
    prefill = entry.decision.plan.prefill
    rids = [rid for rid in prefill if entry.class_of(rid) is RequestClass.ONLINE]
    text = ", ".join(rids[:_MOST_NAMES])
    if len(rids) > _MOST_NAMES:
        text += f" and {len(rids) - _MOST_NAMES} more"
    return f"preempted{f' for online {text}' if rids else ''}, {_KV[mode]}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
