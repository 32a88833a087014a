"""Pipeline parallelism: each stage computes a part of the layers, one microbatch at a time.

SGLang's loop goes round its microbatches. Each has a running batch of its own; when it is due, its
results are known, and the other ones are under way. Queue, KV memory, rows and the one unfinished
prefill are common to all: consecutive chunks of it run in consecutive microbatches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sglang.srt.runtime_context import get_parallel

from cosched.engine.port.batch import computed_of, rows_of

_TAG = int.from_bytes(b"CoSc", byteorder="big")
"""Of messages between stages, beside SGLang's `P2PTag`."""


class Relay:
    """Passes a message from each stage to the next one, in the order of the microbatches."""

    def __init__(self, scheduler: Any) -> None:
        self._group = scheduler.pp_group
        self._sent: list[Any] = []

    def __call__(self, own: bytes | None) -> bytes:
        """own: None on later stages, which receive it."""
        stage = self._group.rank_in_group
        message = self._group.recv_object(src=stage - 1, tag=_TAG) if own is None else own
        for sent in self._sent:
            sent.work.wait()
        self._sent = []
        if not self._group.is_last_rank:
            self._sent = self._group.send_object(message, dst=stage + 1, async_send=True, tag=_TAG)
        return bytes(message)


def microbatch(scheduler: Any) -> int:
    """Number of the microbatch that is due."""
    if get_parallel().pp_size == 1:
        return 0
    due = scheduler.running_batch
    return next(n for n, batch in enumerate(scheduler.running_mbs) if batch is due)


class Elsewhere(NamedTuple):
    """Running requests of another microbatch, as `rows_of` and `computed_of` a running batch."""

    reqs: Sequence[Any]
    rows: Any
    computed: Any


def elsewhere(scheduler: Any) -> Iterator[Elsewhere]:
    """The running requests of microbatches that are not due, without the unfinished prefill."""
    if get_parallel().pp_size == 1:
        return
    due = microbatch(scheduler)
    for number, running in enumerate(scheduler.running_mbs):
        if number == due:
            continue
        under_way = scheduler.mbs[number]
        for batch in (running, under_way):
            if not batch or not batch.reqs or (batch is under_way and batch is running):
                continue
            reqs, rows, computed = batch.reqs, rows_of(batch), computed_of(batch)
            if batch is under_way:
                if not batch.forward_mode.is_extend():
                    continue  # its requests are in the running batch
                keep = [n for n, req in enumerate(reqs) if req is not batch.chunked_req]
                reqs, rows, computed = [reqs[n] for n in keep], rows[keep], computed[keep]
            yield Elsewhere(reqs, rows, computed)


def forget_last(scheduler: Any) -> None:
    """Nothing of the microbatch that is due runs. SGLang would add what it ran last to its running
    batch once more, also requests that a plan has preempted since."""
    if get_parallel().pp_size > 1:
        scheduler.last_mbs[microbatch(scheduler)] = None


@contextlib.contextmanager
def pinning_chunk(scheduler: Any) -> Iterator[None]:
    """Plans cannot preempt the unfinished prefill while another microbatch computes a chunk of
    it."""
    req = scheduler.chunked_req
    if req is None or get_parallel().pp_size == 1 or not req.inflight_middle_chunks:
        yield
    else:
        with req.cosched.pinned():
            yield
