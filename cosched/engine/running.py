"""What plans and memory need to know of the requests that run, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cosched.core.request import PLAIN, RequestClass
from cosched.core.view import Decodes
from cosched.engine import port
from cosched.engine.tracked import TrackedRequest
from cosched.planning.ledger import promised_tokens

__all__ = ["Running", "own_tokens", "taken_by_guests"]


class Running(NamedTuple):
    """What is read of all running requests.

    num_shared tokens at the head of each whose KV the tree owns
    num_own    KV tokens of each outside the tree
    num_output  tokens that each has generated
    promises   output tokens for which plans have set KV aside for each; None: none have
    own        KV tokens of each class outside the tree
    remaining  output still to come of each that may end early, where no plan has promised any
    certain    output still to come of each that cannot, likewise
    promised   KV tokens kept for what plans have promised, less what guests have taken of it
    taken      rid of a guest -> KV tokens that it has taken of what its host was promised
    lent       rid of its host -> those of all its guests
    next_step  KV tokens that their next decodes take
    mixes      all of them may decode beside a prefill
    ending     ids of those that are about to end
    are_plain  nothing of theirs is special (`Traits`), nor of any that is still in the batch
    """

    everyone: list[TrackedRequest]
    num_shared: list[int]
    num_own: list[int]
    num_output: list[int]
    promises: list[int | None]
    by_class: dict[RequestClass, Decodes]
    own: dict[RequestClass, int]
    remaining: list[int]
    certain: list[int]
    promised: int
    taken: Mapping[str, int]
    lent: Mapping[str, int]
    next_step: int
    mixes: bool
    ending: set[str]
    are_plain: bool

    @classmethod
    def of(cls, reqs: Sequence[Any], *, page_size: int) -> Running:
        """Of the requests of a batch that are not over."""
        everyone: list[TrackedRequest] = []
        all_shared: list[int] = []
        all_own: list[int] = []
        all_output: list[int] = []
        promises: list[int | None] = []
        online: tuple[list[TrackedRequest], list[int]] = [], []
        offline: tuple[list[TrackedRequest], list[int]] = [], []
        remaining: list[int] = []
        certain: list[int] = []
        ending: set[str] = set()
        own_offline = next_step = num_plain = num_promised = num_left = 0
        guests: list[TrackedRequest] = []
        mixes = True
        class_offline = RequestClass.OFFLINE
        progress = port.progress_of(reqs)
        for tracked, num_computed, num_shared, num_own, num_output, is_ending in progress:
            everyone.append(tracked)
            all_shared.append(num_shared)
            all_own.append(num_own)
            all_output.append(num_output)
            if tracked.request_class is class_offline:
                own_offline += num_own
                requests, contexts = offline
            else:
                requests, contexts = online
            requests.append(tracked)
            contexts.append(num_computed + 1)
            num_rows = 1
            if tracked.traits is PLAIN:
                num_plain += 1
            else:
                mixes = mixes and tracked.traits.can_mix
                num_rows = tracked.traits.num_rows
            if not num_computed % page_size:
                next_step += page_size * num_rows
            promised = tracked.promised
            promises.append(promised)
            if promised is None:
                to_come = (tracked.max_new_tokens - num_output) * num_rows
                (certain if tracked.reserves_all else remaining).append(to_come)
            else:
                num_promised += 1
                if promised > num_output:
                    num_left += (promised - num_output) * num_rows
                if tracked.is_hosted:
                    guests.append(tracked)
            if is_ending:
                ending.add(tracked.rid)
        taken, lent = _lent(guests, everyone)
        return cls(
            everyone,
            all_shared,
            all_own,
            all_output,
            promises,
            {RequestClass.ONLINE: Decodes(*online), RequestClass.OFFLINE: Decodes(*offline)},
            {
                RequestClass.ONLINE: sum(all_own) - own_offline,
                RequestClass.OFFLINE: own_offline,
            },
            remaining,
            certain,
            promised_tokens(num_left, num_promised) - sum(lent.values()),
            taken,
            lent,
            next_step,
            mixes,
            ending,
            num_plain == len(reqs),
        )


def _lent(
    guests: Sequence[TrackedRequest], everyone: Sequence[TrackedRequest]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """What guests have taken of their hosts' promises, and what hosts have lent. A guest takes no
    more than its host has left; of one whose host is over nothing counts."""
    taken: dict[str, int] = {}
    lent: dict[str, int] = {}
    if guests:
        here = {tracked.rid for tracked in everyone}
        for guest in guests:
            host = guest.host
            if host is None or host.promised is None or host.rid not in here:
                continue
            assert guest.promised is not None, f"{guest.rid=}"
            left = host.promised - host.num_output_tokens - lent.get(host.rid, 0)
            num_taken = max(min(guest.num_output_tokens - guest.promised, left), 0)
            taken[guest.rid] = num_taken
            lent[host.rid] = lent.get(host.rid, 0) + num_taken
    return taken, lent


def taken_by_guests(everyone: Sequence[TrackedRequest]) -> Mapping[str, int]:
    """Of running requests: rid of a guest -> KV tokens that it has taken of what its host was
    promised (`Plan.hosts`)."""
    return _lent([tracked for tracked in everyone if tracked.is_hosted], everyone)[0]


def own_tokens(
    running: Running, unfinished: Iterable[TrackedRequest]
) -> Mapping[RequestClass, int]:
    """KV tokens of each class outside the tree, with those of prefills that are not finished."""
    own = dict(running.own)
    for tracked in unfinished:
        own[tracked.request_class] += tracked.num_own_tokens
    return own
