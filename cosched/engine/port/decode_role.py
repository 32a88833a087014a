"""The queues of a decode server (PD disaggregation)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from cosched.engine.port.request import answer_with_error


def queued_for_memory(scheduler: Any) -> Sequence[Any]:
    """Requests that have no KV memory: new ones, and those that ran out of it."""
    queue = scheduler.disagg_decode_prealloc_queue
    return [*(one.req for one in queue.queue), *queue.retracted_queue]


def with_memory(scheduler: Any) -> Sequence[Any]:
    """Requests that have KV memory, and run or wait for their KV or for a place in the batch."""
    coming = [one.req for one in scheduler.disagg_decode_transfer_queue.queue]
    return [*coming, *scheduler.waiting_queue, *scheduler.running_batch.reqs]


@contextlib.contextmanager
def waiting_for_memory(
    scheduler: Any, is_offline: Callable[[Any], bool], num_offline: int
) -> Iterator[None]:
    """SGLang sees online requests first, and `num_offline` of the others. Those that ran out of
    memory come before new ones; while one is seen that does not fit, SGLang looks at no other."""
    queue = scheduler.disagg_decode_prealloc_queue

    def divide(entries: Sequence[Any], req_of: Callable[[Any], Any], most: int) -> Any:
        offline = [entry for entry in entries if is_offline(req_of(entry))]
        online = [entry for entry in entries if not is_offline(req_of(entry))]
        return [*online, *offline[:most]], offline[most:]

    has_online = any(not is_offline(one.req) for one in queue.queue)
    most = 0 if has_online else num_offline  # offline ones would block them
    queue.retracted_queue, kept = divide(queue.retracted_queue, lambda req: req, most)
    new, kept_new = divide(queue.queue, lambda one: one.req, num_offline)
    queue.queue = new
    scheduler.waiting_queue.sort(key=is_offline)
    try:
        yield
    finally:
        queue.retracted_queue = [*queue.retracted_queue, *kept]
        queue.queue = [*queue.queue, *kept_new]
        scheduler.waiting_queue.sort(key=is_offline)


def decodes_fit(batch: Any) -> bool:
    """Whether there is memory for the next token of all requests of a batch."""
    return bool(batch.check_decode_mem())


def retract(scheduler: Any, batch: Any, may_go: Callable[[Any], bool]) -> None:
    """Take requests out of the running batch until the others have memory, the youngest first.
    SGLang takes others if that is not enough."""
    left = len(batch.reqs)
    for number in reversed(range(len(batch.reqs))):
        req = batch.reqs[number]
        if left > 1 and may_go(req) and not batch.check_decode_mem():
            left -= 1
            is_saved = batch.release_req(number, left)
            batch.filter_batch(keep_indices=[n for n in range(len(batch.reqs)) if n != number])
            if is_saved:
                scheduler._add_request_to_queue(req, is_retracted=True)
            else:
                message = "no memory for its KV, on the device or on the host; send it again later"
                answer_with_error(scheduler, req, HTTPStatus.SERVICE_UNAVAILABLE, message)
