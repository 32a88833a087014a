"""Read a decision log: why a request waited, what an iteration decided, whether it would again.

    python -m cosched.explain FILE                   the log in numbers, and ids of requests
    python -m cosched.explain FILE --rid R           the story of one request
    python -m cosched.explain FILE --iteration N     one decision in full
    python -m cosched.explain FILE --replan          plan every recorded view again and compare

A request's id R is the "id" of its response. FILE is what --decision-log named; its older parts
beside it (FILE-000000, ...) are read first. A line that cannot be read is left out and named on
stderr. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cosched.command_line import (
    Parser,
    add_json_option,
    checked,
    existing_file,
    run_command,
    whole,
)
from cosched.decision_log.read import Entry, read_log
from cosched.decision_log.replan import replan
from cosched.decision_log.story import Story
from cosched.decision_log.summary import LogSummary, describe, tell_decision, tell_summary
from cosched.engine.decision_records import RequestFacts
from cosched.errors import ConfigError
from cosched.policy.registry import planning_policy

__all__ = ["main"]


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
    what.add_argument(
        "--replan", action="store_true", help="plan again, and compare with what was recorded"
    )
    parser.add_argument(
        "--policy",
        "--cosched-policy",
        type=checked(planning_policy),
        metavar="NAME",
        help="who plans again (default: the recorded policy). Another one sees of the waiting "
        "requests those that the recorded policy looked at, in the order of arrival unless it "
        "keeps a pool of its own; it is refused where it asks for what the log does not hold, such "
        "as predictions in the log of a policy that makes none",
    )
    add_json_option(parser)
    parser.set_defaults(execute=_execute)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 2 and one sentence when the arguments or the log are wrong."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.policy is not None and not arguments.replan:
        parser.error("--policy goes with --replan")
    run_command(arguments)


def _execute(arguments: argparse.Namespace) -> dict[str, Any]:
    log = _Log(arguments.file)
    if arguments.rid is not None:
        result = _tell_story(log, arguments.rid)
    elif arguments.iteration is not None:
        result = _show_iteration(log, arguments.iteration)
    elif arguments.replan:
        result = _replan(log, arguments.policy)
    else:
        result = _summarize(log)
    return {"file": str(log.path), **result, "bad_lines": len(log.bad_lines)}


class _Log:
    """A log that is read from its beginning each time; a bad line is told once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad_lines: set[str] = set()

    def __iter__(self) -> Iterator[Entry]:
        return read_log(self.path, report=self._report)

    def _report(self, line: str) -> None:
        if line not in self.bad_lines:
            self.bad_lines.add(line)
            print(line, file=sys.stderr)


class _Ids:
    """Some ids of the requests in a log."""

    _MOST = 10

    def __init__(self) -> None:
        self._shown: dict[str, None] = {}
        self._has_more = False

    def add(self, entry: Entry) -> None:
        for facts in entry.decision.requests:
            if len(self._shown) < self._MOST:
                self._shown[facts.rid] = None
            elif facts.rid not in self._shown:
                self._has_more = True

    def sentence(self) -> str:
        if not self._shown:
            return "It has no requests"
        return (
            f"Its requests (each the id of a response): {', '.join(self._shown)}"
            f"{', ...' * self._has_more}"
        )


def _tell_story(log: _Log, rid: str) -> dict[str, Any]:
    # A request is described where a policy first looked at it; what it waited before is told too.
    found: dict[int, RequestFacts] = {}
    first = None
    ids = _Ids()
    for entry in log:
        first = first or entry.decision
        ids.add(entry)
        found |= {facts.arrival_seq: facts for facts in entry.decision.requests if facts.rid == rid}
    if not found or first is None:
        raise ConfigError(
            f"no request {rid!r} in {str(log.path)!r}: no plan looked at it. {ids.sentence()}"
        )
    stories = [Story(facts, first) for facts in found.values()]
    for entry in log:
        for story in stories:
            story.add(entry)
    for story in stories:
        print("\n".join(story.lines()))
    return {"stories": [story.to_dict() for story in stories]}


def _show_iteration(log: _Log, number: int) -> dict[str, Any]:
    first = last = None
    for entry in log:
        last = entry.decision.number
        first = last if first is None else first
        if last == number:
            shown = describe(entry)
            print("\n".join(tell_decision(shown)))
            return shown
    raise ConfigError(
        f"no iteration {number} in {str(log.path)!r}: it holds "
        + ("none" if last is None else f"{first} to {last}")
    )


def _replan(log: _Log, policy: str | None) -> dict[str, Any]:
    result = replan(log, policy=policy)
    print(
        f"{result.policy}: {result.num_equal} of {result.num_plans} plans are equal, "
        f"{result.num_same_work} do the same work; "
        f"{result.num_unanswered} could not be made from what was recorded"
    )
    if result.num_cut:
        print(
            f"{result.num_cut} plans are of the requests that the recorded policy looked at; "
            "more waited"
        )
    if result.first_difference is not None:
        print(f"first difference: {result.first_difference}")
    return asdict(result)


def _summarize(log: _Log) -> dict[str, Any]:
    summary = LogSummary()
    header = None
    ids = _Ids()
    for entry in log:
        header = entry.header
        ids.add(entry)
        summary.add(entry)
    if header is None:
        raise ConfigError(f"no decisions in {str(log.path)!r}")
    result = {"policy": header.policy, "versions": header.versions, **summary.to_dict()}
    print(f"{log.path}: policy {header.policy}")
    print("\n".join(tell_summary(result)))
    print(f"{ids.sentence()}; --rid ID tells a request's story")
    return result


if __name__ == "__main__":
    main()
