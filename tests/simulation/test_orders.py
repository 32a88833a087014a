"""Orders in which a client that knows all sends the offline set."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import RequestClass
from cosched.cost_models.registry import make_cost_model
from cosched.simulation.machine import Machine
from cosched.simulation.orders import SENT, in_order
from cosched_traces.workload import Segment, TraceRequest

CHUNK = 200
LONGEST = 50
PREFIX = 30
MACHINE = Machine(chunk_tokens=CHUNK)
COST_MODEL = make_cost_model("roofline", model=MACHINE.model, gpu=MACHINE.gpu)


def requests_of(shapes):
    """(group, tokens of its own, output tokens) each; a group's prefix has `PREFIX`."""
    return [
        TraceRequest(
            rid=str(index),
            request_class=RequestClass.OFFLINE,
            arrival_s=0.0,
            segments=(
                Segment(key=group, num_tokens=PREFIX),
                Segment(key=1000 + index, num_tokens=own),
            ),
            num_output_tokens=output,
        )
        for index, (group, own, output) in enumerate(shapes)
    ]


SHAPES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, LONGEST), st.integers(1, 50)), max_size=60
)


def sent(requests, order):
    return in_order(requests, order, machine=MACHINE, cost_model=COST_MODEL)


@given(SHAPES, st.sampled_from(sorted(SENT)))
def test_every_request_is_sent_once(shapes, order):
    requests = requests_of(shapes)
    assert sorted(r.rid for r in sent(requests, order)) == sorted(r.rid for r in requests)


@given(SHAPES)
def test_depth_first_keeps_those_that_share_a_prefix_together(shapes):
    groups = [request.segments[0].key for request in sent(requests_of(shapes), "depth-first")]
    changes = sum(a != b for a, b in pairwise(groups))
    assert changes == max(len(set(groups)) - 1, 0)


@given(SHAPES)
def test_the_first_on_a_prefix_is_a_chunk_ahead_of_the_others(shapes):
    """As far as there is so much before it, or it would have to go before the first of all."""
    order = sent(requests_of(shapes), "prefixes-ahead")
    together = sent(requests_of(shapes), "depth-first")
    groups = Counter(r.segments[0].key for r in order)
    # What is computed of each when its prefix is there, if others have the same.
    new = {
        r.rid: r.segments[1].num_tokens + (PREFIX if groups[r.segments[0].key] == 1 else 0)
        for r in order
    }
    for group, num_members in groups.items():
        members = [r for r in together if r.segments[0].key == group]
        first = next(r for r in order if r.segments[0].key == group)
        assert first == members[0]
        before = together[: together.index(first)]
        firsts = {
            r.segments[0].key: r.rid for r in reversed(before) if groups[r.segments[0].key] > 1
        }
        num_before = sum(new[r.rid] for r in before if r.rid not in firsts.values())
        if num_members > 1 and num_before >= CHUNK:
            between = order[order.index(first) + 1 : order.index(members[1])]
            assert sum(new[r.rid] for r in between) >= CHUNK - LONGEST - PREFIX


@given(SHAPES)
def test_the_cheapest_begins_with_the_shortest_replies_to_equal_long_prompts(shapes):
    equal = [(group, 2000, output) for group, _, output in shapes]
    outputs = [request.num_output_tokens for request in sent(requests_of(equal), "cheapest")]
    assert outputs == sorted(outputs)
