"""The device code, as Triton sees it; `cosched_kernels.shared_prefix` launches it.

Parameters have no types: Triton evaluates what stands there.
"""

import triton.language as tl

# Not `tl.max` and `tl.sum`: those are kernels themselves, compiled or interpreted for good when
# Triton is imported. They reduce with these two.
from triton.language.standard import _elementwise_max, _sum_combine


def attend_items_kernel(
    q,  # [tokens, q heads, head dim]
    k,  # [slots, kv heads, head dim]
    v,
    out,  # like q
    pieces,  # [pieces, q heads, head dim], the type of q
    weights,  # [pieces, q heads] float32: log2 of the sum of 2 ** score
    req_to_token,  # [rows, positions] int32: slots
    pool_rows,  # [requests]: row of each request
    items,  # Plan.items
    starts,  # Plan.starts
    token_order,  # Plan.token_order
    bases,  # Plan.bases
    score_scale,  # softmax scale times log2(e), and the scale of fp8 keys
    value_scale,  # the scale of fp8 values
    q_stride_token,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    v_stride_slot,
    v_stride_head,
    out_stride_token,
    out_stride_head,
    row_stride,
    HEIGHT: tl.constexpr,  # index into `starts`
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of two from HEAD_DIM on
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first_item = tl.load(starts + HEIGHT)
    num_work = (tl.load(starts + HEIGHT + 1) - first_item) * NUM_KV_HEADS
    dims = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    in_head = dims < HEAD_DIM
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = items + (first_item + work // NUM_KV_HEADS) * 8
        kv_head = work % NUM_KV_HEADS
        first_token = tl.load(item)
        num_tokens = tl.load(item + 1)
        request = tl.load(item + 2)
        kv_begin = tl.load(item + 3)
        kv_end = tl.load(item + 4)
        limit = tl.load(item + 5)
        piece = tl.load(item + 6)

        is_row = rows < num_tokens * GROUP
        ranks = first_token + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        tokens = tl.load(token_order + ranks, mask=is_row, other=0).to(tl.int64)
        is_query = is_row[:, None] & in_head[None, :]
        q_tile = tl.load(
            q + tokens[:, None] * q_stride_token + heads[:, None] * q_stride_head + dims[None, :],
            mask=is_query,
            other=0.0,
        )
        limits = limit + rows // GROUP
        slots_of = req_to_token + tl.load(pool_rows + request).to(tl.int64) * row_stride
        k_head = k + kv_head * k_stride_head
        v_head = v + kv_head * v_stride_head

        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        for start in range(kv_begin, kv_end, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            is_key = positions < kv_end
            slots = tl.load(slots_of + positions, mask=is_key, other=0).to(tl.int64)
            k_tile = tl.load(
                k_head + slots[None, :] * k_stride_slot + dims[:, None],
                mask=is_key[None, :] & in_head[:, None],
                other=0.0,
            )
            scores = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision=PRECISION)
            is_seen = is_key[None, :] & (positions[None, :] <= limits[:, None])
            scores = tl.where(is_seen, scores * score_scale, float("-inf"))
            higher = tl.maximum(best, tl.reduce(scores, 1, _elementwise_max))
            # A row that has seen nothing yet has no best: any finite number will do.
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            probs = tl.exp2(scores - shift[:, None])
            faded = tl.exp2(best - shift)
            total = total * faded + tl.reduce(probs, 1, _sum_combine)
            v_tile = tl.load(
                v_head + slots[:, None] * v_stride_slot + dims[None, :],
                mask=is_key[:, None] & in_head[None, :],
                other=0.0,
            ).to(q_tile.dtype)
            acc = acc * faded[:, None]
            acc = tl.dot(probs.to(q_tile.dtype), v_tile, acc, input_precision=PRECISION)
            best = higher

        has_seen = total > 0.0
        result = acc * (value_scale / tl.where(has_seen, total, 1.0))[:, None]
        if piece < 0:
            row = out + tokens * out_stride_token + heads * out_stride_head
            tl.store(row[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_query)
        else:
            place = tl.load(bases + ranks, mask=is_row, other=0).to(tl.int64) + piece
            place = place * (NUM_KV_HEADS * GROUP) + heads
            row = pieces + place * HEAD_DIM
            tl.store(
                row[:, None] + dims[None, :], result.to(pieces.dtype.element_ty), mask=is_query
            )
            weight = tl.where(
                has_seen, best + tl.log2(tl.where(has_seen, total, 1.0)), float("-inf")
            )
            tl.store(weights + place, weight, mask=is_row)


def reduce_pieces_kernel(
    pieces,
    weights,
    out,
    token_order,
    bases,
    num_tokens,  # [1] int32
    out_stride_token,
    out_stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads at a time
):
    num_blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    dims = tl.arange(0, BLOCK_D)
    for work in range(tl.program_id(0), tl.load(num_tokens) * num_blocks, tl.num_programs(0)):
        rank = work // num_blocks
        heads = (work % num_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        is_head = heads < NUM_HEADS
        is_value = is_head[:, None] & (dims < HEAD_DIM)[None, :]
        begin = tl.load(bases + rank).to(tl.int64)
        end = tl.load(bases + rank + 1).to(tl.int64)
        if end > begin:
            best = tl.full([BLOCK_H], float("-inf"), tl.float32)
            total = tl.full([BLOCK_H], 0.0, tl.float32)
            acc = tl.full([BLOCK_H, BLOCK_D], 0.0, tl.float32)
            for place in range(begin, end):
                weight = tl.load(weights + place * NUM_HEADS + heads, mask=is_head, other=0.0)
                piece = tl.load(
                    pieces + (place * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :],
                    mask=is_value,
                    other=0.0,
                ).to(tl.float32)
                higher = tl.maximum(best, weight)
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                faded = tl.exp2(best - shift)
                share = tl.exp2(weight - shift)
                acc = acc * faded[:, None] + piece * share[:, None]
                total = total * faded + share
                best = higher
            token = tl.load(token_order + rank).to(tl.int64)
            to = out + token * out_stride_token + heads[:, None] * out_stride_head + dims[None, :]
            tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_value)
