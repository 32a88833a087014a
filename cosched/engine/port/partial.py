"""Partial decode: the decode of some running requests is paused for an iteration. They keep their
KV.

SGLang decodes its whole running batch or, beside a prefill, none of it. Here the iteration runs on
a copy of the running batch without the paused requests. The running batch keeps all requests and is
updated when the batch of the iteration is ready. So everything that walks the running batch between
iterations (aborts, load reports, the memory check) sees every request.

SGLang's `FutureMap` keeps the last token of each request by row. So it does not matter for how many
iterations a request was paused, nor whether its last result is still in flight.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence, Set
from typing import Any

from sglang.srt.utils.common import async_h2d

from cosched.engine.port.batch import decodes_of
from cosched.engine.port.penalties import copy_for_part, copy_rows
from cosched.engine.port.request import is_ending


class SplitBatch:
    """A running batch of which only the part `active` decodes in this iteration."""

    def __init__(self, running_batch: Any, is_held: Sequence[bool]) -> None:
        """is_held: of each request of the batch; at least one and, unless a prefill runs, not
        all."""
        self._whole = running_batch
        self._is_held = is_held
        keep = [place for place, held in enumerate(is_held) if not held]
        self._num_active = len(keep)
        self.active = _part(running_batch, keep)

    def rejoin(self, batch: Any) -> Any:
        """The running batch when `batch` is ready to run.

        If `batch` is the active part, its requests are one token longer now. If it is a mixed
        batch, or SGLang runs the decodes as prefills of one token (DP attention), the active
        requests leave the running batch until it has run, as in SGLang. Requests that the engine
        has retracted or finished leave too.
        """
        whole, active, is_held = self._whole, self.active, self._is_held
        decodes = batch is active and batch.forward_mode.is_decode()
        if not decodes or len(active.reqs) < self._num_active:
            mixed = set() if decodes or batch is None else set(decodes_of(batch))
            stays = set(active.reqs) - mixed
            keep = [i for i, req in enumerate(whole.reqs) if is_held[i] or req in stays]
            if len(keep) < len(whole.reqs):
                whole.filter_batch(keep_indices=keep)
                is_held = [is_held[i] for i in keep]
        if decodes:
            _lengthen(whole, [0 if held else 1 for held in is_held])
            copy_rows(active, whole)
        return whole

    @property
    def adapters(self) -> Set[str | None]:
        """LoRA adapters of the paused requests, which stay in use."""
        pairs = zip(self._whole.reqs, self._is_held, strict=True)
        return {req.lora_id for req, held in pairs if held}


def split(running_batch: Any, held: Set[str]) -> SplitBatch | None:
    """Divide a running batch (see `port.can_pause`). None if nothing is paused: requests that are
    about to end are not."""
    is_held = [req.rid in held and not is_ending(req) for req in running_batch.reqs]
    return SplitBatch(running_batch, is_held) if any(is_held) else None


def _part(batch: Any, indices: list[int]) -> Any:
    part = copy.copy(batch)
    part.sampling_info = info = copy.copy(batch.sampling_info)
    info.penalizer_orchestrator = copy_for_part(info.penalizer_orchestrator, part)
    part.filter_batch(keep_indices=indices)
    return part


def _lengthen(batch: Any, grown: list[int]) -> None:
    """Add to the length of each request. The device may still read the old tensors."""
    by_cpu = batch.seq_lens_cpu.new_tensor(grown)
    by_device = async_h2d(grown, dtype=by_cpu.dtype, device=batch.seq_lens.device)
    batch.seq_lens_cpu = batch.seq_lens_cpu + by_cpu
    batch.seq_lens = batch.seq_lens + by_device
    batch.orig_seq_lens = batch.orig_seq_lens + by_device
    batch.seq_lens_sum = None
    # SGLang looks up the next token by row.
    batch.input_ids = None
    batch.out_cache_loc = None
