"""The first-in-first-out pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.pool.pool import ArrivalQueue
from tests.factories import offline


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 20))))
def test_queue_is_a_sorted_set_of_waiting_requests(operations):
    queue = ArrivalQueue()
    with pytest.raises(KeyError):
        queue.remove("absent")
    model = {}
    for verb, seq in operations:
        rid = f"r{seq}"
        if verb == "add" and rid not in model:
            model[rid] = offline(rid, arrival_seq=seq)
            queue.add(model[rid])
        elif verb == "remove" and rid in model:
            assert queue.remove(rid) is model.pop(rid)
        assert len(queue) == len(model)
        assert [r.arrival_seq for r in queue] == sorted(r.arrival_seq for r in model.values())
        assert all(queue.get(rid) is request and rid in queue for rid, request in model.items())


@given(st.integers(0, 12), st.lists(st.integers(-1, 4), max_size=20))
def test_an_order_gives_each_once_whether_it_is_walked_or_offered(num, steps):
    """-1: the next one; n: candidates, of which the last of the first n is taken."""
    queue = ArrivalQueue()
    for i in range(num):
        queue.add(offline(f"r{i}", arrival_seq=i))
    order, left, given = queue.order(), [f"r{i}" for i in range(num)], []
    for step in steps:
        if step < 0:
            found = next(order, None)
            assert (found.rid if found else None) == (left[0] if left else None)
        else:
            ((*offered,),) = order.candidates(step)
            assert [r.rid for r in offered] == left[:step]
            found = offered[-1] if offered else None
            if found is not None:
                order.take(found)
                order.skip_sharing(found, 64)  # nobody knows who shares
        if found is not None:
            left.remove(found.rid)
            given.append(found.rid)
    assert len(queue) == num, "an order takes nothing out"
