"""Who of the online requests can be in time, and in which order they are served."""

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import LateReason
from cosched.schedule.online_order import by_feasibility
from tests.factories import FakeView, online, prefilled


@dataclass
class Device:
    """One token takes a millisecond; each request has a second to its first token. most: of the
    time where decodes wait, for which `num_late` of them are late."""

    share: float = 1.0
    most: float = 0.0
    num_late: float = 0.0

    def ttft_s(self, request):
        return request.slo.ttft_s or 1.0

    def prefill_s(self, request):
        return (request.num_prompt_tokens - request.num_computed_tokens) / 1000

    def prefill_time_s(self, within_s):
        return self.share * within_s

    sure_prefill_time_s = prefill_time_s

    def most_prefill_time_s(self, within_s):
        return self.most * within_s

    def num_tpot_misses(self, prefills):
        return self.num_late


def order_of(*requests, now_s=1.0, share=1.0, unfinished=()):
    view = FakeView(online=requests, unfinished=unfinished, now_s=now_s, start_s=now_s)
    order = by_feasibility(view, Device(share))
    return [r.rid for r in order.due], [r.rid for r in order.late]


def test_whose_time_is_over_comes_behind_the_oldest_of_them_first():
    over = [online(f"over{i}", 10, arrival_s=-1.0 + i / 10, arrival_seq=i) for i in range(2)]
    assert order_of(*over, online("new", 10, arrival_s=0.9)) == (["new"], ["over0", "over1"])


def test_what_is_computed_already_counts_no_more():
    begun = prefilled(online("begun", 900, arrival_s=0.5), 700)
    other = online("other", 300, arrival_s=0.5)
    assert order_of(other, unfinished=(begun,)) == (["begun", "other"], [])


def test_decodes_wait_where_more_are_won_by_it_than_lost():
    queue = [online("a", 300, arrival_s=0.6), online("b", 300, arrival_s=0.7, arrival_seq=1)]
    over = online("over", 10, arrival_s=-1.0, arrival_seq=-1)

    def order(device, *requests):
        due, _, _, lends = by_feasibility(FakeView(online=requests, now_s=1.0, start_s=1.0), device)
        return [r.rid for r in due], lends

    assert order(Device(share=0.5, most=0.9, num_late=0.9), *queue) == (["a", "b"], True)
    assert order(Device(share=0.5, most=0.9, num_late=1.1), *queue) == (["a"], False)
    assert order(Device(share=0.9, most=1.0), *queue) == (["a", "b"], False), "no need"
    late_too = Device(share=0.5, most=0.9)
    assert order(late_too, over, *queue) == (["a"], False), "no time to win it back"


def test_it_is_said_once_why_a_request_is_late():
    def why(*requests):
        view = FakeView(online=requests, now_s=1.0, start_s=1.0)
        return by_feasibility(view, Device()).newly_late

    over = online("over", 10, arrival_s=-1.0)
    said = online("said", 10, arrival_s=-1.0, late=LateReason.CROWDED)
    huge = online("huge", 2000, arrival_s=0.9)
    queue = [online(f"r{i}", n, arrival_s=0.5) for i, n in enumerate([300, 400])]
    assert why(over, said, huge, *queue) == {
        "over": LateReason.OVERDUE,
        "huge": LateReason.TOO_LONG,
        "r1": LateReason.CROWDED,
    }
    assert why(queue[0]) == {}


@given(
    st.lists(st.tuples(st.integers(1, 900), st.floats(0, 0.99)), max_size=7),
    st.sampled_from([0.3, 0.7, 1.0]),
)
def test_as_many_are_in_time_as_in_any_order(drawn, share):
    queue = [
        online(f"r{i}", num_tokens, arrival_s=arrival_s, arrival_seq=i)
        for i, (num_tokens, arrival_s) in enumerate(sorted(drawn, key=lambda d: d[1]))
    ]
    due, late = order_of(*queue, share=share)
    assert sorted(due + late) == [f"r{i}" for i in range(len(queue))]

    def are_in_time(requests):
        done_s = 0.0
        for request in requests:
            done_s += request.num_prompt_tokens / 1000
            if done_s > share * (request.arrival_s + 1.0 - 1.0) + 1e-12:
                return False
        return True

    by_rid = {request.rid: request for request in queue}
    assert are_in_time([by_rid[rid] for rid in due])
    most = max(
        (
            n
            for n in range(len(queue) + 1)
            if any(map(are_in_time, itertools.combinations(queue, n)))
        ),
        default=0,
    )
    assert len(due) == most


def test_those_beyond_the_first_few_deadlines_come_behind_them_and_before_the_late():
    queue = [online(f"r{i}", 1, arrival_s=0.5 + i / 1e6, arrival_seq=i) for i in range(100)]
    over = online("over", 1, arrival_s=-1.0, arrival_seq=-1)
    due, late = order_of(over, *queue)
    assert due == [f"r{i}" for i in range(100)] and late == ["over"]
