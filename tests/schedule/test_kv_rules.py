"""What offline requests may take of the memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from cosched.core.plan import SkipReason
from cosched.core.view import Match
from cosched.papers.hygen.sarathi import SarathiPolicy
from cosched.schedule.builder import PlanBuilder
from tests.factories import FakeView, decoding, make_caps, offline, online


def plan(view):
    made, _ = SarathiPolicy().plan(view, None)
    return made


CAPS = make_caps(max_chunk_tokens=8192, max_prefill_tokens=8192)


def test_offline_requests_leave_what_online_ones_need():
    running = decoding(offline("running", 2000))
    view = FakeView(caps=CAPS, running=(running,), offline=(offline("a", 2500),), kept=6000)
    assert plan(view).skipped["a"] is SkipReason.ONLINE_RESERVE
    view.kept = 5000
    assert "a" in plan(view).prefill


def test_all_that_are_admitted_count():
    view = FakeView(
        caps=CAPS,
        running=(decoding(offline("running", 1000)),),
        offline=tuple(offline(name, 1500) for name in "abcd"),
        kept=5500,
    )
    made = plan(view)
    assert [*made.prefill] == ["a", "b"]
    assert made.skipped["c"] is SkipReason.ONLINE_RESERVE


def test_one_may_always_run_however_much_is_kept():
    view = FakeView(caps=CAPS, offline=(offline("a", 3000), offline("b", 3000)), kept=9000)
    made = plan(view)
    assert [*made.prefill] == ["a"]
    assert made.skipped["b"] is SkipReason.ONLINE_RESERVE


def test_what_the_sessions_of_offline_requests_hold_is_no_request_that_runs():
    view = FakeView(
        caps=CAPS,
        offline=(offline("a", 3000), offline("b", 100)),
        kept=9500,
        offline_in_sessions=1000,
    )
    made = plan(view)
    assert [*made.prefill] == ["a"]
    assert made.skipped["b"] is SkipReason.ONLINE_RESERVE


def test_online_requests_are_not_bound_by_it():
    running = decoding(offline("running", 2000))
    view = FakeView(caps=CAPS, running=(running,), online=(online("a", 3000),), kept=9000)
    assert "a" in plan(view).prefill


def test_what_is_cached_counts_only_where_nobody_holds_it():
    running = decoding(offline("running", 2000))
    view = FakeView(
        caps=CAPS, running=(running,), offline=(offline("a", 2500),), kept=6000, evictable_kv=2400
    )
    view.cached = {"a": Match(cached=2400, evictable=0)}
    assert "a" in plan(view).prefill, "somebody holds its head already"
    view.cached = {"a": Match(cached=2400, evictable=2400)}
    assert plan(view).skipped["a"] is SkipReason.ONLINE_RESERVE


def test_stopping_an_offline_request_gives_its_part_back():
    running = decoding(offline("running", 4000))
    view = FakeView(caps=CAPS, running=(running,), offline=(offline("a", 3000),), kept=4000)
    builder = PlanBuilder(view)
    request = view.offline[0]
    assert not builder.admit(request, view.match(request), 3000)
    builder.preempt(running)
    assert builder.admit(request, view.match(request), 3000)


@pytest.mark.parametrize("loss_per_token_s", [0.0, 5e-5, 1e-3])
def test_an_offline_request_computes_more_than_what_goes_for_it_is_worth(loss_per_token_s):
    """A token takes 0.1 ms to compute here."""
    view = FakeView(
        caps=CAPS,
        total_kv=5100,
        evictable_kv=4500,
        running=(decoding(offline("running", 90)),),
        offline=(offline("a", 2000),),
        loss_per_token_s=loss_per_token_s,
    )
    made = plan(view)
    if loss_per_token_s < 1e-4:
        assert "a" in made.prefill
    else:
        assert made.skipped["a"] is SkipReason.EVICTION_LOSS


def test_an_idle_engine_admits_one_whatever_goes_for_it():
    """Or it would stay idle until nobody is expected any more for what it keeps."""
    view = FakeView(
        caps=CAPS,
        total_kv=5000,
        evictable_kv=4900,
        offline=(offline("a", 2000), offline("b", 2000)),
        loss_per_token_s=10.0,
    )
    made = plan(view)
    assert [*made.prefill] == ["a"]
    assert made.skipped["b"] is SkipReason.EVICTION_LOSS


def test_what_fits_without_eviction_costs_nothing():
    view = FakeView(
        caps=CAPS,
        evictable_kv=4500,
        offline=tuple(offline(name, 2000) for name in "abc"),
        loss_per_token_s=1.0,
    )
    made = plan(view)
    assert [*made.prefill] == ["a", "b"], "5,500 tokens are free"
    assert made.skipped["c"] is SkipReason.EVICTION_LOSS


def test_a_cached_head_is_not_evicted_for_its_own_request():
    view = FakeView(
        caps=CAPS,
        total_kv=5100,
        evictable_kv=4900,
        running=(decoding(offline("running", 90)),),
        offline=(offline("a", 2000),),
        loss_per_token_s=1e-3,
    )
    assert plan(view).skipped["a"] is SkipReason.EVICTION_LOSS
    view = replace(view, cached={"a": Match(cached=1990, evictable=1990)})
    assert "a" in plan(view).prefill


@dataclass(kw_only=True)
class ConvexView(FakeView):
    """dear_s: of a token beyond the first thousand [s]."""

    dear_s: float

    def eviction_loss_s(self, num_tokens):
        return 5e-5 * max(num_tokens, 0) + self.dear_s * max(num_tokens - 1000, 0)


def test_what_it_has_cached_makes_others_go_in_its_place():
    """A request that was stopped: its own KV is worth least, so it would be the next to go."""
    view = ConvexView(
        caps=CAPS,
        total_kv=5000,
        evictable_kv=4900,
        running=(decoding(offline("running", 90)),),
        offline=(offline("a", 1000, max_new_tokens=100),),
        cached={"a": Match(cached=999, evictable=999)},
        dear_s=1e-3,
    )
    assert plan(view).skipped["a"] is SkipReason.EVICTION_LOSS
    assert "a" in plan(replace(view, dear_s=0.0)).prefill


def test_nothing_is_admitted_beside_what_runs_while_too_much_was_computed_anew():
    running = decoding(offline("running", 500))
    view = FakeView(
        caps=CAPS,
        running=(running,),
        online=(online("a", 500),),
        offline=(offline("b", 500),),
        recompute_debt_s=0.5,
    )
    made = plan(view)
    assert [*made.prefill] == ["a"]
    assert made.skipped["b"] is SkipReason.RECOMPUTE_DEBT
    view.running = ()
    assert [*plan(view).prefill] == ["a", "b"]
