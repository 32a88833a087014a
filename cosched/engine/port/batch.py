"""Batches and their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cosched.core.batch import BatchShape, Prefill
from cosched.engine.port.encoder import encoded_of
from cosched.engine.port.memory import num_allocated, num_committed
from cosched.engine.port.scheduler import drafts_per_decode, runs_on_cpu


def can_pause(running_batch: Any) -> bool:
    """Whether a part of the running batch can run alone: beams have rows behind the requests'."""
    return all([req.beam_group is None for req in running_batch.reqs])


def holds_ended(running_batch: Any) -> bool:
    """Whether a request of the running batch has ended."""
    return any([req.finished_reason is not None for req in running_batch.reqs])


def decodes_of(batch: Any) -> Sequence[Any]:
    """The requests that decode in a prefill batch. In the running batch the value is outdated."""
    return batch.decoding_reqs or ()


def num_prefills(batch: Any) -> int:
    """Requests of a batch that compute prompt tokens."""
    if batch.forward_mode.is_decode_or_idle():
        return 0
    return len(batch.extend_lens) - len(decodes_of(batch))


def prefills_of(batch: Any) -> Iterator[tuple[Any, int]]:
    """The requests of a prefill batch and the tokens it computes of each, without mixed decodes.
    Read from the batch, because a mixed decode changes the numbers of its request."""
    number = len(batch.reqs) - len(decodes_of(batch))
    return zip(batch.reqs[:number], batch.extend_lens[:number], strict=True)


def num_loaded(batch: Any) -> int:
    """Tokens that are loaded from host memory while a batch runs."""
    if batch.hicache_consumer_index < 0:
        return 0
    loads = batch.tree_cache.cache_controller.ack_load_queue
    return int(loads[-1].num_tokens) if loads else 0


def shape_of(batch: Any) -> BatchShape:
    """What the time of a batch depends on. Valid between building and running it."""
    if batch.forward_mode.is_decode():
        if speculates(batch):
            decodes = [num_committed(req) + 1 for req in batch.reqs]
            return BatchShape(decodes=decodes, num_drafts=drafts_per_decode())
        return BatchShape(decodes=batch.seq_lens_cpu.tolist())
    number, cached = num_prefills(batch), batch.prefix_lens
    prefills = list(map(Prefill, batch.extend_lens[:number], cached[:number]))
    decodes = [length + 1 for length in cached[number:]]
    return BatchShape(
        prefills=prefills,
        decodes=decodes,
        num_loaded=num_loaded(batch),
        encoded=encoded_of(batch, number),
    )


def runs_model(batch: Any) -> bool:
    """Whether a batch has anything to compute."""
    return not (batch.forward_mode.is_idle() or batch.forward_mode.is_prebuilt())


_NO_ROWS = np.empty(0, dtype=np.int64)


def rows_of(batch: Any) -> Any:
    """The row of each request of a batch: an array of int64. Rows of beams are left out."""
    if not batch.reqs:
        return _NO_ROWS
    return batch.req_pool_indices_cpu.numpy()[: len(batch.reqs)]


def computed_of(running_batch: Any) -> Any:
    """Computed tokens of each request of the running batch: an array of int64."""
    reqs = running_batch.reqs
    if not reqs:
        return _NO_ROWS
    lengths = running_batch.seq_lens_cpu.numpy()
    if len(lengths) != len(reqs):  # with beams
        return committed_of(running_batch)
    return lengths


def committed_of(running_batch: Any) -> Any:
    """The same, read from each request: with speculative decoding the batch may not know them."""
    return np.array([num_committed(req) for req in running_batch.reqs], dtype=np.int64)


def allocated_of(running_batch: Any) -> Any:
    """KV tokens that each request of the running batch holds: an array of int64."""
    return np.array([num_allocated(req) for req in running_batch.reqs], dtype=np.int64)


def speculates(batch: Any) -> bool:
    """Whether decodes verify drafted tokens, and may generate several."""
    return not batch.spec_algorithm.is_none()


# --- Results ---


def wait_for(scheduler: Any, result: Any) -> None:
    """Wait until the device has finished a result."""
    event = getattr(result, "copy_done", None)
    if event is not None:
        event.synchronize()
    elif not runs_on_cpu(scheduler):
        # Without the overlap scheduler no event is recorded.
        torch.get_device_module(scheduler.device).current_stream().synchronize()


def is_done(result: Any) -> bool:
    """Whether an event says that the device has finished a result."""
    event = getattr(result, "copy_done", None)
    return event is not None and bool(event.query())
