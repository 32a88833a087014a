"""Reader of recorded sessions of a coding agent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cosched_traces.errors import RowError
from cosched_traces.json_lines import count, json_lines, number
from cosched_traces.rows import DEFAULTS, ReadOptions
from cosched_traces.seeds import KEYS, key_base
from cosched_traces.sessions import RecordedSessions, Session, Turn
from cosched_traces.workload import Segment

__all__ = ["Heads", "read_sessions_jsonl"]

MAX_THINK_S = 60.0


class Heads(Enum):
    """Which sessions begin with the same tool definitions and system prompt.

    OWN    none: the file's ids mean something inside one session only
    EQUAL  those with as many tokens of tools and as many of the system prompt
    ONE    all; a shorter head is a part of a longer one
    """

    OWN = "own"
    EQUAL = "equal"
    ONE = "one"


def read_sessions_jsonl(
    path: Path,
    options: ReadOptions = DEFAULTS,
    *,
    heads: Heads = Heads.EQUAL,
    max_think_s: float = MAX_THINK_S,
) -> RecordedSessions:
    """kv-cache-tester: one session a line, ``{"id", "block_size", "tool_tokens", "system_tokens",
    "requests": [{"in", "out", "hash_ids", "think_time"}, …]}``.

    An id stands for a full block of a prompt and everything before it. The tokens behind the last
    full block are the head of what follows in the next request where that goes on from here, else
    they are its own. The blocks that lie wholly within the tools and the system prompt are shared
    between sessions as `heads` says.

    Think times of tools and of persons are cut at `max_think_s`: those recorded reach 20 hours.
    Requests of sub-agents are left out; the notes say how many entries. Of `options`, the name and
    `max_rows` (sessions) count; 0 tokens are always an error.
    """
    name = options.name_for(path)
    sessions: list[Session] = []
    num_left_out = 0
    for line, fields in islice(json_lines(path), options.max_rows):
        recorded = _recorded(path, line, fields, max_think_s=max_think_s)
        num_left_out += len(fields["requests"]) - len(recorded.turns)
        sessions.append(_session(path, line, f"{name}-{recorded.id}", recorded, heads))
    notes = [f"read {path.name}", f"think times cut at {max_think_s:g} s"]
    if num_left_out:
        notes.append(f"left out {num_left_out} entries of sub-agents")
    return RecordedSessions(sessions=tuple(sessions), notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    num_prompt_tokens: int
    num_output_tokens: int
    think_s: float
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    id: str
    block_tokens: int
    head: tuple[int, int]
    turns: tuple[_Request, ...]


def _recorded(path: Path, line: int, fields: dict[str, Any], *, max_think_s: float) -> _Recorded:
    block_tokens = count(path, line, fields, "block_size", at_least=1)
    requests = fields.get("requests")
    if not isinstance(requests, list) or not all(isinstance(r, dict) for r in requests):
        raise RowError(path, line, "requests is no list of objects")
    turns = []
    for request in requests:
        if request.get("type") == "subagent":
            continue
        think_s = number(path, line, request, "think_time")
        if think_s < 0:
            raise RowError(path, line, f"think_time {think_s:g} is negative")
        num_prompt_tokens = count(path, line, request, "in", at_least=1)
        turns.append(
            _Request(
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=count(path, line, request, "out", at_least=1),
                think_s=min(think_s, max_think_s),
                ids=_ids(path, line, request, num_prompt_tokens // block_tokens),
            )
        )
    if not turns:
        raise RowError(path, line, "the session has no requests of its own")
    return _Recorded(
        id=str(fields.get("id", line)),
        block_tokens=block_tokens,
        head=(
            count(path, line, fields, "tool_tokens", at_least=0),
            count(path, line, fields, "system_tokens", at_least=0),
        ),
        turns=tuple(turns),
    )


def _ids(path: Path, line: int, request: dict[str, Any], expected: int) -> tuple[int, ...]:
    ids = request.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise RowError(path, line, f"hash_ids is no list of ids: {str(ids)[:80]}")
    if len(ids) != expected:
        reason = f"{len(ids)} hash_ids for {request['in']} tokens make no {expected} full blocks"
        raise RowError(path, line, reason)
    return tuple(ids)


def _session(path: Path, line: int, name: str, recorded: _Recorded, heads: Heads) -> Session:
    tool, system = recorded.head
    num_head_blocks = (tool + system) // recorded.block_tokens
    head_key = {
        Heads.OWN: None,
        Heads.EQUAL: key_base("session head", tool, system),
        Heads.ONE: key_base("session head"),
    }[heads]
    if not num_head_blocks:
        head_key = None
    stretches = _Stretches(recorded.block_tokens, key_base("session", name))
    if head_key is not None:
        stretches.begin_with(recorded.turns[0].ids[:num_head_blocks], head_key)
    for request in recorded.turns:
        if not stretches.learn(request.ids):
            raise RowError(path, line, "an id of hash_ids follows another id than it did before")
    turns: list[Turn] = []
    later: tuple[_Request, _Place] | None = None
    for request in reversed(recorded.turns):
        tail = stretches.tail(request, later)
        turn = Turn(
            segments=stretches.prompt(request, tail),
            num_output_tokens=request.num_output_tokens,
            think_s=request.think_s,
        )
        turns.append(turn)
        later = request, tail
    return Session(name=name, turns=tuple(reversed(turns)), head_key=head_key)


class _Place(NamedTuple):
    """Where tokens stand: so many tokens into the segment of a key."""

    key: int
    offset: int


class _Stretches:
    """The blocks of a session as few segments: a block that was first seen behind another one, as
    its first follower, stands in the same segment behind it."""

    def __init__(self, block_tokens: int, base: int) -> None:
        self._block_tokens = block_tokens
        self._next_key = base
        self._before: dict[int, int | None] = {}
        self._places: dict[int, _Place] = {}
        self._ends: dict[int, int] = {}  # of the segments that can grow [tokens]

    def begin_with(self, ids: tuple[int, ...], key: int) -> None:
        """These blocks, the first of a prompt, are the segment of this key, which ends there."""
        for index, block in enumerate(ids):
            self._before[block] = ids[index - 1] if index else None
            self._places[block] = _Place(key, index * self._block_tokens)

    def learn(self, ids: tuple[int, ...]) -> bool:
        """Give the new blocks of a prompt a place. False when one that is known stands behind
        another block than it did."""
        before: int | None = None
        for block in ids:
            if block not in self._before:
                self._before[block] = before
                self._places[block] = self._behind(before)
            elif self._before[block] != before:
                return False
            before = block
        return True

    def tail(self, request: _Request, later: tuple[_Request, _Place] | None) -> _Place:
        """Where the tokens behind the last full block of a prompt stand; `later` is the request
        after it and the same of that one."""
        num_blocks = len(request.ids)
        if later is not None:
            after, tail = later
            goes_on = after.num_prompt_tokens >= request.num_prompt_tokens
            if goes_on and after.ids[:num_blocks] == request.ids:
                return self._places[after.ids[num_blocks]] if after.ids[num_blocks:] else tail
        return self._new()

    def prompt(self, request: _Request, tail: _Place) -> tuple[Segment, ...]:
        places = [self._places[block] for block in request.ids]
        lengths = dict.fromkeys((place.key for place in places), 0)
        for place in places:
            lengths[place.key] += self._block_tokens
        num_tail_tokens = request.num_prompt_tokens - len(request.ids) * self._block_tokens
        if num_tail_tokens:
            lengths[tail.key] = lengths.get(tail.key, 0) + num_tail_tokens
        return tuple(Segment(key, num_tokens) for key, num_tokens in lengths.items())

    def _behind(self, before: int | None) -> _Place:
        if before is not None:
            key, offset = self._places[before]
            end = offset + self._block_tokens
            if self._ends.get(key) == end:
                self._ends[key] = end + self._block_tokens
                return _Place(key, end)
        place = self._new()
        self._ends[place.key] = self._block_tokens
        return place

    def _new(self) -> _Place:
        self._next_key += 1
        return _Place(self._next_key % KEYS, 0)
