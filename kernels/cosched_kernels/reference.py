"""The kernels of `cosched_kernels.shared_prefix` in plain PyTorch: same names, same arguments.

They compute item by item what the kernels compute, on any device and in any type. A CPU server runs
them in the kernels' place, and tests compare the two.
"""

from __future__ import annotations

import torch

from cosched_kernels.buffers import PlanTensors

_LOG2_E = 1.4426950408889634


def attend_items(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: torch.Tensor,
    plan: PlanTensors,
    req_to_token: torch.Tensor,
    pool_rows: torch.Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See `cosched_kernels.shared_prefix.attend_items`."""
    group = q.shape[1] // k.shape[1]
    bases = plan.bases.tolist()
    for first, num, request, begin, end, limit, piece, _ in plan.items[: plan.starts[-1]].tolist():
        ranks = range(first, first + num)
        tokens = plan.token_order[first : first + num].long()
        slots = req_to_token[pool_rows[request], begin:end].long()
        keys = k[slots].float().repeat_interleave(group, dim=1) * k_scale
        values = v[slots].float().repeat_interleave(group, dim=1) * v_scale
        scores = torch.einsum("thd,shd->ths", q[tokens].float(), keys) * (scale * _LOG2_E)
        seen_up_to = limit + torch.arange(num, device=q.device)
        positions = torch.arange(begin, end, device=q.device)
        scores.masked_fill_(positions > seen_up_to[:, None, None], float("-inf"))
        weight = torch.logsumexp(scores * (1 / _LOG2_E), dim=-1) * _LOG2_E
        # A token that sees nothing of this span gets zeros, and no weight.
        probs = torch.exp2(scores - weight.masked_fill(weight.isneginf(), 0.0)[..., None])
        result = torch.einsum("ths,shd->thd", probs, values)
        if piece < 0:
            out[tokens] = result.to(out.dtype)
        else:
            places = torch.tensor([bases[rank] + piece for rank in ranks], device=q.device)
            plan.pieces[places] = result.to(plan.pieces.dtype)
            plan.weights[places] = weight


def reduce_pieces(*, out: torch.Tensor, plan: PlanTensors) -> None:
    """See `cosched_kernels.shared_prefix.reduce_pieces`."""
    num_tokens = int(plan.num_tokens)
    bases = plan.bases[: num_tokens + 1].tolist()
    tokens = plan.token_order[:num_tokens].tolist()
    for token, begin, end in zip(tokens, bases[:-1], bases[1:], strict=True):
        if end > begin:
            shares = torch.softmax(plan.weights[begin:end] / _LOG2_E, dim=0)
            pieces = plan.pieces[begin:end].float()
            out[token] = torch.einsum("ph,phd->hd", shares, pieces).to(out.dtype)
