"""Prefix sharing is as asked for."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import RequestClass
from cosched_traces.errors import WorkloadError
from cosched_traces.lengths import Fixed, Uniform
from cosched_traces.offline_sets import (
    PrefixGroups,
    length_pairs,
)
from cosched_traces.trace_summary import shared_ratio
from tests.traces.samples import common_prefix, rids_of


def groups(**fields):
    return PrefixGroups(
        **{
            "num_groups": 4,
            "requests_per_group": 5,
            "shared": Uniform(50, 90),
            "unique": Uniform(5, 9),
            "output": Uniform(1, 9),
            **fields,
        }
    )


def heads_of(workload):
    return [r.segments[-2].key for r in workload.requests]


def test_groups_share_their_heads_and_nothing_else():
    made = groups().workload("g", seed=0)
    assert len(made.requests) == 20
    assert set(Counter(heads_of(made)).values()) == {5}
    assert {r.arrival_s for r in made.requests} == {0}
    assert {r.request_class for r in made.requests} == {RequestClass.OFFLINE}
    assert len(set(rids_of(made))) == 20
    for one in made.requests[:5]:
        for other in made.requests[5:]:
            same = common_prefix(*(r.prompt(vocab_size=50_000) for r in (one, other)))
            alike = one.segments[0] == other.segments[0]
            assert same == (one.segments[0].num_tokens if alike else 0)


def test_groups_of_different_sizes():
    made = groups(num_groups=3, requests_per_group=(1, 2, 3)).workload("g", seed=0)
    assert sorted(Counter(heads_of(made)).values()) == [1, 2, 3]
    with pytest.raises(WorkloadError, match="2 numbers of requests for 3 groups"):
        groups(num_groups=3, requests_per_group=(1, 2)).workload("g", seed=0)


@given(
    num_groups=st.integers(1, 6),
    each=st.integers(1, 6),
    shared=st.integers(1, 100),
    unique=st.integers(1, 100),
)
def test_the_shared_share_is_the_one_of_the_numbers(num_groups, each, shared, unique):
    made = groups(
        num_groups=num_groups,
        requests_per_group=each,
        shared=Fixed(shared),
        unique=Fixed(unique),
    ).workload("g", seed=0)
    expected = shared * (each - 1) / (each * (shared + unique))
    assert shared_ratio(made) == pytest.approx(expected)


def test_pairs_within_a_context_keep_both_distributions():
    prompt, output = Uniform(1, 4000), Uniform(1, 3000)
    free = length_pairs(prompt, output, size=2000, seed=1)
    held = length_pairs(prompt, output, size=2000, seed=1, max_total_tokens=4500)
    assert max(p + o for p, o in free) > 4500 >= max(p + o for p, o in held)
    assert sorted(p for p, _ in free) == sorted(p for p, _ in held)
    assert sorted(o for _, o in free) == sorted(o for _, o in held)
