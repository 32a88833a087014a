"""Batches: what is in them and what their results are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cosched.core.batch import BatchShape, Prefill
from cosched.engine.port.memory import num_committed
from cosched.engine.port.scheduler import runs_on_cpu


def can_hold(running_batch: Any) -> bool:
    """Whether the requests that run now can be divided: beams have rows of their own behind those
    of the requests."""
    return all([req.beam_group is None for req in running_batch.reqs])


def holds_ended(running_batch: Any) -> bool:
    """Whether some request of the running batch does not go on."""
    return any([req.finished_reason is not None for req in running_batch.reqs])


def decodes_of(batch: Any) -> Sequence[Any]:
    """The requests that decode in a prefill batch. A batch keeps them when it becomes the running
    batch; there they say nothing."""
    return batch.decoding_reqs or ()


def num_prefills(batch: Any) -> int:
    """Requests of a batch that compute prompt tokens."""
    if batch.forward_mode.is_decode():
        return 0
    return len(batch.extend_lens) - len(decodes_of(batch))


def prefills_of(batch: Any) -> Iterator[tuple[Any, int]]:
    """The requests of a prefill batch and the tokens it computes of each, without the decodes that
    were mixed into it. From the batch: a mixed decode leaves other numbers on its request."""
    num_prefills = len(batch.reqs) - len(decodes_of(batch))
    return zip(batch.reqs[:num_prefills], batch.extend_lens[:num_prefills], strict=True)


def num_loaded(batch: Any) -> int:
    """Tokens that are loaded from host memory while a batch runs: begun when it was built."""
    if batch.hicache_consumer_index < 0:
        return 0
    loads = batch.tree_cache.cache_controller.ack_load_queue
    return int(loads[-1].num_tokens) if loads else 0


def shape_of(batch: Any) -> BatchShape:
    """What the time of a batch depends on; valid from when the batch was built until it ran."""
    if batch.forward_mode.is_decode():
        return BatchShape(decodes=batch.seq_lens_cpu.tolist())
    number = num_prefills(batch)
    return BatchShape(
        prefills=[
            Prefill(new, cached)
            for new, cached in zip(
                batch.extend_lens[:number], batch.prefix_lens[:number], strict=True
            )
        ],
        decodes=[cached + 1 for cached in batch.prefix_lens[number:]],
        num_loaded=num_loaded(batch),
    )


def runs_model(batch: Any) -> bool:
    """Whether there is anything in it to compute."""
    return not (batch.forward_mode.is_idle() or batch.forward_mode.is_prebuilt())


_NO_ROWS = np.empty(0, dtype=np.int64)


def rows_of(batch: Any) -> Any:
    """The row of each request of a batch: an array of int64. Those of beams lie behind them."""
    if not batch.reqs:
        return _NO_ROWS
    return batch.req_pool_indices_cpu.numpy()[: len(batch.reqs)]


def computed_of(running_batch: Any) -> Any:
    """Tokens whose KV is computed, of each request of the running batch: an array of int64."""
    reqs = running_batch.reqs
    if not reqs:
        return _NO_ROWS
    lengths = running_batch.seq_lens_cpu.numpy()
    if len(lengths) != len(reqs):  # with beams
        return np.array([num_committed(req) for req in reqs], dtype=np.int64)
    return lengths


# --- Results ---


def wait_for(scheduler: Any, result: Any) -> None:
    """Return once the device has a result ready."""
    event = getattr(result, "copy_done", None)
    if event is not None:
        event.synchronize()
    elif not runs_on_cpu(scheduler):
        # Without the overlap scheduler nothing has waited for the device yet.
        torch.get_device_module(scheduler.device).current_stream().synchronize()


def is_done(result: Any) -> bool:
    """Whether the device has a result ready, as far as an event tells."""
    event = getattr(result, "copy_done", None)
    return event is not None and bool(event.query())
