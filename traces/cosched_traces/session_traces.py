"""Reader of recorded sessions of a coding agent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from cosched_traces.errors import RowError
from cosched_traces.files import Ids, Positive, convert, json_lines
from cosched_traces.seeds import KEYS, key_base
from cosched_traces.sessions import RecordedSessions, Session, Turn
from cosched_traces.workload import Segment

MAX_THINK_S = 60.0


def read_sessions_jsonl(path: Path, *, name: str | None = None) -> RecordedSessions:
    """kv-cache-tester: one session a line, ``{"id", "block_size", "tool_tokens", "system_tokens",
    "requests": [{"in", "out", "hash_ids", "think_time"}, …]}``.

    An id stands for a full block of a prompt and all tokens before it, within one session. The
    tokens after the last full block are the beginning of what follows if the next request continues
    this prompt, else they are its own. Sessions with as many tokens of tool definitions and as many
    of the system prompt share the full blocks of both.

    Think times of tools and of persons are cut at `MAX_THINK_S`: those recorded reach 20 hours.
    Requests of sub-agents are left out and counted in the notes.
    """
    name = name or path.name.split(".")[0]
    sessions: list[Session] = []
    num_left_out = 0
    for line, recorded in json_lines(path, _Recorded):
        requests = _own_requests(path, line, recorded)
        num_left_out += len(recorded.requests) - len(requests)
        session_name = f"{name}-{line if recorded.id is None else recorded.id}"
        stretches, head_key = _stretches(path, line, session_name, recorded, requests)
        turns = _turns(requests, stretches)
        sessions.append(Session(name=session_name, turns=turns, head_key=head_key))
    notes = [f"read {path.name}", f"think times cut at {MAX_THINK_S:g} s"]
    if num_left_out:
        notes.append(f"left out {num_left_out} entries of sub-agents")
    return RecordedSessions(sessions=tuple(sessions), notes=tuple(notes))


class _Request(msgspec.Struct, frozen=True):
    num_prompt_tokens: Positive = msgspec.field(name="in")
    num_output_tokens: Positive = msgspec.field(name="out")
    think_s: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(name="think_time")
    ids: Ids = msgspec.field(name="hash_ids")


class _Recorded(msgspec.Struct):
    block_size: Positive
    tool_tokens: Annotated[int, msgspec.Meta(ge=0)]
    system_tokens: Annotated[int, msgspec.Meta(ge=0)]
    requests: list[dict[str, Any]]
    id: str | int | None = None


def _own_requests(path: Path, line: int, recorded: _Recorded) -> list[_Request]:
    """Requests that are not of a sub-agent."""
    requests = [
        convert(path, line, fields, _Request)
        for fields in recorded.requests
        if fields.get("type") != "subagent"
    ]
    if not requests:
        raise RowError(path, line, "the session has no requests of its own")
    for request in requests:
        num_ids, expected = len(request.ids), request.num_prompt_tokens // recorded.block_size
        if num_ids != expected:
            reason = (
                f"{num_ids} hash_ids for {request.num_prompt_tokens} tokens make no {expected} "
                "full blocks"
            )
            raise RowError(path, line, reason)
    return requests


def _stretches(
    path: Path, line: int, name: str, recorded: _Recorded, requests: list[_Request]
) -> tuple[_Stretches, int | None]:
    """The places of the blocks of a session, and the key of its head if it has one."""
    tool, system = recorded.tool_tokens, recorded.system_tokens
    num_head_blocks = (tool + system) // recorded.block_size
    head_key = key_base("session head", tool, system) if num_head_blocks else None
    stretches = _Stretches(recorded.block_size, key_base("session", name))
    if head_key is not None:
        stretches.begin_with(requests[0].ids[:num_head_blocks], head_key)
    for request in requests:
        if not stretches.learn(request.ids):
            raise RowError(path, line, "an id of hash_ids follows another id than it did before")
    return stretches, head_key


def _turns(requests: list[_Request], stretches: _Stretches) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    later: tuple[_Request, _Place] | None = None
    for request in reversed(requests):
        tail = stretches.tail(request, later)
        turn = Turn(
            segments=stretches.prompt(request, tail),
            num_output_tokens=request.num_output_tokens,
            think_s=min(request.think_s, MAX_THINK_S),
        )
        turns.append(turn)
        later = request, tail
    return tuple(reversed(turns))


class _Place(NamedTuple):
    """A place of tokens: `offset` tokens into the segment `key`."""

    key: int
    offset: int


class _Stretches:
    """The blocks of a session as few segments: the first block that follows another one is in the
    same segment."""

    def __init__(self, block_tokens: int, base: int) -> None:
        self._block_tokens = block_tokens
        self._next_key = base
        self._before: dict[int, int | None] = {}
        self._places: dict[int, _Place] = {}
        self._ends: dict[int, int] = {}  # of the segments that can grow [tokens]

    def begin_with(self, ids: tuple[int, ...], key: int) -> None:
        """These first blocks of a prompt are the whole segment of this key."""
        for index, block in enumerate(ids):
            self._before[block] = ids[index - 1] if index else None
            self._places[block] = _Place(key, index * self._block_tokens)

    def learn(self, ids: tuple[int, ...]) -> bool:
        """Give the new blocks of a prompt a place. False if a known one follows another block than
        before."""
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
        """The place of the tokens after the last full block of a prompt; `later` is the next
        request and its such place."""
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
