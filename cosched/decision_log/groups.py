"""Groups of equal length and the KV of those that wait (EcoServe Figures 2 and 6), from a decision
log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from cosched.decision_log.read import Entry
from cosched.engine.decision_records import Outcome

__all__ = ["Groups", "read_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """sizes: requests whose KV was promised by the same plan for equally many blocks to come.

    occupied_* [tokens]: what a request has in KV memory
    occupied_new      when it is held with its first token, for want of a promise
    occupied_stopped  when it is held with more of them, or stopped
    occupied_chunk    while it waits with a part of its prompt, once for each part
    """

    sizes: list[int] = field(default_factory=list)
    occupied_new: list[int] = field(default_factory=list)
    occupied_stopped: list[int] = field(default_factory=list)
    occupied_chunk: list[int] = field(default_factory=list)


def read_groups(entries: Iterable[Entry], *, block_tokens: int) -> Groups:
    """block_tokens: lengths are equal that take equally many blocks of it (EcoServe §3.2: 32)."""
    groups = Groups()
    promised: dict[int, int] = {}
    held: set[int] = set()
    for entry in entries:
        view, plan = entry.decision.view, entry.decision.plan
        if entry.decision.result.outcome is Outcome.REPLANNED:
            continue
        rows = (*view.running, *view.unfinished, *view.online, *view.offline, *view.asked)
        tokens = {row[0]: (row[1], row[2]) for row in rows}
        num_blocks: Counter[int] = Counter()
        for seq, num_promised in plan.promised:
            num_output = tokens.get(seq, (0, 0))[0]
            if promised.get(seq, 0) <= num_output < num_promised:
                num_blocks[-(-(num_promised - num_output) // block_tokens)] += 1
            promised[seq] = num_promised
        groups.sizes.extend(num_blocks.values())
        stopped = [seq for seq, _ in plan.preempted]
        for seq in {*plan.held, *stopped} - held:
            num_output, num_computed = tokens.get(seq, (0, 0))
            is_new = num_output <= 1 and seq not in stopped
            (groups.occupied_new if is_new else groups.occupied_stopped).append(num_computed)
        groups.occupied_chunk.extend(row[2] for row in view.unfinished)
        held = set(plan.held)
        for seq, _, _ in entry.decision.result.finished:
            promised.pop(seq, None)
    return groups
