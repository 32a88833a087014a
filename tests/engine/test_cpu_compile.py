"""No request makes the scheduler wait for a compiler."""

from __future__ import annotations

import torch

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.bootstrap import has_cuda


def test_a_repetition_penalty_compiles_nothing_on_a_cpu(make_engine):
    if has_cuda():
        return
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    make_engine()
    compiled = torch._dynamo.utils.counters["frames"]
    compiled.clear()
    logits = torch.tensor([[-1.0, 2.0]])
    apply_scaling_penalties(logits, torch.tensor([[2.0, 2.0]]))
    assert logits.tolist() == [[-2.0, 1.0]]
    assert not compiled
