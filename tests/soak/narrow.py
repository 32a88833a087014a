"""A failure narrowed down: the same with fewer episodes, features and requests."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from tests.soak.run import Outcome, run
from tests.soak.spec import FEATURES, SoakSpec

_FORK = multiprocessing.get_context("fork")
"""What this process has imported need not be imported again; it must not have built an engine."""


def in_child(
    spec: SoakSpec,
    *,
    num_compared: int = 200,
    on_progress: Callable[[float], None] = lambda now_s: None,
) -> Outcome:
    """`run` in a process of its own, since a failed engine leaves state behind."""
    ours, theirs = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_run, args=(theirs, spec, num_compared))
    child.start()
    theirs.close()
    try:
        while True:
            message = ours.recv()
            if isinstance(message, Outcome):
                return message
            on_progress(message)
    except EOFError:
        child.join()
        ending = f"the process ended with exit code {child.exitcode}"
        return Outcome(spec=spec, failure=ending, signature=ending)
    finally:
        child.join()


def _run(pipe: Connection[Any, Any], spec: SoakSpec, num_compared: int) -> None:
    pipe.send(run(spec, num_compared=num_compared, on_progress=pipe.send))


def narrow(outcome: Outcome) -> Outcome:
    """The smallest soak found that fails alike; at least the one given."""
    assert outcome.failure is not None

    def fails(spec: SoakSpec) -> Outcome | None:
        print(".", end="", file=sys.stderr, flush=True)
        found = in_child(spec, num_compared=10_000 if outcome.signature == "output" else 0)
        return found if found.signature == outcome.signature else None

    best = outcome
    if outcome.episode is not None:
        last = outcome.episode
        for episodes in ((last,), (last - 1, last), tuple(range(max(last - 5, 0), last + 1))):
            alone = fails(replace(best.spec, episodes=tuple(e for e in episodes if e >= 0)))
            if alone is not None:
                best = alone
                break
    for feature in sorted(FEATURES.keys() - set(best.spec.without)):
        fewer = fails(replace(best.spec, without=(*best.spec.without, feature)))
        best = fewer or best
    if best.spec.episodes is not None:
        best = _fewer_requests(best, fails)
    print(file=sys.stderr)
    return best


def _fewer_requests(best: Outcome, fails: Callable[[SoakSpec], Outcome | None]) -> Outcome:
    """Leave out ever smaller runs of requests (delta debugging)."""
    rids = list(best.rids)
    size = max(len(rids) // 2, 1)
    while rids:
        for start in range(0, len(rids), size):
            kept = [*rids[:start], *rids[start + size :]]
            fewer = fails(replace(best.spec, requests=tuple(kept)))
            if fewer is not None:
                best, rids = fewer, kept
                break
        else:
            if size == 1:
                break
            size = max(size // 2, 1)
    return best
