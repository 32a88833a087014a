"""A decision log, read back line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cosched.core.plan import Plan
from cosched.core.request import RequestClass
from cosched.engine.log.decisions import FORMAT, Decision, Header, RequestFacts
from cosched.engine.log.parts import parts_of
from cosched.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision. facts: of the requests that the log has named so far, by rid."""

    header: Header
    decision: Decision[Plan]
    facts: dict[str, RequestFacts] = field(default_factory=dict)

    def class_of(self, rid: str) -> RequestClass | None:
        """None if the line with its facts is missing."""
        facts = self.facts.get(rid)
        return None if facts is None else facts.request_class


_decoder = msgspec.json.Decoder(Header | Decision[Plan])


def read_log(path: Path, *, report: Callable[[str], None]) -> Iterator[Entry]:
    """The decisions of a log in their order, from the oldest part that is left.

    A line that cannot be used is left out, and `report` gets file, line number and reason. So is a
    part that does not begin with a header. ConfigError if there is no such file, if it is no
    decision log, and if it has another format.
    """
    parts = parts_of(path)
    facts: dict[str, RequestFacts] = {}
    for part in parts:
        header: Header | None = None
        with part.open("rb") as file:
            for number, line in enumerate(file, 1):
                reason = "no header before it"
                try:
                    record = _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    record, reason = None, str(error)
                if isinstance(record, Header):
                    header = record
                    if header.format != FORMAT:
                        raise ConfigError(
                            f"the decision log has format {header.format}; this version of cosched "
                            f"reads format {FORMAT}"
                        )
                elif header is None:
                    if len(parts) == 1:
                        raise ConfigError(
                            f"{str(part)!r} is no decision log: it does not begin with a header "
                            f"({reason})"
                        )
                    report(f"{part}:{number}: no header, so this part is left out ({reason})")
                    break
                elif record is None:
                    report(f"{part}:{number}: {reason}")
                else:
                    facts.update((one.rid, one) for one in record.requests)
                    yield Entry(header, record, facts)
