"""When sharing pays: what a plan saves against what it costs, from a model of the device.

The numbers are modelled until a card has measured them (``docs/kernels.md``). They are chosen so
that a doubt keeps the other attention backend: what is shared and small may come from the device's
cache there, and so cost less than its bytes say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cosched_kernels.groups import Groups, IntArray
from cosched_kernels.plan import HeadShape, Plan

__all__ = ["DeviceModel", "gain_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """What decides on a device. Defaults: an H200, from data sheets.

    memory_bandwidth  bytes per second that come from memory
    cache_bandwidth   bytes per second of what is in the last-level cache
    cache_bytes       size of that cache
    launch_s          what a layer's launches cost beyond those of the other backend [s]
    flops             of these kernels in prefill [1/s]
    other_flops       of the other backend in prefill [1/s]
    """

    memory_bandwidth: float = 4.3e12
    cache_bandwidth: float = 8e12
    cache_bytes: float = 60e6
    launch_s: float = 8e-6
    flops: float = 300e12
    other_flops: float = 500e12


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

    Gained are reads of shared KV. A prefix that the cache may hold is taken to be read again from
    there. Lost are pieces, launches, and what these kernels are slower at in prefill; that they
    waste fewer rows of tiles there is left out.
    """
    length = groups.last - groups.first
    saved = (groups.end - groups.begin - 1) * length * heads.kv_bytes_per_token
    is_cached = length * heads.kv_bytes_per_token < device.cache_bytes
    bandwidth = np.where(is_cached, device.cache_bandwidth, device.memory_bandwidth)
    gained = float((saved / bandwidth).sum())
    piece = heads.q_bytes_per_token + 4 * heads.num_q_heads
    lost = device.launch_s + 2 * plan.num_pieces * piece / device.memory_bandwidth
    if plan.num_tokens > len(num_queries):
        is_prefill = num_queries > 1
        pairs = num_queries[is_prefill] * (seq_lens[is_prefill] - num_queries[is_prefill] / 2)
        work = 4 * heads.num_q_heads * heads.head_dim * float(pairs.sum())
        lost += work * max(0.0, 1 / device.flops - 1 / device.other_flops)
    return gained - lost
