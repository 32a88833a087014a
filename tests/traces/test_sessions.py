"""Sessions in a closed loop: what each turn holds, and when sessions begin."""

import heapq
from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosched_traces.catalogue import WORKLOADS, load_workload
from cosched_traces.errors import WorkloadError
from cosched_traces.lengths import Fixed, Quantiles, Uniform
from cosched_traces.sessions import (
    Sessions,
    SessionSet,
    keep_under_way,
    start_at,
)
from cosched_traces.transform import busiest_window, shuffle
from tests.traces.samples import common_prefix, request, workload

SMALL = SessionSet(
    turns=Uniform(1, 5),
    first=Uniform(10, 50),
    later=Uniform(1, 20),
    output=Uniform(1, 9),
    think=Quantiles(probabilities=(0, 1), points=(0, 20)),
    max_context_tokens=1000,
    head_tokens=(30, 60),
)


def supply(kind=SMALL, seed=0):
    return Sessions(supply=kind.supply("s", seed=seed))


def turns_of(made):
    """Its requests by session, in their order."""
    by_session: dict[str, list] = {}
    for each in made.requests:
        by_session.setdefault(each.session, []).append(each)
    return by_session


@pytest.mark.parametrize("name", sorted(n for n, w in WORKLOADS.items() if w.in_sessions))
def test_a_turn_holds_the_prompt_and_the_answer_before(name, request):
    data_dir = request.getfixturevalue("data_dir") if WORKLOADS[name].needs_files else None
    made = load_workload(name, seed=3, data_dir=data_dir, num_sessions=2, duration_s=120)
    sessions = turns_of(made)
    num_grown = num_pairs = 0
    for turns in sessions.values():
        for before, after in pairwise(turns):
            assert (after.after, after.session) == (before.rid, before.session)
            grown = after.num_prompt_tokens >= before.num_prompt_tokens + before.num_output_tokens
            num_pairs += 1
            num_grown += grown
    # A recorded prompt now and then leaves out the model's reasoning, or is cut.
    assert num_grown > 0.8 * num_pairs > 0
    if data_dir is None:
        assert num_grown == num_pairs


def test_sessions_share_one_of_the_heads_and_nothing_else():
    sessions = list(islice(SMALL.supply("s", seed=0), 30))
    firsts = [request(prompt=s.turns[0].segments).prompt(vocab_size=30_000) for s in sessions]
    shared = {common_prefix(one, other) for one, other in pairwise(firsts)}
    assert shared == {0, 30, 60}
    assert len({s.head_key for s in sessions}) == 2


def test_a_session_ends_before_its_context_is_too_long():
    kind = SessionSet(
        turns=Fixed(50),
        first=Fixed(10),
        later=Fixed(10),
        output=Fixed(10),
        think=SMALL.think,
        max_context_tokens=100,
    )
    session = next(kind.supply("s", seed=0))
    assert session.head_key is None
    assert [sum(n for _, n, _ in t.segments) for t in session.turns] == [10, 30, 50, 70, 90]


def answered_at_once(made):
    """(time, rid) of every request of a workload whose answers take no time."""
    followers: dict[str, list] = {}
    due = []
    for each in made.requests:
        if each.after is None:
            heapq.heappush(due, (each.arrival_s, each.rid))
        else:
            followers.setdefault(each.after, []).append(each)
    while due:
        time_s, rid = heapq.heappop(due)
        yield time_s, rid
        for each in followers.get(rid, ()):
            heapq.heappush(due, (time_s + each.think_s, each.rid))


@settings(max_examples=25, deadline=None)
@given(num_sessions=st.integers(1, 6), duration_s=st.floats(61, 300), seed=st.integers(0, 9))
def test_so_many_sessions_are_under_way_to_the_end(num_sessions, duration_s, seed):
    made = keep_under_way(
        "s", supply(seed=seed), num_sessions=num_sessions, duration_s=duration_s, seed=seed
    )
    followed = Counter(each.after for each in made.requests)
    assert max(count for rid, count in followed.items() if rid is not None) == 1
    assert followed[None] == num_sessions, "as many chains as sessions at a time"
    assert [r.arrival_s for r in made.requests if r.after is None] == [
        60.0 * place / num_sessions for place in range(num_sessions)
    ]
    times = dict((rid, time_s) for time_s, rid in answered_at_once(made))
    assert len(times) == len(made.requests)
    lasts = [rid for rid in times if not followed[rid]]
    slack_s = 1.0 * len(turns_of(made))  # a session counts for a second at least
    assert all(times[rid] >= duration_s - slack_s for rid in lasts)


def test_the_first_sessions_are_met_on_their_way():
    made = turns_of(keep_under_way("s", supply(), num_sessions=40, duration_s=99, seed=0))
    whole = {s.name: s.turns for s in islice(SMALL.supply("s", seed=0), len(made))}
    begun = [name for name, turns in made.items() if turns[0].after is None]
    assert len(begun) == 40
    for name, turns in made.items():
        assert turns[-1].segments == whole[name][-1].segments
        assert name in begun or len(turns) == len(whole[name])
    skipped = [len(whole[name]) - len(made[name]) for name in begun]
    assert set(skipped) >= {0, 1, 2} and min(skipped) == 0
    assert all(made[name][0].think_s == 0 for name in begun)


def test_turns_are_not_torn_apart():
    made = start_at("s", supply(), [0.0, 1.0, 2.0])
    for change in (lambda w: shuffle(w, seed=0), lambda w: busiest_window(w, 5.0)):
        with pytest.raises(WorkloadError, match="turns of sessions cannot be moved or drawn apart"):
            change(made)


def test_a_request_waits_only_for_one_that_stands_before():
    with pytest.raises(AssertionError, match="after"):
        workload(request("a", after="b"), request("b"))
