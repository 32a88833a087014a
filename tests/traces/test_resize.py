"""How long requests are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched_traces.errors import WorkloadError
from cosched_traces.resize import Overlong, limit_tokens, rescale_lengths
from tests.traces.samples import common_prefix, lengths_of, request, rids_of, workload

VOCAB = 50_000


def pair(first=100, second=60):
    """Two requests on one head."""
    return workload(
        request("a", prompt=((1, first), (2, 30)), output=10),
        request("b", prompt=((1, first), (3, second)), output=20),
    )


def test_rescaled_lengths_keep_what_is_shared():
    scaled = rescale_lengths(pair(), prompt=0.5, output=0.1)
    assert lengths_of(scaled) == [(65, 1), (80, 2)]
    one, other = (r.prompt(vocab_size=VOCAB) for r in scaled.requests)
    assert common_prefix(one, other) == 50
    asked = workload(request(output=4, max_new_tokens=10))
    assert rescale_lengths(asked, output=2).requests[0].max_new_tokens == 20


def test_given_tokens_have_their_length():
    given_ = workload(request(token_ids=(1, 2, 3)))
    assert rescale_lengths(given_, output=2).requests[0].num_output_tokens == 10
    with pytest.raises(WorkloadError, match="cannot be rescaled"):
        rescale_lengths(given_, prompt=2)


def test_truncated_prompts_keep_their_heads():
    limited = limit_tokens(pair(), 150, how=Overlong.TRUNCATE)
    assert (limited.num_truncated, limited.num_dropped) == (1, 0)
    assert lengths_of(limited.workload) == [(130, 10), (130, 20)]
    cut = limit_tokens(pair(), 90, how=Overlong.TRUNCATE).workload
    assert lengths_of(cut) == [(80, 10), (70, 20)]
    one, other = (r.prompt(vocab_size=VOCAB) for r in cut.requests)
    assert common_prefix(one, other) == 70


def test_dropped_requests_are_counted():
    limited = limit_tokens(pair(), 150, how=Overlong.DROP)
    assert (limited.num_truncated, limited.num_dropped) == (0, 1)
    assert rids_of(limited.workload) == ["a"]
    assert limited.workload.notes == ("drop 1 requests over 150 tokens",)


@given(
    prompts=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    output=st.integers(1, 300),
    asked=st.none() | st.integers(1, 300),
    limit=st.integers(2, 300),
    tokens=st.booleans(),
)
def test_nothing_is_over_the_limit(prompts, output, asked, limit, tokens):
    fields = {"token_ids": tuple(range(sum(prompts)))} if tokens else {}
    segments = tuple(enumerate(prompts))
    given_ = workload(request(prompt=segments, output=output, max_new_tokens=asked, **fields))
    (kept,) = limit_tokens(given_, limit, how=Overlong.TRUNCATE).workload.requests
    assert kept.num_prompt_tokens >= 1
    assert kept.num_output_tokens >= 1
    assert kept.num_prompt_tokens + max(kept.num_output_tokens, kept.max_new_tokens or 0) <= limit
    before = given_.requests[0].prompt(vocab_size=VOCAB)
    after = kept.prompt(vocab_size=VOCAB)
    assert common_prefix(before, after) == len(after)
    dropped = limit_tokens(given_, limit, how=Overlong.DROP)
    assert bool(dropped.num_dropped) == (kept != given_.requests[0])


def test_a_limit_needs_room():
    with pytest.raises(WorkloadError, match="max_total_tokens 1"):
        limit_tokens(pair(), 1, how=Overlong.DROP)
