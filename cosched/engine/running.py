"""What plans and memory need to know of the requests that run, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cosched.core.request import PLAIN, RequestClass
from cosched.core.view import Decodes
from cosched.engine import port
from cosched.engine.tracked import TrackedRequest
from cosched.planning.ledger import promised_tokens

__all__ = ["Running", "own_tokens"]


class Running(NamedTuple):
    """What is read of all running requests.

    own        KV tokens of each class outside the tree
    remaining  output still to come of each that may end early, where no plan has promised any
    certain    output still to come of each that cannot, likewise
    promised   KV tokens kept for what plans have promised
    next_step  KV tokens that their next decodes take
    mixes      all of them may decode beside a prefill
    ending     ids of those that are about to end
    are_plain  nothing of theirs is special (`Traits`), nor of any that is still in the batch
    """

    everyone: list[TrackedRequest]
    by_class: dict[RequestClass, Decodes]
    own: dict[RequestClass, int]
    remaining: list[int]
    certain: list[int]
    promised: int
    next_step: int
    mixes: bool
    ending: set[str]
    are_plain: bool

    @classmethod
    def of(cls, reqs: Sequence[Any], *, page_size: int) -> Running:
        """Of the requests of a batch that are not over."""
        everyone: list[TrackedRequest] = []
        remaining: list[int] = []
        certain: list[int] = []
        ending: set[str] = set()
        own = dict.fromkeys(RequestClass, 0)
        next_step = num_plain = promised = 0
        mixes = True
        decodes: dict[RequestClass, tuple[list[TrackedRequest], list[int]]]
        decodes = {request_class: ([], []) for request_class in RequestClass}
        for tracked, num_computed, num_own, num_output, is_ending in port.progress_of(reqs):
            everyone.append(tracked)
            request_class = tracked.request_class
            requests, contexts = decodes[request_class]
            requests.append(tracked)
            contexts.append(num_computed + 1)
            own[request_class] += num_own
            to_come = tracked.max_new_tokens - num_output
            num_rows = 1
            if tracked.traits is PLAIN:
                num_plain += 1
            else:
                mixes = mixes and tracked.traits.can_mix
                num_rows = tracked.traits.num_rows
            if not num_computed % page_size:
                next_step += page_size * num_rows
            if tracked.promised is None:
                (certain if tracked.reserves_all else remaining).append(to_come * num_rows)
            else:
                promised += promised_tokens(tracked.promised - num_output, num_rows)
            if is_ending:
                ending.add(tracked.rid)
        by_class = {request_class: Decodes(*lists) for request_class, lists in decodes.items()}
        are_plain = num_plain == len(reqs)
        return cls(
            everyone,
            by_class,
            own,
            remaining,
            certain,
            promised,
            next_step,
            mixes,
            ending,
            are_plain,
        )


def own_tokens(
    running: Running, unfinished: Iterable[TrackedRequest]
) -> Mapping[RequestClass, int]:
    """KV tokens of each class outside the tree, with those of prefills that are not finished."""
    own = dict(running.own)
    for tracked in unfinished:
        own[tracked.request_class] += tracked.num_own_tokens
    return own
