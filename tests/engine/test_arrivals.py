"""When a request came that the scheduler saw between two iterations."""

from types import SimpleNamespace

import pytest

from cosched.engine.arrivals import Arrivals


def came_s(*, looked_s, done_s, seen_s):
    arrivals = Arrivals(SimpleNamespace(last_done_s=done_s))
    arrivals.looked(looked_s)
    return arrivals.came_s(seen_s)


def test_who_is_seen_after_an_iteration_came_in_the_middle_of_it():
    assert came_s(looked_s=10.0, done_s=10.1, seen_s=10.1) == pytest.approx(10.05)


def test_however_long_its_results_take_to_be_processed():
    assert came_s(looked_s=10.0, done_s=10.1, seen_s=10.2) == pytest.approx(10.1)


@pytest.mark.parametrize("done_s", [9.0, 10.0])
def test_who_comes_to_an_idle_scheduler_is_seen_at_once(done_s):
    assert came_s(looked_s=10.0, done_s=done_s, seen_s=10.1) == 10.1


def test_where_no_plans_are_made_nobody_came_before_it_was_seen():
    assert Arrivals(SimpleNamespace(last_done_s=10.0)).came_s(10.1) == 10.1


def test_only_who_waited_for_an_iteration_counts_as_come_before_it_was_seen(
    make_engine, monkeypatch
):
    asked = []
    came_s = Arrivals.came_s

    def noted(self, seen_s):
        asked.append((self._looked_s, came_s(self, seen_s), seen_s))
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
