"""Designed batches: within the limits of the engine, and all over its range."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cosched.errors import ConfigError
from cosched.lab.profiling.design import MOST_PREFILLS, Limits, design_rounds

GPU = Limits(max_tokens=8192, max_running=256, kv_tokens=400_000, max_context=131_072, mixed=True)


@settings(deadline=None, max_examples=60)
@given(
    limits=st.builds(
        Limits,
        max_tokens=st.integers(16, 8192),
        max_running=st.integers(2, 600),
        kv_tokens=st.integers(256, 500_000),
        max_context=st.integers(64, 100_000),
        mixed=st.booleans(),
        page_size=st.sampled_from([1, 16, 64]),
    ),
    num_batches=st.integers(1, 80),
    seed=st.integers(0, 3),
)
@example(
    # One context alone was longer than the pool's share of the memory.
    limits=Limits(max_tokens=16, max_running=3, kv_tokens=512, max_context=514, mixed=False),
    num_batches=4,
    seed=0,
)
def test_no_round_is_beyond_what_the_engine_can_run(limits, num_batches, seed):
    rounds = design_rounds(limits, num_batches=num_batches, seed=seed)
    assert sum(len(one.batches) for one in rounds) == num_batches
    for one in rounds:
        assert 1 <= len(one.pool) <= limits.max_running - limits.num_beside
        assert sum(one.pool) <= limits.kv_tokens / 2
        for batch in one.batches:
            assert batch.prefills or batch.decodes
            assert limits.mixed or not (batch.prefills and batch.decodes)
            assert len(set(batch.decodes)) == len(batch.decodes)
            assert all(0 <= i < len(one.pool) for i in batch.decodes)
            new = sum(chunk.num_new for chunk in batch.prefills)
            assert new + len(batch.decodes) <= max(limits.max_tokens, len(batch.decodes) + 1)
            assert len(batch.prefills) <= MOST_PREFILLS
            for chunk in batch.prefills:
                assert chunk.num_new >= 1
                assert chunk.num_cached <= one.pool[chunk.prefix]
                assert chunk.num_cached % limits.page_size == 0
                assert chunk.num_new + chunk.num_cached <= limits.max_context


def test_sizes_reach_both_ends():
    batches = [b for r in design_rounds(GPU, num_batches=400, seed=0) for b in r.batches]
    tokens = [sum(c.num_new for c in b.prefills) for b in batches if b.prefills and not b.decodes]
    decodes = [len(b.decodes) for b in batches if b.decodes]
    contexts = [c for r in design_rounds(GPU, num_batches=400, seed=0) for c in r.pool]
    assert min(tokens) < 4 and max(tokens) > 6000
    assert min(decodes) == 1 and max(decodes) > 200
    assert min(contexts) < 10 and max(contexts) > 32_000


def test_decodes_are_of_like_and_of_different_contexts():
    """What a context costs, and what the longest one does, cannot be told apart otherwise."""
    longest = []
    for one in design_rounds(GPU, num_batches=400, seed=0):
        for batch in one.batches:
            if 4 <= len(batch.decodes) <= len(one.pool) / 2:
                contexts = [one.pool[place] for place in batch.decodes]
                longest.append(max(contexts) * len(contexts) / sum(contexts))
    assert sum(ratio < 1.3 for ratio in longest) > len(longest) / 5
    assert sum(ratio > 2 for ratio in longest) > len(longest) / 5


def test_an_engine_too_small_to_measure_is_refused():
    with pytest.raises(ConfigError, match="max_running is 1; measuring needs 2"):
        Limits(max_tokens=64, max_running=1, kv_tokens=1000, max_context=1000, mixed=True)
