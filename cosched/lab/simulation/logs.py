"""The rows that a simulation logs: one per iteration, and KV memory by use once a second."""

from __future__ import annotations

from typing import Any

import msgspec

from cosched.core.batch import BatchShape
from cosched.core.request import RequestClass
from cosched.engine import port
from cosched.engine.iteration import Iteration
from cosched.lab.metrics.records import IterationRecord
from cosched.memory.occupancy import HostOccupancy, KvOccupancy
from cosched.wire import class_of_priority

_KV_FIELDS = tuple(f.name for f in msgspec.structs.fields(KvOccupancy) if f.type in (int, bool))
_HOST_FIELDS = HostOccupancy.__struct_fields__

KV_COLUMNS = (
    "time_s",
    *(f"recomputed_{request_class.value}" for request_class in RequestClass),
    *_KV_FIELDS,
    *(f"host_{name}" for name in _HOST_FIELDS),
)
"""Of `VirtualEngine.kv`. recomputed_*: prefill tokens so far that were computed before."""

KV_PERIOD_S = 1.0
"""Between two rows of the KV log; a row takes O(nodes)."""


def kv_row(occupancy: KvOccupancy) -> list[int]:
    """`KV_COLUMNS` without time and recomputed tokens."""
    on_host = (getattr(occupancy.host, name, 0) for name in _HOST_FIELDS)
    return [*(getattr(occupancy, name) for name in _KV_FIELDS), *on_host]


def iteration_row(
    scheduler: Any,
    batch: Any,
    shape: BatchShape,
    iteration: Iteration | None,
    *,
    start_s: float,
    done_s: float,
) -> IterationRecord:
    """Of a batch that is done. iteration: None: its launch was not observed."""
    counts = {RequestClass.ONLINE: [0, 0, 0, 0], RequestClass.OFFLINE: [0, 0, 0, 0]}
    num_prefills = len(shape.prefills)
    for index, req in enumerate(batch.reqs):
        count = counts[class_of_priority(req.priority)]
        if index < num_prefills:
            count[0] += shape.prefills[index].num_new
            count[1] += 1
        else:
            count[2] += 1
        count[3] += port.num_committed(req)
    in_batch = {req.rid for req in batch.reqs}
    for req in port.in_flight(scheduler):  # paused requests hold KV too
        if req.rid not in in_batch:
            counts[class_of_priority(req.priority)][3] += port.num_committed(req)
    on, off = counts[RequestClass.ONLINE], counts[RequestClass.OFFLINE]
    free = port.kv_free(scheduler)
    cached = port.kv_evictable(scheduler)
    held = port.kv_total(scheduler) - free - cached
    held_online = min(on[3], held)
    return IterationRecord(
        start_s=start_s,
        duration_s=done_s - start_s,
        predicted_s=None if iteration is None else iteration.predicted_s,
        planning_s=None if iteration is None else iteration.planning_s,
        num_online_prefill_tokens=on[0],
        num_offline_prefill_tokens=off[0],
        num_online_prefills=on[1],
        num_offline_prefills=off[1],
        num_online_decodes=on[2],
        num_offline_decodes=off[2],
        kv_online_tokens=held_online,
        kv_offline_tokens=held - held_online,
        kv_cached_tokens=cached,
        kv_free_tokens=free,
    )
