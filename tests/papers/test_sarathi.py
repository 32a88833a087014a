"""Sarathi++ on hand-made views."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.plan import SkipReason
from cosched.papers.hygen.sarathi import SarathiPolicy, ThrottledPolicy
from cosched.papers.hygen.victims import NUM_ALIKE
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled


def plan_of(view):
    plan = SarathiPolicy().plan(view, None)[0]
    validate(plan, view)
    return plan


@pytest.mark.parametrize(
    ("fields", "prefill", "preempted"),
    [
        pytest.param(
            {
                "running": tuple(decoding(online(f"d{i}")) for i in range(12)),
                "online": [online("a", 100)],
                "offline": [offline("b", 150), offline("c", 1000)],
            },
            {"a": 100, "b": 150, "c": 250},
            [],
            id="offline fills what online and decodes leave of 512 tokens",
        ),
        pytest.param(
            {"online": [online("a", 600), online("b", 50)], "offline": [offline("c", 50)]},
            {"a": 512},
            [],
            id="only one prefill stays unfinished",
        ),
        pytest.param(
            {"unfinished": (prefilled(offline("b", 2000), 512),), "online": [online("a", 900)]},
            {"a": 512},
            ["b"],
            id="an unfinished offline prefill gives its place to an online one",
        ),
        pytest.param(
            {"unfinished": (prefilled(offline("b", 2000), 512),), "online": [online("a", 100)]},
            {"a": 100, "b": 412},
            [],
            id="an unfinished offline prefill continues beside a small online one",
        ),
        pytest.param(
            {
                "unfinished": (prefilled(online("a", 800), 512),),
                "online": [online("b", 50)],
                "offline": [offline("c", 500)],
            },
            {"a": 288, "b": 50, "c": 174},
            [],
            id="an unfinished online prefill goes first",
        ),
        pytest.param(
            {
                "total_kv": 1000,
                "running": (decoding(offline("old", 400)), decoding(offline("young", 400))),
                "online": [online("a", 300)],
            },
            {"a": 300},
            ["young"],
            id="the youngest offline request is preempted for memory",
        ),
        pytest.param(
            {
                "total_kv": 1000,
                "running": tuple(
                    decoding(offline(rid, num))
                    for rid, num in (("old", 300), ("large", 350), ("small", 50))
                ),
                "online": [online("a", 400)],
            },
            {"a": 400},
            ["large"],
            id="one large offline request is preempted rather than several",
        ),
        pytest.param(
            {
                "total_kv": 10_000,
                "running": (
                    decoding(offline("first", 2000)),
                    *(decoding(offline(f"o{i}", 500)) for i in range(NUM_ALIKE)),
                ),
                "online": [online("a", 4400)],
                "caps": make_caps(max_chunk_tokens=8192, max_prefill_tokens=8192),
            },
            {"a": 4400},
            [f"o{NUM_ALIKE - 1}"],
            id="but none that is far ahead in the queue",
        ),
        pytest.param(
            {
                "caps": make_caps(max_running_requests=2),
                "running": (decoding(offline("b")), decoding(online("c"))),
                "online": [online("a")],
            },
            {"a": 100},
            ["b"],
            id="an offline request is preempted for a slot",
        ),
        pytest.param(
            {
                "total_kv": 1000,
                "running": (decoding(online("big", 800)), decoding(offline("small", 50))),
                "online": [online("a", 900)],
            },
            {},
            [],
            id="no request is preempted in vain",
        ),
    ],
)
def test_online_requests_come_first_within_the_token_budget(fields, prefill, preempted):
    plan = plan_of(FakeView(**fields))
    assert [*plan.prefill.items()] == [*prefill.items()]
    assert [stop.rid for stop in plan.preempt] == preempted


@pytest.mark.parametrize(("total_kv", "preempted"), [(810, []), (809, ["b"])])
def test_offline_gives_way_when_the_next_decode_does_not_fit(total_kv, preempted):
    running = tuple(
        decoding(make(rid, 400, max_new_tokens=100), 5)
        for rid, make in (("a", online), ("b", offline))
    )
    plan = plan_of(FakeView(total_kv=total_kv, running=running))
    assert [stop.rid for stop in plan.preempt] == preempted


class TestThrottle:
    """Two offline requests per second."""

    def setup_method(self):
        self.policy = ThrottledPolicy(2.0)
        self.state = self.policy.initial
        self.waiting = [offline(f"o{i}", 10) for i in range(20)]

    def admit(self, now_s, *, refused=()):
        """How many are admitted, and then wait no longer but for those the engine refuses."""
        view = FakeView(offline=self.waiting, now_s=now_s)
        plan, self.state = self.policy.plan(view, self.state)
        validate(plan, view)
        if len(plan.prefill) < len(self.waiting):
            assert set(plan.skipped.values()) == {SkipReason.RATE_LIMIT}
        gone = plan.prefill.keys() - set(refused)
        self.waiting = [r for r in self.waiting if r.rid not in gone]
        return len(plan.prefill)

    def test_an_admission_that_the_engine_refused_was_none(self):
        assert self.admit(10.0, refused={"o0"}) == 1
        assert self.admit(10.1) == 1
        assert self.admit(10.2) == 0

    def test_what_comes_back_counts_once(self):
        assert self.admit(10.0) == 1
        self.waiting.insert(0, offline("back", 10, num_preemptions=1))
        assert self.admit(10.5) == 1
        assert self.admit(10.5) == 1, "the one that came back took nobody's place"

    def test_begins_anew_when_nobody_waits(self):
        self.admit(10.0)
        self.waiting = []
        self.admit(500.0)
        self.waiting = [offline("late", 10), offline("later", 10)]
        assert self.admit(1000.0) == 1

    @given(st.lists(st.floats(0.0, 1.0), max_size=30))
    def test_never_beyond_the_rate(self, gaps):
        self.setup_method()
        now_s, num_admitted = 0.0, 0
        for gap in gaps:
            now_s += gap
            num_admitted += self.admit(now_s)
            assert num_admitted <= 1 + 2.0 * now_s
