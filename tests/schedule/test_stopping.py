"""How a request is stopped follows from what moves least time."""

import pytest

from cosched.core.batch import BatchTotals
from cosched.core.plan import PreemptMode
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.preemption import preempt_mode
from tests.factories import FakeView, decoding, offline


class Timed:
    """A millisecond per token computed, and so much per token loaded."""

    def __init__(self, load_s):
        self.load_s = load_s

    def predict_s(self, totals: BatchTotals) -> float:
        return max(1e-3 * totals.num_new, self.load_s * totals.num_loaded)


def view_of(*, total, host, load_s, evictable=0):
    running = decoding(offline("r", 400))
    view = FakeView(
        running=(running,),
        total_kv=total,
        evictable_kv=evictable,
        host_free=host,
        predictor=Timed(load_s),
    )
    return view, running


@pytest.mark.parametrize(
    ("total", "host", "load_s", "mode"),
    [
        (1000, 1000, 1e-5, PreemptMode.KEEP_KV),  # as much is free as it has
        (500, 1000, 1e-5, PreemptMode.CHECKPOINT),
        (500, 1000, 1e-2, PreemptMode.KEEP_KV),  # computing is faster
        (500, 100, 1e-5, PreemptMode.KEEP_KV),  # host memory is full
        (500, 0, 1e-5, PreemptMode.KEEP_KV),
    ],
)
def test_the_mode_that_takes_least_time(total, host, load_s, mode):
    view, running = view_of(total=total, host=host, load_s=load_s)
    assert preempt_mode(view, running) is mode
    builder = PlanBuilder(view)
    builder.preempt(running)
    (stopped,) = builder.build().preempt
    assert stopped.mode is mode
