"""When sharing pays: what the other attention backend takes for a batch against what a plan takes,
from a model of the device.

The numbers are from data sheets until a card has measured them (`fitted`, ``scripts/gpu_profile``).
They are chosen so that a doubt keeps the other backend: what is shared and small may come from the
device's cache there, and so cost less than its bytes say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from cosched_kernels.groups import Groups, IntArray
from cosched_kernels.plan import HeadShape, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What decides on a device. Defaults: an H200. What these kernels reach was measured there, and
    Triton's too (`beside`); what another backend reaches is of data sheets.

    memory_bandwidth  bytes of KV per second that the other backend reads for the first time
    cache_bandwidth   bytes per second that it reads again for other requests of the batch
    own_bandwidth     bytes per second that these kernels read
    launch_s          what a layer's launches cost beyond those of the other backend [s]
    flops             of these kernels in prefill [1/s]
    other_flops       of the other backend in prefill [1/s]
    other_tile        query rows that the other backend computes at once in prefill; where fewer are
                      new, the others of the tile are empty
    other_packs       whether the query heads of a KV head share such a tile
    """

    memory_bandwidth: float = 4.3e12
    cache_bandwidth: float = 8e12
    own_bandwidth: float = 1.55e12
    launch_s: float = 5e-6
    flops: float = 300e12
    other_flops: float = 500e12
    other_tile: int = 128
    other_packs: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "other_packs" and not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} of a device must be a number from 0, not {value}")
            if field.name not in ("other_packs", "launch_s") and not value:
                raise ValueError(f"{field.name} of a device must be positive")

    def beside(self, inner: str) -> DeviceModel:
        """The same beside this attention backend of SGLang. Its Triton kernel gives a tile to each
        query head, and was measured on an H200; FlashAttention and FlashInfer pack heads."""
        if inner != "triton":
            return replace(self, other_packs=True)
        return replace(self, other_packs=False, memory_bandwidth=2.0e12, cache_bandwidth=4.5e12)


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
    saved = groups.saved_tokens * heads.kv_bytes_per_token
    distinct = float(seq_lens.sum()) * heads.kv_bytes_per_token - saved
    other_s = distinct / device.memory_bandwidth + saved / device.cache_bandwidth
    return other_s - distinct / device.own_bandwidth - _extra_s(plan, heads, device)


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
    # What is shared is in the cache for all but one.
    saved = groups.saved_tokens * kv_bytes
    waiting -= max(saved * (1 / device.memory_bandwidth - 1 / device.cache_bandwidth), 0.0)
    other_s = float(computing.sum()) + max(waiting, 0.0)
    # A tile's bytes and its scores both grow with the KV that it reads.
    spans = plan.column("kv_end") - plan.column("kv_begin")
    flops = heads.num_kv_heads * 4 * heads.head_dim / device.flops
    ours_s = _extra_s(plan, heads, device)
    starts: list[int] = plan.starts.tolist()
    per_token = kv_bytes / device.own_bandwidth
    for height, begin, end in zip(plan.rows, starts, starts[1:], strict=False):
        if end > begin:
            num_read = int(spans[begin:end].sum())
            ours_s += num_read * max(height * flops, per_token)
    return other_s, ours_s


def _extra_s(plan: Plan, heads: HeadShape, device: DeviceModel) -> float:
    """Launches, and pieces that are written and read."""
    piece = heads.q_bytes_per_token + 4 * heads.num_q_heads
    return device.launch_s + 2 * plan.num_pieces * piece / device.own_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times of one layer of decodes on a card [s], and what they read [bytes].

    distinct_bytes  KV that is there, each token once
    each_bytes      KV of all contexts, what is shared as often as it is
    piece_bytes     pieces that the plan writes and reads
    ours_s          these kernels
    shared_s        the other backend on the same slots
    distinct_s      the other backend where each has slots of its own; None: did not fit
    """

    distinct_bytes: float
    each_bytes: float
    piece_bytes: float
    ours_s: float
    shared_s: float
    distinct_s: float | None


def fitted(times: Sequence[Measured], start: DeviceModel) -> DeviceModel:
    """The device that the times describe, by least squares of relative errors. What they do not
    determine stays as in `start`."""
    assert times, "nothing was measured"
    ones = [1.0] * len(times)
    first = [m.distinct_bytes for m in times]
    again = [m.each_bytes - m.distinct_bytes for m in times]
    read = [m.distinct_bytes + m.piece_bytes for m in times]
    other = _relative_fit([ones, first, again], [m.shared_s for m in times])
    ours = _relative_fit([ones, read], [m.ours_s for m in times])
    if other is None or ours is None:
        return start
    return replace(
        start,
        memory_bandwidth=1 / other[1],
        cache_bandwidth=1 / other[2],
        own_bandwidth=1 / ours[1],
        launch_s=max(ours[0] - other[0], 0.0),
    )


def _relative_fit(columns: list[list[float]], seconds: list[float]) -> list[float] | None:
    """None if the shapes do not determine it."""
    matrix = np.array(columns).T / np.array(seconds)[:, None]
    found, _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)
    coefficients: list[float] = found.tolist()
    return coefficients if rank == len(columns) and min(coefficients[1:]) > 0 else None


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
