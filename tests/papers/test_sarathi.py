"""Sarathi++ on hand-made views."""

from hypothesis import given
from hypothesis import strategies as st

from cosched.core.plan import SkipReason
from cosched.core.request import RequestClass
from cosched.core.view import Match
from cosched.papers.hygen.sarathi import SarathiPolicy, ThrottledPolicy
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled


def plan_of(view):
    plan = SarathiPolicy().plan(view, None)[0]
    validate(plan, view)
    return plan


def stopped(plan):
    return [preemption.rid for preemption in plan.preempt]


def test_nothing_waits_nothing_is_prefilled():
    plan = plan_of(FakeView(running=(decoding(online("a")),)))
    assert plan.prefill == {}


def test_online_comes_before_older_offline():
    view = FakeView(offline=[offline("old", 300)], online=[online("new", 300)], caps=make_caps())
    assert list(plan_of(view).prefill.items()) == [("new", 300), ("old", 212)]


def test_offline_fills_what_online_leaves_of_the_token_budget():
    view = FakeView(
        running=tuple(decoding(online(f"d{i}")) for i in range(12)),
        online=[online("a", 100)],
        offline=[offline("b", 150), offline("c", 1000)],
    )
    plan = plan_of(view)
    assert plan.prefill == {"a": 100, "b": 150, "c": 250}
    assert sum(plan.prefill.values()) + 12 == 512


def test_only_one_prefill_stays_unfinished():
    view = FakeView(online=[online("a", 600), online("b", 50)], offline=[offline("c", 50)])
    assert plan_of(view).prefill == {"a": 512}


def test_unfinished_offline_prefill_is_stopped_when_online_needs_its_place():
    view = FakeView(unfinished=(prefilled(offline("b", 2000), 512),), online=[online("a", 900)])
    plan = plan_of(view)
    assert stopped(plan) == ["b"]
    assert plan.prefill == {"a": 512}


def test_unfinished_offline_prefill_goes_on_beside_a_small_online_request():
    view = FakeView(unfinished=(prefilled(offline("b", 2000), 512),), online=[online("a", 100)])
    plan = plan_of(view)
    assert stopped(plan) == []
    assert list(plan.prefill.items()) == [("a", 100), ("b", 412)]


def test_unfinished_prefill_needs_no_further_slot():
    running = (decoding(offline("a")), decoding(online("b")))
    view = FakeView(
        caps=make_caps(max_running_requests=3),
        running=running,
        unfinished=(prefilled(offline("c", 2000), 512),),
    )
    assert plan_of(view).prefill == {"c": 510}


def test_unfinished_online_prefill_goes_first():
    view = FakeView(
        unfinished=(prefilled(online("a", 800), 512),),
        online=[online("b", 50)],
        offline=[offline("c", 500)],
    )
    assert list(plan_of(view).prefill.items()) == [("a", 288), ("b", 50), ("c", 174)]


def test_running_offline_is_stopped_for_kv_memory_youngest_first():
    old, young = offline("old", 400), offline("young", 400)
    view = FakeView(
        total_kv=1000, running=(decoding(old), decoding(young)), online=[online("a", 300)]
    )
    plan = plan_of(view)
    assert stopped(plan) == ["young"]
    assert plan.prefill == {"a": 300}


def test_running_offline_is_stopped_for_a_request_slot():
    view = FakeView(
        caps=make_caps(max_running_requests=2),
        running=(decoding(offline("b")), decoding(online("c"))),
        online=[online("a")],
    )
    plan = plan_of(view)
    assert stopped(plan) == ["b"]
    assert plan.prefill == {"a": 100}


def test_nothing_is_stopped_in_vain():
    view = FakeView(
        total_kv=1000,
        running=(decoding(online("big", 800)), decoding(offline("small", 50))),
        online=[online("a", 900)],
    )
    plan = plan_of(view)
    assert stopped(plan) == []
    assert plan.skipped["a"] is SkipReason.MEMORY_BUDGET


def test_no_offline_is_admitted_while_an_online_request_lacks_memory():
    view = FakeView(
        total_kv=1000,
        running=(decoding(online("big", 800)),),
        online=[online("a", 900)],
        offline=[offline("b", 10)],
    )
    assert plan_of(view).prefill == {}


def test_running_online_is_never_stopped():
    view = FakeView(
        caps=make_caps(max_running_requests=2),
        running=(decoding(online("b")), decoding(online("c"))),
        online=[online("a")],
    )
    assert stopped(plan_of(view)) == []


def test_offline_gives_way_when_the_next_decode_does_not_fit():
    view = FakeView(
        total_kv=810,
        running=(
            decoding(online("a", 400, max_new_tokens=100), 5),
            decoding(offline("b", 400, max_new_tokens=100), 5),
        ),
    )
    assert stopped(plan_of(view)) == []
    full = FakeView(
        total_kv=809,
        running=(
            decoding(online("a", 400, max_new_tokens=100), 5),
            decoding(offline("b", 400, max_new_tokens=100), 5),
        ),
    )
    assert stopped(plan_of(full)) == ["b"]


def test_without_mixed_batches_prefill_and_decode_take_turns():
    caps = make_caps(mixed_batches=False)
    running = (decoding(online("d")),)
    plan = plan_of(FakeView(caps=caps, running=running, online=[online("a", 50)]))
    assert plan.prefill == {"a": 50}
    plan = plan_of(FakeView(caps=caps, running=running))
    assert plan.prefill == {}


def test_cached_prefix_costs_no_tokens():
    view = FakeView(
        online=[online("a", 1000)],
        evictable_kv=900,
        cached={"a": Match(cached=900, evictable=900)},
    )
    assert plan_of(view).prefill == {"a": 100}


def test_chunk_ends_on_a_page_boundary():
    view = FakeView(
        caps=make_caps(page_size=64, max_chunk_tokens=512),
        running=tuple(decoding(online(f"d{i}")) for i in range(10)),
        online=[online("a", 2000)],
        cached={"a": Match(cached=64, evictable=0)},
    )
    assert plan_of(view).prefill == {"a": 448}


requests_strategy = st.lists(
    st.tuples(st.booleans(), st.integers(1, 900), st.integers(1, 60), st.sampled_from("wrwrwu")),
    max_size=14,
)


@given(
    requests=requests_strategy,
    total_kv=st.integers(1000, 6000),
    page_size=st.sampled_from([1, 16]),
    mixed=st.booleans(),
    slots=st.integers(1, 8),
)
def test_any_plan_is_valid_and_keeps_the_budgets(requests, total_kv, page_size, mixed, slots):
    caps = make_caps(page_size=page_size, mixed_batches=mixed, max_running_requests=slots)
    lists = {"w": [], "r": [], "u": []}
    held = 0
    for index, (is_online, num_prompt, max_new, where) in enumerate(requests):
        make = online if is_online else offline
        request = make(f"q{index}", num_prompt, max_new_tokens=max_new)
        if where != "w":
            size = num_prompt + max_new
            full = held + size > total_kv or len(lists["r"]) + len(lists["u"]) >= slots
            if full or (where == "u" and (lists["u"] or num_prompt < 2)):
                where = "w"
            else:
                held += size
                request = decoding(request) if where == "r" else prefilled(request, num_prompt // 2)
        lists[where].append(request)
    waiting = lists["w"]
    view = FakeView(
        caps=caps,
        total_kv=total_kv,
        running=tuple(lists["r"]),
        unfinished=tuple(lists["u"]),
        online=[r for r in waiting if r.request_class is RequestClass.ONLINE],
        offline=[r for r in waiting if r.request_class is RequestClass.OFFLINE],
    )
    plan = plan_of(view)

    known = {r.rid: r for r in (*waiting, *lists["u"])}
    remaining = {rid: r.num_prompt_tokens - r.num_computed_tokens for rid, r in known.items()}
    classes = {r.rid: r.request_class for group in lists.values() for r in group}
    assert all(0 < n <= remaining[rid] for rid, n in plan.prefill.items())
    assert sum(n < remaining[rid] for rid, n in plan.prefill.items()) <= 1
    num_decodes = len([r for r in lists["r"] if r.rid not in stopped(plan)]) if mixed else 0
    assert sum(plan.prefill.values()) + num_decodes <= max(512, num_decodes)
    assert all(classes[rid] is RequestClass.OFFLINE for rid in stopped(plan))
    admitted = [r for r in waiting if r.rid in plan.prefill]
    running_after = len(lists["r"]) + len(lists["u"]) - len(plan.preempt) + len(admitted)
    assert running_after <= slots
    online_waits = [r for r in view.online if r.rid not in plan.prefill]
    offline_admitted = [r for r in admitted if r.request_class is RequestClass.OFFLINE]
    assert not (online_waits and offline_admitted), "offline work passed an online request"


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

    def test_admits_at_its_rate_whatever_the_load(self):
        assert self.admit(10.0) == 1
        assert self.admit(10.4) == 0
        assert self.admit(12.0) == 4
        assert self.admit(12.0) == 0

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
