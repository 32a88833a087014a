"""Read a decision log: why a request waited, what an iteration decided.

    python -m cosched.explain FILE                   the log in numbers, and ids of requests
    python -m cosched.explain FILE --rid R           the story of one request
    python -m cosched.explain FILE --iteration N     one decision in full

A request's id R is the "id" of its response. FILE is what --decision-log named; its older parts
beside it (FILE-000000, ...) are read first. A line that cannot be read is left out and named on
stderr. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from cosched.command_line import Parser, add_json_option, existing_file, run_command, whole
from cosched.engine.decision_log.read import Entry, read_log
from cosched.engine.decision_log.story import Story
from cosched.engine.decision_log.summary import LogSummary, table
from cosched.engine.decisions import Decision, Header, RequestFacts
from cosched.errors import ConfigError

_MOST_IDS = 10


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m cosched.explain", description=__doc__)
    parser.add_argument("file", type=existing_file, metavar="FILE", help="a decision log")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--rid", metavar="R", help='the request whose story to tell: the "id" of its response'
    )
    what.add_argument(
        "--iteration", type=whole(at_least=0), metavar="N", help="the plan to show, from 0"
    )
    add_json_option(parser)
    parser.set_defaults(execute=_execute)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments or the log are wrong."""
    run_command(build_parser().parse_args(argv))


def _execute(arguments: argparse.Namespace) -> dict[str, Any]:
    bad_lines: list[str] = []

    def report(line: str) -> None:
        bad_lines.append(line)
        print(line, file=sys.stderr)

    path: Path = arguments.file
    entries = read_log(path, report=report)
    if arguments.rid is not None:
        result = _tell_story(entries, arguments.rid, path)
    elif arguments.iteration is not None:
        result = _show_iteration(entries, arguments.iteration, path)
    else:
        result = _summarize(entries, path)
    return {"file": str(path), **result, "bad_lines": len(bad_lines)}


def _tell_story(entries: Iterator[Entry], rid: str, path: Path) -> dict[str, Any]:
    stories: dict[RequestFacts, Story] = {}
    first: Decision | None = None
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
            print("\n".join(table(shown)))
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
        return "It has no requests"
    more = ", ..." if len(named) > _MOST_IDS else ""
    shown = ", ".join(islice(named, _MOST_IDS))
    return f"Its requests (each the id of a response): {shown}{more}"


if __name__ == "__main__":
    main()
