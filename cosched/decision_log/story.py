"""What happened to one request, in plain sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from cosched.core.plan import PreemptMode, SkipReason
from cosched.core.request import LateReason, RequestClass
from cosched.decision_log.read import Entry
from cosched.engine.decision_records import Decision, Outcome, RequestFacts, RequestRow

__all__ = ["KEPT", "NOT_ITS_TURN", "Story", "words"]

NOT_ITS_TURN = "not its turn"
"""Why a request waits that the plan says nothing of: the policy stopped looking before it, or at
it."""

KEPT = {
    PreemptMode.KEEP_KV: "its KV kept in the radix tree",
    PreemptMode.RECOMPUTE: "its KV freed",
    PreemptMode.CHECKPOINT: "its KV kept in host memory",
}

_MOST_LINES = 8
"""Stretches of one wait that are told one by one; of more, only the sums."""

_MOST_NAMES = 3


def words(reason: SkipReason | LateReason) -> str:
    value: str = reason.value
    return value.replace("_", " ")


class _Chapter(Protocol):
    """A part of the story. It ends when the next one begins."""

    start_s: float

    def sentences(self, end_s: float) -> Iterator[tuple[float, str]]:
        """(when, what)"""
        ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class _Stretch:
    """Iterations in a row with one reason."""

    reason: str
    start_s: float
    num_iterations: int = 0


@dataclass(slots=True)
class _Wait:
    start_s: float
    stretches: list[_Stretch] = field(default_factory=list)

    def add(self, reason: str, now_s: float) -> None:
        if not self.stretches or self.stretches[-1].reason != reason:
            # What it waited before the first iteration that saw it belongs to the first reason.
            start_s = now_s if self.stretches else self.start_s
            self.stretches.append(_Stretch(reason, start_s))
        self.stretches[-1].num_iterations += 1

    def sentences(self, end_s: float) -> Iterator[tuple[float, str]]:
        if len(self.stretches) > _MOST_LINES:
            yield self.start_s, _waited(end_s - self.start_s, self.counts())
            return
        ends = [stretch.start_s for stretch in self.stretches[1:]] + [end_s]
        for stretch, stretch_end_s in zip(self.stretches, ends, strict=True):
            counts = Counter({stretch.reason: stretch.num_iterations})
            yield stretch.start_s, _waited(stretch_end_s - stretch.start_s, counts)

    def counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for stretch in self.stretches:
            counts[stretch.reason] += stretch.num_iterations
        return counts

    def to_dict(self) -> dict[str, Any]:
        return {"waited": dict(self.counts())}


def _waited(seconds: float, counts: Counter[str]) -> str:
    reasons = counts.most_common()
    why = reasons[0][0]
    if len(reasons) > 1:
        why = ", ".join(f"{reason} in {count}" for reason, count in reasons)
    return f"waited {seconds:.3f} s in {_count(counts.total(), 'iteration')}: {why}"


@dataclass(slots=True)
class _Prefill:
    """num_cached: tokens that were there already; None: not recorded."""

    start_s: float
    num_known_tokens: int
    num_cached: int | None
    is_resumed: bool
    chunks: list[int] = field(default_factory=list)
    late: str = ""

    def sentences(self, end_s: float) -> Iterator[tuple[float, str]]:
        text = "resumed" if self.is_resumed else "admitted"
        if self.num_cached is not None:
            text += f" with {self.num_cached} of {self.num_known_tokens} tokens cached"
        tokens, chunks = _count(sum(self.chunks), "token"), _count(len(self.chunks), "chunk")
        text += f"; prefilled {tokens} in {chunks}, {end_s - self.start_s:.3f} s"
        yield self.start_s, f"{text}; {self.late}" if self.late else text

    def to_dict(self) -> dict[str, Any]:
        return {
            "resumed" if self.is_resumed else "admitted": self.num_cached,
            "chunks": self.chunks,
        }


@dataclass(slots=True)
class _Decode:
    """num_idle: iterations in which no running request decoded."""

    start_s: float
    num_tokens: int = 0
    num_idle: int = 0
    held: Counter[str] = field(default_factory=Counter)
    longest_hold: int = 0
    _hold: int = 0

    def decode(self) -> None:
        self.num_tokens += 1
        self._hold = 0

    def hold(self, reason: str) -> None:
        self.held[reason] += 1
        self._hold += 1
        self.longest_hold = max(self.longest_hold, self._hold)

    def sentences(self, end_s: float) -> Iterator[tuple[float, str]]:
        text = f"decoded {_count(self.num_tokens, 'token')} in {end_s - self.start_s:.3f} s"
        num_held = self.held.total()
        if num_held:
            why = ", ".join(reason for reason, _ in self.held.most_common())
            total = self.num_tokens + self.num_idle + num_held
            text += (
                f"; held in {num_held} of {_count(total, 'iteration')} "
                f"(at most {self.longest_hold} in a row): {why}"
            )
        if self.num_idle:
            text += f"; {_count(self.num_idle, 'iteration')} did not decode"
        yield self.start_s, text

    def to_dict(self) -> dict[str, Any]:
        return {"decoded": self.num_tokens, "held": dict(self.held)}


@dataclass(slots=True)
class _Moment:
    """Something that takes no time."""

    start_s: float
    text: str
    data: dict[str, Any]

    def sentences(self, end_s: float) -> Iterator[tuple[float, str]]:
        yield self.start_s, self.text

    def to_dict(self) -> dict[str, Any]:
        return self.data


class Story:
    """Follows one request through a log.

    `first` is the log's first decision: when older ones are gone, the story begins there.
    """

    def __init__(self, facts: RequestFacts, first: Decision) -> None:
        self._facts = facts
        self._chapters: list[_Chapter] = []
        if first.number and facts.arrival_s < first.view.now_s:
            self._moment(first.view.now_s, "the log begins", {"log_begins": True})
        self._is_over = False
        self._has_run = False
        self._last_s = facts.arrival_s

    def add(self, entry: Entry) -> None:
        decision = entry.decision
        now_s, result = decision.view.now_s, decision.result
        if self._is_over or now_s < self._facts.arrival_s:
            return
        if result.outcome is Outcome.REPLANNED:
            return
        self._tell(entry)
        self._last_s = now_s
        if result.start_s is not None and result.measured_s is not None:
            self._last_s = result.start_s + result.measured_s
        for seq, reason, num_tokens in result.finished:
            if seq == self._facts.arrival_seq:
                self._is_over = True
                self._moment(
                    self._last_s,
                    f"finished with {_count(num_tokens, 'output token')}: {reason}",
                    {"finished": reason, "num_output_tokens": num_tokens},
                )

    def lines(self) -> list[str]:
        facts = self._facts
        lines = [
            f"{facts.rid}: {facts.request_class.value} request, {facts.num_prompt_tokens} prompt "
            f"tokens, at most {facts.max_new_tokens} new ones. Seconds since it arrived, at "
            f"{facts.arrival_s:.3f} s of the engine's clock:"
        ]
        ends = [chapter.start_s for chapter in self._chapters[1:]] + [self._last_s]
        for chapter, end_s in zip(self._chapters, ends, strict=True):
            for at_s, text in chapter.sentences(end_s):
                lines.append(f"{at_s - facts.arrival_s:10.3f}  {text}")
        if not self._is_over:
            lines.append(f"{self._last_s - facts.arrival_s:10.3f}  the log ends")
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "rid": self._facts.rid,
            "class": self._facts.request_class.value,
            "arrival_s": self._facts.arrival_s,
            "is_over": self._is_over,
            "chapters": [{"at_s": c.start_s, **c.to_dict()} for c in self._chapters],
        }

    def _tell(self, entry: Entry) -> None:
        seq = self._facts.arrival_seq
        decision = entry.decision
        view, plan, result = decision.view, decision.plan, decision.result
        now_s = view.now_s
        modes = dict(plan.preempted)
        row = _row(view.running, seq)
        self._judge_late(entry, now_s)
        if seq in modes:
            self._stop(entry, modes[seq], now_s)
        elif seq in result.refused:
            self._wait("the engine refused it", now_s)
        elif (num_tokens := dict(plan.prefill).get(seq)) is not None:
            self._prefill(entry, num_tokens)
        elif seq in plan.held:
            self._decode(now_s).hold(_reason(entry, seq))
        elif row is not None:
            self._has_run = True
            chapter = self._decode(now_s)
            if result.outcome is Outcome.RAN and (
                entry.header.settings.caps.mixed_batches or not plan.prefill
            ):
                chapter.decode()
            else:
                chapter.num_idle += 1
        elif self._is_gone(entry):
            self._is_over = True
            self._moment(now_s, "no longer waits: aborted", {"aborted": True})
        else:
            self._wait(_reason(entry, seq), now_s)

    def _judge_late(self, entry: Entry, now_s: float) -> None:
        seq = self._facts.arrival_seq
        for why, seqs in entry.decision.plan.late.items():
            if seq in seqs:
                last = self._chapters[-1] if self._chapters else None
                text = f"its TTFT target is out of reach: {words(why)}"
                if isinstance(last, _Prefill):
                    last.late = text
                else:
                    self._moment(now_s, text, {"late": why.value})

    def _wait(self, reason: str, now_s: float) -> None:
        last = self._chapters[-1] if self._chapters else None
        if isinstance(last, _Prefill | _Decode):
            self._moment(now_s, "sent back to wait by the engine", {"sent_back": True})
        if not isinstance(last, _Wait):
            before = self._chapters[-1].start_s if self._chapters else self._facts.arrival_s
            last = _Wait(before)
            self._chapters.append(last)
        last.add(reason, now_s)

    def _prefill(self, entry: Entry, num_tokens: int) -> None:
        view, seq = entry.decision.view, self._facts.arrival_seq
        last = self._chapters[-1] if self._chapters else None
        if not isinstance(last, _Prefill):
            row = _row([*view.unfinished, *view.online, *view.offline], seq)
            assert row is not None, "what a plan names was looked at"
            match = view.match.get(seq)
            last = _Prefill(
                start_s=view.now_s,
                num_known_tokens=self._facts.num_prompt_tokens + row[1],
                num_cached=None if match is None else match.cached,
                is_resumed=self._has_run,
            )
            self._chapters.append(last)
        self._has_run = True
        last.chunks.append(num_tokens)

    def _decode(self, now_s: float) -> _Decode:
        last = self._chapters[-1] if self._chapters else None
        if not isinstance(last, _Decode):
            last = _Decode(now_s)
            self._chapters.append(last)
        return last

    def _stop(self, entry: Entry, mode: PreemptMode, now_s: float) -> None:
        rids = [
            entry.facts[seq].rid
            for seq, _ in entry.decision.plan.prefill
            if entry.facts[seq].request_class is RequestClass.ONLINE
        ]
        # A plan does not say for whom: it stops offline work before it admits anyone.
        text = "stopped for want of room"
        if rids:
            more = f" and {len(rids) - _MOST_NAMES} more" if len(rids) > _MOST_NAMES else ""
            text = f"stopped for online {', '.join(rids[:_MOST_NAMES])}{more}"
        self._has_run = True
        self._moment(now_s, f"{text}, {KEPT[mode]}", {"stopped": mode.value, "for": rids})

    def _moment(self, now_s: float, text: str, data: dict[str, Any]) -> None:
        self._chapters.append(_Moment(now_s, text, data))

    def _is_gone(self, entry: Entry) -> bool:
        """Its queue was read to the end, nobody was passed over, and it is not in it."""
        view, seq = entry.decision.view, self._facts.arrival_seq
        online = self._facts.request_class is RequestClass.ONLINE
        rows = view.online if online else view.offline
        is_all = view.online_is_all if online else view.is_all_offline
        return is_all and _row(rows, seq) is None


def _row(rows: list[RequestRow], seq: int) -> RequestRow | None:
    return next((row for row in rows if row[0] == seq), None)


def _reason(entry: Entry, seq: int) -> str:
    for reason, seqs in entry.decision.plan.skipped.items():
        if seq in seqs:
            return words(reason)
    return NOT_ITS_TURN


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
