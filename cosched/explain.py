"""Read a decision log: why a request waited, what an iteration decided.

A request's id R is the "id" of its response. FILE is what --decision-log named; its older parts
beside it (FILE-000000, ...) are read first. A line that cannot be read is skipped and named on
stderr. The last line is one JSON object.

    cosched explain FILE                   the log in numbers, and ids of requests
    cosched explain FILE --rid R           the story of one request
    cosched explain FILE --iteration N     one decision in full
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from cosched.cli import JsonOption, OldFile, new_app, run, whole
from cosched.core.plan import Plan
from cosched.engine.log.decisions import Decision, Header, RequestFacts
from cosched.engine.log.log_summary import LogSummary, table
from cosched.engine.log.read import Entry, read_log
from cosched.engine.log.story import Story
from cosched.errors import ConfigError

_MOST_IDS = 10


app = new_app("explain", __doc__)
main = partial(run, "explain")


@app.default
@dataclass(kw_only=True)
class Explain(JsonOption):
    file: OldFile = field(kw_only=False)
    """a decision log"""
    rid: Annotated[str | None, Parameter(metavar="R")] = None
    """the request whose story to tell: the "id" of its response"""
    iteration: Annotated[int | None, whole(0)] = None
    """the plan to show, from 0"""

    def __call__(self) -> int:
        if self.rid is not None and self.iteration is not None:
            raise ConfigError("--rid and --iteration: give one of them")
        bad_lines: list[str] = []

        def report(line: str) -> None:
            bad_lines.append(line)
            print(line, file=sys.stderr)

        entries = read_log(self.file, report=report)
        if self.rid is not None:
            result = _tell_story(entries, self.rid, self.file)
        elif self.iteration is not None:
            result = _show_iteration(entries, self.iteration, self.file)
        else:
            result = _summarize(entries, self.file)
        return self.finish({"file": str(self.file), **result, "bad_lines": len(bad_lines)})


def _tell_story(entries: Iterator[Entry], rid: str, path: Path) -> dict[str, Any]:
    stories: dict[RequestFacts, Story] = {}
    first: Decision[Plan] | None = None
    seen_s: list[float] = []
    named: dict[str, None] = {}
    for entry in entries:
        decision = entry.decision
        first = first or decision
        for facts in decision.requests:
            named[facts.rid] = None
            if facts.rid == rid and facts not in stories:
                stories[facts] = Story(facts, first=first, seen_s=seen_s)
        for story in stories.values():
            story.add(entry)
        if decision.outcome != "replanned":
            seen_s.append(decision.now_s)
    if not stories:
        raise ConfigError(f"no request {rid!r} in {str(path)!r}: no plan names it. {_ids(named)}")
    for story in stories.values():
        print("\n".join(story.lines()))
    return {"stories": [story.to_dict() for story in stories.values()]}


def _show_iteration(entries: Iterator[Entry], number: int, path: Path) -> dict[str, Any]:
    first = last = None
    for entry in entries:
        last = entry.decision.iteration
        first = last if first is None else first
        if last == number:
            shown: dict[str, Any] = msgspec.to_builtins(entry.decision)
            plan: dict[str, Any] = shown["plan"]
            print("\n".join(table({name: shown[name] for name in shown if name != "plan"} | plan)))
            return shown
    held = "none" if last is None else f"{first} to {last}"
    raise ConfigError(f"no iteration {number} in {str(path)!r}: it holds {held}")


def _summarize(entries: Iterator[Entry], path: Path) -> dict[str, Any]:
    summary = LogSummary()
    header: Header | None = None
    named: dict[str, None] = {}
    for entry in entries:
        header = entry.header
        named |= dict.fromkeys(facts.rid for facts in entry.decision.requests)
        summary.add(entry)
    if header is None:
        raise ConfigError(f"no decisions in {str(path)!r}")
    result = {"policy": header.policy, "versions": header.versions, **summary.to_dict()}
    print("\n".join(table(result)))
    print(f"{_ids(named)}; --rid ID tells a request's story")
    return result


def _ids(named: dict[str, None]) -> str:
    if not named:
        return "The log has no requests"
    more = ", ..." if len(named) > _MOST_IDS else ""
    shown = ", ".join(islice(named, _MOST_IDS))
    return f"Its requests (each the id of a response): {shown}{more}"


if __name__ == "__main__":
    sys.exit(main())
