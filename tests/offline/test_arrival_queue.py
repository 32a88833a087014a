"""The first-in-first-out pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.offline.pool import ArrivalQueue
from tests.factories import offline


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 20))))
def test_queue_is_a_sorted_set_of_waiting_requests(operations):
    queue = ArrivalQueue()
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


def test_removing_what_is_not_there_is_a_key_error():
    with pytest.raises(KeyError):
        ArrivalQueue().remove("absent")
