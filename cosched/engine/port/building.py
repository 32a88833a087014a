"""SGLang builds the prefill batch of a plan.

SGLang's `Scheduler._get_new_batch_prefill_raw` builds all batches. It gets a short waiting queue
(the requests of the plan, in order) and a `PrefillAdder` that knows how many tokens each gets.
Everything else (LoRA, mixed batches, HiCache, logprobs) is SGLang's.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from cosched.engine.port.memory import touch
from cosched.engine.port.states import drop_unused, has_states


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """The part of a plan that `PlannedPrefillAdder` follows.

    num_tokens  rid -> prompt tokens
    total       prompt tokens of all requests, each in whole pages
    taken       rid of a running borrower -> KV tokens that it has of what its lender was promised
    """

    num_tokens: Mapping[str, int]
    total: int
    taken: Mapping[str, int]


def adder_class(scheduler: Any) -> Callable[..., PlannedPrefillAdder]:
    """For `Scheduler.get_prefill_adder_class`: an adder that follows the plan that is being built
    (`Scheduler.cosched_prefill`), if there is one."""
    return partial(PlannedPrefillAdder, plan=getattr(scheduler, "cosched_prefill", None))


class PlannedPrefillAdder(PrefillAdder):  # type: ignore[misc]  # SGLang's classes are untyped here
    """SGLang's adder with a token limit per request. Without a plan it is the stock adder.

    Rules of memory, slots and alignment are SGLang's. After a refusal the requests behind it are
    still tried, because the plan already says what fits.
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
        # Whole pages, as the stock adder counts: the end of a prompt is rounded up.
        limit = self.ceil_paged_tokens(self._plan.num_tokens.get(req.rid, 0))
        if limit <= 0:
            self._refuse(req)
            return AddReqResult.CONTINUE
        outer = self.rem_chunk_tokens
        if outer is not None:
            self.rem_chunk_tokens = limit
        with _asking_as_promised(req):
            super().add_one_req(req, *args, **kwargs)
        if req not in self.can_run_list:
            self._refuse(req)
        if outer is not None:
            assert self.rem_chunk_tokens is not None
            self.rem_chunk_tokens = outer - (limit - self.rem_chunk_tokens)
        return AddReqResult.CONTINUE

    def _refuse(self, req: Any) -> None:
        """SGLang would free the state slot of its lookup only after an answer other than
        CONTINUE."""
        if self.is_hybrid_ssm_cache:
            drop_unused(self.tree_cache, req)

    def _select_prefill_admission(self, req: Any, **options: Any) -> Any:
        admission = super()._select_prefill_admission(req, **options)
        if self._plan is None or isinstance(admission, AddReqResult):
            return admission
        # If a load from host memory fails, a request that is whole in the plan may be cut here.
        # At most one prefill may stay unfinished.
        if admission.is_chunked and (self.new_chunked_req or options["has_chunked_req"]):
            return AddReqResult.OTHER
        return admission


def _promised(req: Any) -> int | None:
    """Output tokens that a plan has reserved KV for, including generated ones."""
    tracked = getattr(req, "cosched", None)
    return None if tracked is None else tracked.promised


@contextlib.contextmanager
def _asking_as_promised(req: Any) -> Iterator[None]:
    """The adder reserves memory for the promised output: it reads ``max_new_tokens``."""
    promised = _promised(req)
    if promised is None:
        yield
        return
    own = req.sampling_params
    req.sampling_params = copy.copy(own)
    req.sampling_params.max_new_tokens = promised
    req.sampling_params.ignore_eos = False  # with True the adder takes another way
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
    """Let SGLang build the batch of a plan.

    original    `_get_new_batch_prefill_raw` without the argument ``running_batch``
    candidates  the waiting requests of the plan, in order

    Returns the batch or None, the running batch, and the candidates that were not admitted. The
    waiting queue is unchanged.
    """
    waiting, chunk_size = scheduler.waiting_queue, scheduler.chunked_prefill_size
    if has_states(scheduler.tree_cache):
        for req in candidates:  # none loses its checkpoint to the slots of another one
            touch(scheduler.tree_cache, req)

    def build(running_batch: Any) -> tuple[Any, Any]:
        running_batch.batch_is_full = False  # a cached result of an earlier plan
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
            # The idle engine admits nothing of the plan, by a rule that plans do not know.
            # Without the plan it admits what it can.
            batch, running_batch = build(running_batch)
    finally:
        scheduler.cosched_prefill = None
        left = scheduler.waiting_queue
        scheduler.waiting_queue = waiting
        scheduler.chunked_prefill_size = chunk_size
    return batch, running_batch, left
