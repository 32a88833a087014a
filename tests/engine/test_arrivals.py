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


@pytest.mark.parametrize("done_s", [9.0, 10.05])
def test_who_comes_to_an_idle_scheduler_is_seen_at_once(done_s):
    assert came_s(looked_s=10.0, done_s=done_s, seen_s=10.1) == 10.1
