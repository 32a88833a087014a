"""When sharing pays: what the other attention backend takes for a batch against what a plan takes,
from a model of the device.

The numbers are from data sheets until a card has measured them (`fitted`, ``scripts/gpu_profile``).
They are chosen so that a doubt keeps the other backend: what is shared and small may come from the
device's cache there, and so cost less than its bytes say.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from cosched_kernels.groups import Groups, IntArray
from cosched_kernels.plan import HeadShape, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What decides on a device. Defaults: an H200, from data sheets.

    memory_bandwidth  bytes per second that come from memory
    cache_bandwidth   bytes per second of what is in the last-level cache
    cache_bytes       size of that cache
    launch_s          what a layer's launches cost beyond those of the other backend [s]
    flops             of these kernels in prefill [1/s]
    other_flops       of the other backend in prefill [1/s]
    other_tile        query rows that the other backend computes at once in prefill; where fewer are
                      new, the others of the tile are empty
    other_packs       whether the query heads of a KV head share such a tile
    """

    memory_bandwidth: float = 4.3e12
    cache_bandwidth: float = 8e12
    cache_bytes: float = 60e6
    launch_s: float = 8e-6
    flops: float = 300e12
    other_flops: float = 500e12
    other_tile: int = 128
    other_packs: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "other_packs" and not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} of a device must be a number from 0, not {value}")
            if field.name not in ("other_packs", "launch_s", "cache_bytes") and not value:
                raise ValueError(f"{field.name} of a device must be positive")

    def beside(self, inner: str) -> DeviceModel:
        """The same beside this attention backend of SGLang. Its Triton kernel gives a tile to each
        query head; FlashAttention and FlashInfer pack heads."""
        return replace(self, other_packs=inner != "triton")


def gain_s(
    groups: Groups,
    plan: Plan,
    *,
    num_queries: IntArray,
    seq_lens: IntArray,
    heads: HeadShape,
    device: DeviceModel,
) -> float:
    """Seconds that a layer gains at least by running the plan, negative when it loses.

    In a batch of decodes both compute less than they read, and only the reading is compared. Where
    a prompt is computed it is `mixed_times_s`.
    """
    if plan.num_tokens > len(num_queries):
        other_s, ours_s = mixed_times_s(
            groups, plan, num_queries=num_queries, seq_lens=seq_lens, heads=heads, device=device
        )
        return other_s - ours_s
    saved, cached = _repeated_bytes(groups, heads, device)
    gained = (saved - cached) / device.memory_bandwidth + cached / device.cache_bandwidth
    return gained - _extra_s(plan, heads, device)


def mixed_times_s(
    groups: Groups,
    plan: Plan,
    *,
    num_queries: IntArray,
    seq_lens: IntArray,
    heads: HeadShape,
    device: DeviceModel,
) -> tuple[float, float]:
    """What a layer of a prefill or a mixed batch takes: the other backend, at least, and the plan.

    Either takes for each of its tiles the longer of reading the KV and computing the scores, empty
    rows included. Nothing need be shared for a plan to be faster: beside a prefill, decodes have a
    tile each in the other backend, and one for each query head where it packs none.
    """
    kv_bytes = heads.kv_bytes_per_token
    new = num_queries * (heads.group if device.other_packs else 1)
    per_tile = heads.num_kv_heads if device.other_packs else heads.num_q_heads
    rows = -(-new // device.other_tile) * device.other_tile * per_tile
    computing = rows * (seq_lens - num_queries / 2) * (4 * heads.head_dim / device.other_flops)
    reading = seq_lens * (kv_bytes / device.memory_bandwidth)
    waiting = float(np.maximum(reading - computing, 0).sum())
    # What is shared and may be cached comes from there for all but one.
    _, cached = _repeated_bytes(groups, heads, device)
    waiting -= max(cached * (1 / device.memory_bandwidth - 1 / device.cache_bandwidth), 0.0)
    other_s = float(computing.sum()) + max(waiting, 0.0)
    # A tile's bytes and its scores both grow with the KV that it reads.
    spans = plan.column("kv_end") - plan.column("kv_begin")
    flops = heads.num_kv_heads * 4 * heads.head_dim / device.flops
    ours_s = _extra_s(plan, heads, device)
    starts: list[int] = plan.starts.tolist()
    per_token = kv_bytes / device.memory_bandwidth
    for height, begin, end in zip(plan.rows, starts, starts[1:], strict=False):
        if end > begin:
            num_read = int(spans[begin:end].sum())
            ours_s += num_read * max(height * flops, per_token)
    return other_s, ours_s


def _repeated_bytes(groups: Groups, heads: HeadShape, device: DeviceModel) -> tuple[float, float]:
    """KV that only the other backend reads again, and how much of that the cache may hold: what is
    in doubt is taken to be cheap there."""
    token = heads.kv_bytes_per_token
    is_cached = (groups.last - groups.first) * token < device.cache_bytes
    return float(groups.saved_tokens * token), float(groups.saved @ is_cached * token)


def _extra_s(plan: Plan, heads: HeadShape, device: DeviceModel) -> float:
    """Launches, and pieces that are written and read."""
    piece = heads.q_bytes_per_token + 4 * heads.num_q_heads
    return device.launch_s + 2 * plan.num_pieces * piece / device.memory_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times of one layer of decodes on a card [s], and what they read [bytes].

    document_bytes  KV of the longest prefix that several share
    distinct_bytes  KV that is there, each token once
    each_bytes      KV of all contexts, what is shared as often as it is
    piece_bytes     pieces that the plan writes and reads
    ours_s          these kernels
    shared_s        the other backend on the same slots
    distinct_s      the other backend where each has slots of its own; None: did not fit
    """

    document_bytes: float
    distinct_bytes: float
    each_bytes: float
    piece_bytes: float
    ours_s: float
    shared_s: float
    distinct_s: float | None


def fitted(times: Sequence[Measured], start: DeviceModel) -> DeviceModel:
    """The device that the times describe. What they do not determine stays as in `start`.

    memory_bandwidth  of the other backend on distinct slots, where it reads most
    cache_bytes       the longest document that it reads again clearly faster than from memory
    cache_bandwidth   at which it reads those again
    launch_s          as much as it takes for the picker to promise no more than was measured in
                      three of four shapes
    """
    assert times, "nothing was measured"
    alone = sorted((m for m in times if m.distinct_s), key=lambda m: m.each_bytes)
    memory = start.memory_bandwidth
    if alone:
        largest = alone[len(alone) // 2 :]
        memory = statistics.median(m.each_bytes / (m.distinct_s or 1.0) for m in largest)
    again = [
        (m.document_bytes, (m.each_bytes - m.distinct_bytes) / max(again_s, 1e-9))
        for m in times
        if m.each_bytes > 1.5 * m.distinct_bytes
        and (again_s := m.shared_s - m.distinct_bytes / memory) < m.shared_s
    ]
    fast = [(size, rate) for size, rate in again if rate > 1.2 * memory]
    cache_bytes = max((size for size, _ in fast), default=0.0)
    # What has been seen is cached at that size; a little more may be.
    cache = statistics.median(rate for _, rate in fast) if fast else memory
    device = replace(
        start,
        memory_bandwidth=memory,
        cache_bytes=1.1 * cache_bytes,
        cache_bandwidth=max(cache, memory),
        launch_s=0.0,
    )
    too_much = sorted(
        (m.each_bytes - m.distinct_bytes)
        / (device.cache_bandwidth if m.document_bytes < device.cache_bytes else memory)
        - m.piece_bytes / memory
        - (m.shared_s - m.ours_s)
        for m in times
    )
    return replace(device, launch_s=max(too_much[3 * (len(too_much) - 1) // 4], 0.0))


def write_model(path: Path, model: DeviceModel, *, device_name: str, origin: str) -> None:
    """A file for `read_model`. origin: how it was measured."""
    content = {"device": device_name, "origin": origin, "model": asdict(model)}
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_model(path: Path, *, device_name: str) -> DeviceModel:
    """What `write_model` wrote. ValueError, naming the file, when it is of another device, or is no
    such file."""
    try:
        content = json.loads(path.read_text())
        found, values = content["device"], dict(content["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no device model of scripts/gpu_profile: {error}") from None
    if found != device_name:
        raise ValueError(f"{path} was measured on {found!r}, and this is {device_name!r}")
    known = {field.name for field in fields(DeviceModel)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{path}: unknown {unknown[0]!r}; a device has {', '.join(sorted(known))}")
    try:
        return DeviceModel(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
