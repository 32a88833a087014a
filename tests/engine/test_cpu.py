"""SGLang's CPU engine with cosched's replacements."""

import io

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.bootstrap import has_cuda
from cosched.cpu.torch_native import attend


def reference_attention(query, key, value):
    """[heads, n, size] over [kv heads, length, size], one query at a time."""
    heads, num_queries, size = query.shape
    length = key.shape[1]
    key = key.repeat_interleave(heads // key.shape[0], dim=0)
    value = value.repeat_interleave(heads // value.shape[0], dim=0)
    rows = []
    for index in range(num_queries):
        seen = length - num_queries + index + 1
        weights = (query[:, index : index + 1] @ key[:, :seen].transpose(1, 2)) / size**0.5
        rows.append(weights.softmax(-1) @ value[:, :seen])
    return torch.cat(rows, dim=1)


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(1, 40),
    num_new=st.integers(1, 40),
    groups=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**31),
)
def test_attention_of_new_tokens_over_a_cached_prefix(length, num_new, groups, seed):
    num_new = min(num_new, length)
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(2 * groups, num_new, 8, generator=rng)
    key, value = torch.randn(2, 2, length, 8, generator=rng)
    result = attend(query, key, value, scale=None, enable_gqa=groups > 1)
    torch.testing.assert_close(result, reference_attention(query, key, value))


@pytest.mark.skipif(has_cuda(), reason="a server with a GPU compiles")
def test_a_repetition_penalty_compiles_nothing(make_engine):
    """The first one would stop the scheduler for seconds."""
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    make_engine()
    compiled = torch._dynamo.utils.counters["frames"]
    compiled.clear()
    logits = torch.tensor([[-1.0, 2.0]])
    apply_scaling_penalties(logits, torch.tensor([[2.0, 2.0]]))
    assert logits.tolist() == [[-2.0, 1.0]]
    assert not compiled


def test_a_sound_of_another_rate_is_read():
    """With torchaudio, also with a build of it for CUDA."""
    from sglang.srt.utils.common import load_audio

    soundfile.write(file := io.BytesIO(), np.zeros(800), 8_000, format="WAV")
    assert load_audio(file.getvalue(), 16_000).shape == (1_600,)
