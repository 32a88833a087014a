"""The batches of a model runner whose requests share KV: groups, plan, attention.

A batch whose requests share enough KV is computed by `cosched_kernels`; SGLang's attention backend,
the *inner* one, computes all others, and layers that those kernels do not support
(`cosched.engine.port.extend_attention`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

from cosched.config import SharedPrefixConfig
from cosched.engine.port.batch import decodes_of
from cosched.engine.port.prefixes import MIN_GROUP_TOKENS, RunningPrefixes
from cosched.engine.port.read_once import (
    Launch,
    SharedRuns,
    launched,
)
from cosched.engine.port.scheduler import parallel
from cosched_kernels import reference, shared_prefix
from cosched_kernels.buffers import FixedBuffers, PlanTensors, upload
from cosched_kernels.cascade import Cascade, Prepare, plain_calls
from cosched_kernels.flashinfer_calls import FlashInferCalls
from cosched_kernels.groups import Groups, IntArray
from cosched_kernels.interpret import is_interpreting
from cosched_kernels.picker import DeviceModel, gain_s
from cosched_kernels.plan import HeadShape, Plan, Tiling, make_plan
from cosched_kernels.shared_prefix import tiles_for

logger = logging.getLogger(__name__)

PLAIN, SHARED = "plain", "shared"
"""The two graphs of a decode batch. SGLang captures one for each label."""

_MAX_PIECE_BYTES = 256 << 20  # of memory for pieces; larger batches go to the inner backend
_MAX_GROWTH = 64  # tokens by which requests may grow before a new plan is made


class _Work(NamedTuple):
    """What the layers of a forward pass compute. Valid during its launch."""

    launch: Launch
    num_tokens: int
    attend: Callable[..., None]


class _Made(NamedTuple):
    """A plan for decodes (None: sharing costs more than it saves), and what it was made for. It
    holds while the same requests decode, because their part in the radix tree does not change."""

    reqs: list[Any]
    seq_lens: IntArray
    plan: Plan | None


def num_q_heads(runner: Any) -> int:
    """On this device."""
    return int(runner.model_config.num_attention_heads) // parallel().tp_size


class SharedPrefixes:
    """The batches of one model runner whose requests share KV: groups, plan, attention.

    Also SGLang's `AttentionGraphVariants` (`capture_labels`, `select`): each decode batch has a
    graph with the inner backend's attention, and one that runs the plan in the fixed buffers.
    """

    capture_labels = (PLAIN, SHARED)

    def __init__(
        self,
        runner: Any,
        settings: SharedPrefixConfig,
        *,
        inner: str,
        device_model: DeviceModel,
        is_strict: bool,
    ) -> None:
        """inner: the other backend's name."""
        self._settings = settings
        self._pool = runner.token_to_kv_pool
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self._prefixes = RunningPrefixes.of(runner)
        self._is_strict = is_strict
        self._dtype: torch.dtype = runner.dtype
        self._is_off = False
        self._made: _Made | None = None
        self._planned: tuple[Launch, Plan | None] | None = None
        self._work: _Work | None = None
        self._fixed: FixedBuffers | None = None
        self.runs = SharedRuns(beside=inner)
        device = torch.device(runner.device)
        is_gpu = device.type == "cuda"
        self._num_sms = 8
        if is_gpu:
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        # On a CPU, tests run the kernels in an interpreter: TRITON_INTERPRET=1.
        runs_kernels = is_gpu or is_interpreting()
        self._kernels: Any = shared_prefix if runs_kernels else reference
        self._device_model = device_model.beside(inner)
        keys = self._pool.get_key_buffer(self._pool.start_layer)
        self._cascade: Prepare | None = None
        if settings.kernels == "cascade" and keys.dtype == runner.dtype:
            self._cascade = FlashInferCalls(device) if is_gpu else plain_calls
        self._heads = HeadShape(
            num_q_heads=num_q_heads(runner),
            num_kv_heads=keys.shape[1],
            head_dim=keys.shape[2],
            kv_bytes=keys.dtype.itemsize,
            q_bytes=runner.dtype.itemsize,
        )
        self._tiling = Tiling(
            rows=tuple(tiles_for(self._heads.head_dim)), programs=max(1, self._num_sms // 2)
        )

    def prepare(self, forward_batch: Any) -> None:
        """Plan a forward pass without a graph."""
        self._work = None
        plan = self.plan_of(forward_batch)
        if plan is not None:
            launch = launched()
            assert launch is not None
            self._count(launch)
            attend = self._attention_of(plan, launch.batch, forward_batch.req_pool_indices)
            self._work = _Work(launch, plan.num_tokens, attend)

    def _attention_of(self, plan: Plan, batch: Any, pool_rows: torch.Tensor) -> Callable[..., None]:
        """The attention of each layer. pool_rows: the row of each request of the batch."""
        if self._cascade is None:
            tensors = upload(
                plan,
                self._heads,
                device=self._req_to_token.device,
                dtype=self._dtype,
                num_programs=self._num_sms,
            )
            return partial(self._run, tensors, pool_rows)
        num_queries, seq_lens = _lengths(batch)
        return Cascade(
            self._groups(batch),
            num_queries=num_queries,
            seq_lens=seq_lens,
            token_order=plan.token_order,
            req_to_token=self._req_to_token,
            pool_rows=pool_rows,
            heads=self._heads,
            dtype=self._dtype,
            prepare=self._cascade,
        ).attend

    def _run(
        self,
        tensors: PlanTensors,
        pool_rows: torch.Tensor,
        *qkv: torch.Tensor,
        out: torch.Tensor,
        **options: float,
    ) -> None:
        """The plan's attention of a layer."""
        self._kernels.attend_items(
            *qkv,
            out=out,
            plan=tensors,
            req_to_token=self._req_to_token,
            pool_rows=pool_rows,
            **options,
        )
        self._kernels.reduce_pieces(out=out, plan=tensors)

    def plan_of(self, forward_batch: Any) -> Plan | None:
        """The plan of a forward pass, made once; None: it does not run the launched batch, or
        sharing costs more than it saves."""
        launch = launched()
        if launch is None or not _is_plain(forward_batch):
            return None
        if not _is_all_of(forward_batch, launch.batch):
            return None
        if self._planned is None or self._planned[0] is not launch:
            plan = None if self._is_off else self._plan_or_switch_off(launch.batch)
            self._planned = launch, plan
        return self._planned[1]

    def _count(self, launch: Launch) -> None:
        """Its layers run the plan."""
        batch = launch.batch
        decodes = batch.reqs if batch.forward_mode.is_decode() else decodes_of(batch)
        self.runs.count(launch, num_decodes=len(decodes))

    def _plan_or_switch_off(self, batch: Any) -> Plan | None:
        """An error here switches sharing off and does not end the server."""
        try:
            return self._plan_for(batch)
        except Exception:
            if self._is_strict:
                raise
            logger.exception("cosched: planning failed; attention shares nothing from now on")
            self._is_off = True
            return None

    # --- CUDA graphs ---

    def begin_graphs(self, max_requests: int) -> None:
        """Graphs are about to be captured, of at most `max_requests` decodes."""
        self._fixed = FixedBuffers(
            self._heads,
            rows=self._tiling.rows,
            max_tokens=max_requests,
            max_items=8 * max_requests + 1024,
            max_pieces=8 * max_requests,
            device=self._req_to_token.device,
            dtype=self._dtype,
            num_programs=self._num_sms,
        )

    def select(self, forward_batch: Any) -> str:
        """The graph that runs a batch."""
        plan = self.plan_of(forward_batch)
        if plan is None or self._fixed is None or not self._fixed.fits(plan):
            return PLAIN
        launch = launched()
        assert launch is not None
        self._count(launch)
        return SHARED

    def load_for_graph(self, *, in_capture: bool) -> None:
        """The next graph is captured, or replayed with the plan of the launched batch."""
        if self._fixed is None:
            return
        if in_capture:
            self._fixed.clear()
        elif self._planned is not None and self._planned[0] is launched():
            plan = self._planned[1]
            if plan is not None and self._fixed.fits(plan):
                self._fixed.load(plan)

    def _plan_for(self, batch: Any) -> Plan | None:
        """The plan of a batch; None: sharing costs more than it saves."""
        made, self._made = self._made, None
        num_queries, seq_lens = _lengths(batch)
        if not batch.forward_mode.is_decode():
            return self._new_plan(batch, num_queries, seq_lens)
        if made is not None and made.reqs == batch.reqs:
            growth = seq_lens - made.seq_lens
            if growth.min() >= 0 and growth.max() < _MAX_GROWTH:
                self._made = made
                return made.plan and made.plan.grown(seq_lens)
        plan = self._new_plan(batch, num_queries, seq_lens)
        self._made = _Made(batch.reqs.copy(), seq_lens.copy(), plan)
        return plan

    def _new_plan(self, batch: Any, num_queries: IntArray, seq_lens: IntArray) -> Plan | None:
        """num_queries, seq_lens: [requests] new tokens, and all tokens"""
        groups = self._groups(batch)
        is_decode = batch.forward_mode.is_decode()
        if groups.num_groups == 0 and (is_decode or not self._may_pack(num_queries)):
            return None
        is_cached = groups.own <= (seq_lens - num_queries).take(groups.order)
        if not is_cached.all():
            return None  # what is computed now is in no group
        return self._make_plan(groups, num_queries, seq_lens)

    def _may_pack(self, num_queries: IntArray) -> bool:
        """Whether a mixed batch that shares nothing may be faster here: the inner backend computes
        a tile for each head of its decodes."""
        is_modelled = self._settings.min_saved_tokens is None
        wastes = is_modelled and not self._device_model.other_packs and self._cascade is None
        return wastes and bool((num_queries == 1).any())

    def _make_plan(self, groups: Groups, num_queries: IntArray, seq_lens: IntArray) -> Plan | None:
        plan = make_plan(
            groups,
            num_queries=num_queries,
            seq_lens=seq_lens,
            heads=self._heads,
            tiling=self._tiling,
        )
        if plan.num_pieces * self._heads.q_bytes_per_token > _MAX_PIECE_BYTES:
            return None
        if self._settings.min_saved_tokens is None:
            gained = gain_s(
                groups,
                plan,
                num_queries=num_queries,
                seq_lens=seq_lens,
                heads=self._heads,
                device=self._device_model,
            )
            return plan if gained > 0 else None
        return plan if groups.saved_tokens >= self._settings.min_saved_tokens else None

    def _groups(self, batch: Any) -> Groups:
        least = self._settings.min_saved_tokens
        min_saved = MIN_GROUP_TOKENS if least is None else max(1, least)
        return self._prefixes.groups(batch.reqs, min_saved=min_saved)

    def can_attend(self, q: Any, k: Any, v: Any, layer: Any, kwargs: dict[str, Any]) -> bool:
        """Whether this layer of the present batch is computed here."""
        work = self._work
        if _is_capturing():
            is_planned = self._fixed is not None
        else:
            is_planned = (
                work is not None
                and work.launch is launched()
                and q.numel() == work.num_tokens * layer.tp_q_head_num * layer.qk_head_dim
            )
        return (
            is_planned
            and k is not None
            and v is not None
            and layer.attn_type == AttentionType.DECODER
            and not layer.is_cross_attention
            and layer.sliding_window_size <= 0
            and not layer.logit_cap
            and layer.xai_temperature_len <= 0
            and layer.qk_head_dim == layer.v_head_dim == self._heads.head_dim
            and layer.tp_q_head_num == self._heads.num_q_heads
            and all(value is None for value in kwargs.values())
            and q.dtype == self._dtype
        )

    def forward(
        self,
        inner: Callable[..., Any],
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Attention of a layer. inner: the same of the inner backend."""
        if self.can_attend(q, k, v, layer, kwargs):
            return self.attend(q, k, v, layer, forward_batch, save_kv_cache)
        return inner(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def attend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> Any:
        heads, head_dim = layer.tp_q_head_num, layer.qk_head_dim
        scales: dict[str, float] = {}
        run: Callable[..., None]
        if save_kv_cache:
            where = KVWriteLoc(forward_batch.out_cache_loc)
            if layer.k_scale is None:
                self._pool.set_kv_buffer(layer, where, k, v)
            else:  # it scales them in place
                self._pool.set_kv_buffer(
                    layer, where, k.clone(), v.clone(), layer.k_scale, layer.v_scale
                )
        keys = self._pool.get_key_buffer(layer.layer_id)
        if keys.dtype != q.dtype and layer.k_scale is not None:
            scales = {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        shape = q.numel() // (heads * head_dim), heads, head_dim
        if _is_capturing():
            assert self._fixed is not None
            run = partial(self._run, self._fixed.tensors, forward_batch.req_pool_indices)
            # Plans have no work for the padding of a batch.
            out = torch.zeros(shape, dtype=q.dtype, device=q.device)
        else:
            assert self._work is not None
            run = self._work.attend
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
        values = self._pool.get_value_buffer(layer.layer_id)
        run(q.reshape(shape), keys, values, out=out, scale=layer.scaling, **scales)
        return out.view(-1, heads * head_dim)


def _lengths(batch: Any) -> tuple[IntArray, IntArray]:
    """[requests] new tokens of each, and all tokens."""
    seq_lens = batch.seq_lens_cpu.numpy()
    is_decode = batch.forward_mode.is_decode()
    return np.ones_like(seq_lens) if is_decode else np.array(batch.extend_lens), seq_lens


def _is_capturing() -> bool:
    """Whether the graph with shared prefixes is being captured."""
    label: str | None = get_capture_attention_variant()
    return label == SHARED


def _is_plain(forward_batch: Any) -> bool:
    """Whether a forward pass is an ordinary decode or extend."""
    mode = forward_batch.forward_mode
    is_extend = mode.is_extend() and not mode.is_target_verify() and not mode.is_draft_extend_v2()
    return (mode.is_decode() or is_extend) and forward_batch.spec_info is None


def _is_all_of(forward_batch: Any, batch: Any) -> bool:
    """Whether a forward pass runs all of a batch, and not a part of it or a dummy. Parts keep the
    order, so comparing the number and the ends is enough."""
    rids, reqs = forward_batch.rids, batch.reqs
    return bool(
        rids and len(rids) == len(reqs) and rids[0] == reqs[0].rid and rids[-1] == reqs[-1].rid
    )
