"""How long requests are."""

import pytest

from cosched_traces.errors import WorkloadError
from cosched_traces.resize import rescale_lengths
from tests.traces.samples import common_prefix, lengths_of, request, workload

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
