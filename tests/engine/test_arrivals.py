"""When a request came that the scheduler saw between two iterations."""

import pickle
from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine import port
from cosched.engine.last_moment import Arrivals


def req(created_s=0.0):
    return SimpleNamespace(time_stats=SimpleNamespace(created_time=created_s))


def came_s(*, looked_s, done_s, seen_s, created_s=0.0):
    arrivals = Arrivals(SimpleNamespace(last_done_s=done_s))
    arrivals.looked(looked_s)
    return arrivals.came_s(req(created_s), seen_s)


def test_who_is_seen_after_an_iteration_came_in_the_middle_of_it():
    assert came_s(looked_s=10.0, done_s=10.1, seen_s=10.1) == pytest.approx(10.05)


@pytest.mark.parametrize("created_s", [9.5, 10.03, 10.1])
def test_who_came_when_the_server_says_so_came_then(created_s):
    assert came_s(looked_s=10.0, done_s=10.1, seen_s=10.1, created_s=created_s) == created_s
    assert came_s(looked_s=10.0, done_s=9.0, seen_s=10.1, created_s=created_s) == created_s


@pytest.mark.parametrize("created_s", [100.11, 900.0, 80.0])
def test_another_machines_clock_says_nothing(created_s):
    assert came_s(looked_s=100.0, done_s=99.0, seen_s=100.1, created_s=created_s) == 100.1


def test_when_it_came_to_the_server_goes_with_a_request_to_the_scheduler(make_engine):
    """SGLang's processes send these times to each other as pickles, through the controller of
    replicas too."""
    from sglang.srt.observability.req_time_stats import DPControllerReqTimeStats

    engine = make_engine(policy="hygen")
    seen = {}
    append = engine.scheduler.waiting_queue.append

    def noted(req):
        seen[req.rid] = port.created_s(req)
        append(req)

    engine.scheduler.waiting_queue.append = noted
    for rid, created_s in (("direct", 12.5), ("through", 17.5), ("unknown", 0.0)):
        engine.submit(rid, [5] * 10, max_new_tokens=1, created_s=created_s)
        request = engine._inbox[-1]
        request.time_stats = pickle.loads(pickle.dumps(request.time_stats))
        if rid == "through":
            times = DPControllerReqTimeStats.new_from_obj(request.time_stats)
            request.time_stats = pickle.loads(pickle.dumps(times))
    engine.run_until_idle()
    assert seen == {
        "direct": pytest.approx(12.5, abs=1e-3),
        "through": pytest.approx(17.5, abs=1e-3),
        "unknown": 0.0,
    }


def test_however_long_its_results_take_to_be_processed():
    assert came_s(looked_s=10.0, done_s=10.1, seen_s=10.2) == pytest.approx(10.1)


@pytest.mark.parametrize("done_s", [9.0, 10.0])
def test_who_comes_to_an_idle_scheduler_is_seen_at_once(done_s):
    assert came_s(looked_s=10.0, done_s=done_s, seen_s=10.1) == 10.1


def test_where_no_plans_are_made_nobody_came_before_it_was_seen():
    assert Arrivals(SimpleNamespace(last_done_s=10.0)).came_s(req(), 10.1) == 10.1


def test_only_who_waited_for_an_iteration_counts_as_come_before_it_was_seen(
    make_engine, monkeypatch
):
    asked = []
    came_s = Arrivals.came_s

    def noted(self, req, seen_s):
        asked.append((self._looked_s, came_s(self, req, seen_s), seen_s))
        return asked[-1][1]

    monkeypatch.setattr(Arrivals, "came_s", noted)
    engine = make_engine(policy="hygen")
    engine.submit("first", [5] * 10, max_new_tokens=6)

    def more(iteration):
        if len(asked) == 1:
            engine.submit("second", [6] * 10, max_new_tokens=2)

    engine.run_until_idle(on_iteration=more)
    engine.run_until_idle()  # has nothing to do
    engine.submit("third", [7] * 10, max_new_tokens=2)
    engine.run_until_idle()
    (_, first_s, first_seen_s), (looked_s, second_s, second_seen_s), (_, third_s, seen_s) = asked
    assert first_s == first_seen_s <= looked_s < second_s < second_seen_s
    assert third_s == seen_s
