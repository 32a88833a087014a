"""When a request came that the scheduler saw between two iterations."""

import pickle
from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine import port
from cosched.engine.last_moment import Arrivals


def req(created_s=0.0):
    return SimpleNamespace(time_stats=SimpleNamespace(created_time=created_s))


@pytest.mark.parametrize(
    ("times", "expected_s"),
    [
        pytest.param((10.0, 10.1, 10.1), 10.05, id="in the middle of the iteration"),
        pytest.param((10.0, 10.1, 10.2), 10.1, id="its results were processed late"),
        pytest.param((10.0, 9.0, 10.1), 10.1, id="the scheduler was idle"),
        pytest.param((10.0, 10.0, 10.1), 10.1, id="the scheduler has just become idle"),
        pytest.param((10.0, 10.1, 10.1, 9.5), 9.5, id="as the server says"),
        pytest.param((10.0, 9.0, 10.1, 10.03), 10.03, id="as the server says, idle"),
        pytest.param((100.0, 99.0, 100.1, 100.11), 100.1, id="the server's clock is ahead"),
        pytest.param((100.0, 99.0, 100.1, 900.0), 100.1, id="another machine's clock, ahead"),
        pytest.param((100.0, 99.0, 100.1, 80.0), 100.1, id="another machine's clock, behind"),
    ],
)
def test_when_a_request_came_that_is_seen_between_iterations(times, expected_s):
    looked_s, done_s, seen_s, *created_s = times
    arrivals = Arrivals(SimpleNamespace(last_done_s=done_s))
    if done_s == 10.0:
        assert arrivals.came_s(req(), seen_s) == seen_s, "no plans are made"
    arrivals.looked(looked_s)
    assert arrivals.came_s(req(*created_s), seen_s) == pytest.approx(expected_s)


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
