"""SGLang builds the prefill batch of a plan.

SGLang's `Scheduler._get_new_batch_prefill_raw` stays in charge of building batches. It is given a
short waiting queue (the requests of the plan, in its order) and a `PrefillAdder` that knows how
many tokens each of them gets; everything else it does (LoRA, mixed batches, HiCache, logprobs) is
its own.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """The part of a plan that `PlannedPrefillAdder` follows.

    num_tokens  rid -> prompt tokens
    total       prompt tokens of all requests, each in whole pages
    taken       rid of a running guest -> KV tokens that it has of what was promised to its host
    """

    num_tokens: Mapping[str, int]
    total: int
    taken: Mapping[str, int]


def adder_class(scheduler: Any) -> Callable[..., PlannedPrefillAdder]:
    """What `Scheduler.get_prefill_adder_class` returns: an adder that follows the plan that is
    being built (`Scheduler.cosched_prefill`), if there is one."""
    return partial(PlannedPrefillAdder, plan=getattr(scheduler, "cosched_prefill", None))


class PlannedPrefillAdder(PrefillAdder):  # type: ignore[misc]  # SGLang's classes are untyped here
    """SGLang's adder with a token limit per request. Without a plan it is the stock one.

    Memory, slot and alignment rules are the stock ones; a refusal of one request does not end the
    admission of those behind it, because the plan already says what fits. The stock rule that one
    prefill at most stays unfinished holds by itself there: a cut one takes all that is left.
    """

    rem_chunk_tokens: int | None

    def __init__(self, *args: Any, plan: PrefillPlan | None, **kwargs: Any) -> None:
        self._plan = plan
        super().__init__(*args, **kwargs)

    def _get_running_request_total_token_offset(self, req: Any) -> Any:
        promised = _promised(req)
        if promised is None:
            return super()._get_running_request_total_token_offset(req)
        taken = self._plan.taken.get(req.rid, 0) if self._plan is not None else 0
        return max(promised - len(req.output_ids), 0) - taken

    def add_chunked_req(self, req: Any) -> Any:
        if self._plan is not None:
            self.chunked_req_limit = self._plan.num_tokens[req.rid]
        with _asking_as_promised(req):
            return super().add_chunked_req(req)

    def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        if self._plan is None:
            return super().add_one_req(req, *args, **kwargs)
        # Whole pages, as the stock adder counts: a chunk of the plan ends on a page boundary, and
        # the end of a prompt is rounded up.
        limit = self.ceil_paged_tokens(self._plan.num_tokens.get(req.rid, 0))
        if limit <= 0:
            return AddReqResult.CONTINUE
        outer = self.rem_chunk_tokens
        if outer is not None:
            self.rem_chunk_tokens = limit
        with _asking_as_promised(req):
            super().add_one_req(req, *args, **kwargs)
        if outer is not None:
            assert self.rem_chunk_tokens is not None
            self.rem_chunk_tokens = outer - (limit - self.rem_chunk_tokens)
        return AddReqResult.CONTINUE

    def _select_prefill_admission(self, req: Any, **options: Any) -> Any:
        admission = super()._select_prefill_admission(req, **options)
        if self._plan is None or isinstance(admission, AddReqResult):
            return admission
        # A request may be cut that is whole in the plan: what it has in host memory was not loaded.
        if admission.is_chunked and (self.new_chunked_req or options["has_chunked_req"]):
            return AddReqResult.OTHER
        return admission


def _promised(req: Any) -> int | None:
    """Output tokens for which a plan has set KV aside, generated ones included."""
    tracked = getattr(req, "cosched", None)
    return None if tracked is None else tracked.promised


@contextlib.contextmanager
def _asking_as_promised(req: Any) -> Iterator[None]:
    """The adder asks for room for the output that a request was promised: it reads that off the
    limit in its sampling parameters."""
    promised = _promised(req)
    if promised is None:
        yield
        return
    own = req.sampling_params
    req.sampling_params = copy.copy(own)
    req.sampling_params.max_new_tokens = promised
    req.sampling_params.ignore_eos = False  # another way through the adder, which asks for all
    try:
        yield
    finally:
        req.sampling_params = own


def build_prefill(
    original: Callable[..., tuple[Any, Any]],
    scheduler: Any,
    plan: PrefillPlan,
    candidates: Sequence[Any],
    running_batch: Any,
) -> tuple[Any, Any, list[Any]]:
    """Have SGLang build the batch of a plan.

    original    its own `_get_new_batch_prefill_raw`, which lacks the running batch
    candidates  the waiting requests of the plan, in its order

    Returns the batch or None, the running batch, and what the waiting queue holds afterwards: the
    candidates that were not admitted. The queue itself is as before.
    """
    waiting, chunk_size = scheduler.waiting_queue, scheduler.chunked_prefill_size

    def build(running_batch: Any) -> tuple[Any, Any]:
        running_batch.batch_is_full = False  # it remembers a verdict on another plan
        scheduler.waiting_queue = list(candidates)
        return original(running_batch=running_batch)

    try:
        if chunk_size is not None:
            num_mixed = len(running_batch.reqs) if scheduler.is_mixed_chunk else 0
            scheduler.chunked_prefill_size = num_mixed + plan.total
        scheduler.cosched_prefill = plan
        batch, running_batch = build(running_batch)
        scheduler.cosched_prefill = None
        scheduler.chunked_prefill_size = chunk_size
        if batch is None and running_batch.is_empty():
            # The engine is idle and admits nothing of the plan, by a rule of its own that no plan
            # knows. Without the plan it admits what it can.
            batch, running_batch = build(running_batch)
    finally:
        scheduler.cosched_prefill = None
        left = scheduler.waiting_queue
        scheduler.waiting_queue = waiting
        scheduler.chunked_prefill_size = chunk_size
    return batch, running_batch, left
