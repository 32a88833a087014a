"""Batches of requests that share prefixes, with their KV in pages, and attention done plainly."""

import numpy as np
import torch
from hypothesis import strategies as st

from cosched_kernels.groups import Shared, groups_of
from cosched_kernels.plan import HeadShape, Tiling, make_plan

TILING = Tiling(rows=(16, 64), programs=4)


@st.composite
def trees(draw, *, max_levels=4, max_requests=5, page_size=1, max_length=12):
    """The parts of each request's tree prefix, by name: requests with the same first names share
    these parts. Names are (path, length in tokens)."""
    paths = []
    for _ in range(draw(st.integers(1, max_requests))):
        depth = draw(st.integers(0, max_levels))
        paths.append([draw(st.integers(0, 1)) for _ in range(depth)])
    lengths = {}
    requests = []
    for path in paths:
        parts = []
        for level in range(len(path)):
            name = tuple(path[: level + 1])
            if name not in lengths:
                lengths[name] = page_size * draw(st.integers(1, max(1, max_length // page_size)))
            parts.append((name, lengths[name]))
        requests.append(parts)
    return requests


class Batch:
    """KV of requests on the CPU, shared as the radix tree would share it."""

    def __init__(
        self,
        requests,
        *,
        own,
        new,
        page_size=1,
        heads=(4, 2),
        head_dim=16,
        seed=0,
        dtype=torch.float32,
        kv_dtype=None,
    ):
        """own, new: tokens of each request behind its tree prefix, the last `new` computed now."""
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.page_size = page_size
        self.own, self.new = list(own), np.array(new)
        prefixes = [sum(length for _, length in parts) for parts in requests]
        self.seq_lens = np.array([p + o for p, o in zip(prefixes, own, strict=True)])
        assert (self.new <= np.array(own)).all()
        num_slots = 0
        pages_of = {}
        tokens_of = {}
        rows = []
        self.shared = []

        def take(length):
            nonlocal num_slots
            begin = num_slots
            num_slots += -(-length // page_size) * page_size
            return list(range(begin, begin + length))

        for index, parts in enumerate(requests):
            slots, tokens = [], []
            for name, length in parts:
                if name not in pages_of:
                    pages_of[name] = take(length)
                    # The first token tells siblings apart, the others may agree by chance.
                    tokens_of[name] = [name[-1], *rng.integers(0, 2, length - 1)]
                slots += pages_of[name]
                tokens += tokens_of[name]
            slots += take(own[index])
            rows.append(slots)
            tokens = np.array(tokens + [0] * own[index], dtype=np.int64)
            self.shared.append(Shared(namespace=None, tokens=tokens, length=prefixes[index]))
        scatter = rng.permutation(-(-num_slots // page_size))
        width = int(self.seq_lens.max())
        self.req_to_token = torch.zeros((len(requests) + 1, width), dtype=torch.int32)
        self.pool_rows = torch.arange(len(requests)).flip(0) + 1
        for index, slots in enumerate(rows):
            places = [scatter[s // page_size] * page_size + s % page_size for s in slots]
            self.req_to_token[self.pool_rows[index], : len(slots)] = torch.tensor(places)
        num_q, num_kv = heads
        self.heads = HeadShape(
            num_q_heads=num_q,
            num_kv_heads=num_kv,
            head_dim=head_dim,
            q_bytes=dtype.itemsize,
            kv_bytes=(kv_dtype or dtype).itemsize,
        )
        size = len(scatter) * page_size
        self.k, self.v = (
            torch.randn(size, num_kv, head_dim).to(dtype).to(kv_dtype or dtype) for _ in range(2)
        )
        self.q = torch.randn(int(self.new.sum()), num_q, head_dim).to(dtype)
        self.scale = head_dim**-0.5

    def groups(self, min_saved=1):
        return groups_of(self.shared, page_size=self.page_size, min_saved=min_saved)

    def plan(self, *, tiling=TILING, min_saved=1):
        return make_plan(
            self.groups(min_saved),
            num_queries=self.new,
            seq_lens=self.seq_lens,
            heads=self.heads,
            tiling=tiling,
        )

    def attention(self, k_scale=1.0, v_scale=1.0):
        """Each token by itself over all that it sees, in float64."""
        group = self.heads.group
        out, token = torch.empty_like(self.q, dtype=torch.float64), 0
        for index, (length, new) in enumerate(zip(self.seq_lens, self.new, strict=True)):
            slots = self.req_to_token[self.pool_rows[index]].long()
            for seen in range(length - new + 1, length + 1):
                k, v = (
                    x[slots[:seen]].double().repeat_interleave(group, dim=1) * scale
                    for x, scale in ((self.k, k_scale), (self.v, v_scale))
                )
                scores = torch.einsum("hd,shd->hs", self.q[token].double(), k) * self.scale
                out[token] = torch.einsum("hs,shd->hd", scores.softmax(-1), v)
                token += 1
        return out
