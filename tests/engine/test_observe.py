"""The time of an iteration."""

from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.batch import BatchShape, Prefill
from cosched.core.plan import Plan
from cosched.engine.guard import Guard
from cosched.engine.iteration import Iteration, give
from cosched.engine.observe import IterationObserver
from tests.recorded import NO_DRAFTS


class ByHand:
    def __init__(self):
        self.time_s = 0.0

    def now_s(self):
        return self.time_s


class Mode(SimpleNamespace):
    def is_idle(self):
        return False

    def is_prebuilt(self):
        return False

    def is_decode(self):
        return True


class Lengths(list):
    def tolist(self):
        return list(self)


BATCH = SimpleNamespace(
    forward_mode=Mode(), reqs=(), seq_lens_cpu=Lengths([5, 7]), spec_algorithm=NO_DRAFTS
)


class Loop:
    """A scheduler loop whose every step takes the time it is told."""

    def __init__(self, *, device, num_stages=1):
        self.clock = ByHand()
        self.scheduler = SimpleNamespace(device=device, _sched_idled=True)
        self.observer = IterationObserver(
            self.scheduler, clock=self.clock, guard=Guard(is_strict=True), num_stages=num_stages
        )
        self.results = []
        self.steps = []
        self.observer.add_listener(self.steps.append)

    def launch(self, *, takes_s=0.0):
        def run():
            self.clock.time_s += takes_s
            self.scheduler._sched_idled = False
            return SimpleNamespace(copy_done=SimpleNamespace(synchronize=lambda: None))

        self.results.append(self.observer.launch(run, BATCH))

    def finish(self, *, at_s=None):
        if at_s is not None:
            self.clock.time_s = at_s
        return self.observer.finish(BATCH, self.results.pop(0))


def test_host_time_between_iterations_counts_unless_the_scheduler_was_idle():
    loop = Loop(device="cpu")
    loop.clock.time_s = 10.0
    loop.launch(takes_s=1.0)
    loop.finish()
    loop.clock.time_s += 0.25  # results processed, next batch planned
    loop.launch(takes_s=1.0)
    loop.finish()
    loop.scheduler._sched_idled = True
    loop.clock.time_s = 100.0
    loop.launch(takes_s=2.0)
    loop.finish()
    assert [(s.start_s, s.duration_s) for s in loop.steps] == [
        (10.0, 1.0),
        (11.0, 1.25),
        (100.0, 2.0),
    ]
    assert loop.observer.busy_s == pytest.approx(4.0)


def test_in_a_pipeline_the_time_of_an_iteration_is_that_through_all_stages():
    """Two stages. The third batch takes 3 s in each, the others 1 s."""
    loop = Loop(device="cpu", num_stages=2)
    loop.launch()  # at 0
    loop.clock.time_s = 1.0
    loop.launch()
    loop.finish(at_s=2.0)
    loop.launch()  # the long one; the second batch is in the second stage
    loop.finish(at_s=3.0)
    loop.clock.time_s = 5.0
    loop.launch()
    loop.finish(at_s=8.0)
    loop.finish(at_s=9.0)
    assert [step.duration_s for step in loop.steps] == [2.0, 2.0, 6.0, 2.0]
    assert [step.end_s for step in loop.steps] == [2.0, 3.0, 8.0, 9.0]
    assert loop.observer.busy_s == 9.0


def test_with_overlap_an_iteration_begins_when_the_one_before_it_ends():
    loop = Loop(device="cuda")
    loop.launch()  # at 0, on the device until 1
    loop.clock.time_s = 0.1
    loop.launch()  # queued behind it, until 3
    loop.finish(at_s=1.0)
    loop.finish(at_s=3.0)
    assert [(s.start_s, s.duration_s) for s in loop.steps] == [(0.0, 1.0), (1.0, 2.0)]
    assert loop.observer.busy_s == pytest.approx(3.0)


def test_without_overlap_the_device_is_waited_for(monkeypatch):
    """Nothing has waited for it then, and the clock would be read before it is done."""
    loop = Loop(device="cuda")
    waited = []

    def synchronize():
        waited.append(True)
        loop.clock.time_s += 2.0

    stream = SimpleNamespace(synchronize=synchronize)
    devices = {"cuda": SimpleNamespace(current_stream=lambda: stream)}
    monkeypatch.setattr("torch.get_device_module", devices.get)
    loop.launch()
    loop.results[0].copy_done = None
    loop.finish()
    assert waited == [True]
    (step,) = loop.steps
    assert step.duration_s == 2.0


def test_a_plan_its_launch_and_its_result_are_one_iteration():
    loop = Loop(device="cuda")
    plans = [Plan(prefill={"a": 3}), Plan(paused=frozenset({"b"}))]
    for plan in plans:
        give(BATCH, Iteration(plan=plan))
        loop.launch()
    done = [loop.finish(at_s=at_s) for at_s in (1.0, 3.0)]
    assert [iteration.plan for iteration in done] == plans
    assert loop.steps == done
    assert loop.observer.finish(BATCH, SimpleNamespace()) is None, "nobody saw its launch"


def test_what_is_under_way_ends_when_it_was_predicted_to():
    loop = Loop(device="cuda")
    loop.observer.predict_s = lambda shape: 1.0 * len(shape.decodes)
    assert loop.observer.expected_end_s(0.5) == 0.5
    loop.launch()
    loop.clock.time_s = 0.5
    loop.launch()
    assert loop.observer.expected_end_s(0.5) == 4.0  # two decodes each, one after the other
    loop.finish(at_s=3.0)
    assert loop.observer.expected_end_s(3.0) == 5.0


@pytest.mark.parametrize("prefills_wait", [False, True])
@pytest.mark.parametrize("has_prefill", [False, True])
def test_a_device_that_is_done_during_a_launch_ran_dry_unless_the_launch_waited_for_it(
    monkeypatch, prefills_wait, has_prefill
):
    """FlashInfer's prefills find the device idle however early they are planned."""
    shape = BatchShape(prefills=[Prefill(8, 0)] if has_prefill else [], decodes=[5, 7])
    monkeypatch.setattr("cosched.engine.observe.port.shape_of", lambda _: shape)
    clock, seen = ByHand(), []
    observer = IterationObserver(
        SimpleNamespace(device="cuda", _sched_idled=False),
        clock=clock,
        guard=Guard(is_strict=True),
        prefills_wait=prefills_wait,
    )

    def note(*, is_dry):
        seen.append(is_dry)
        return is_dry

    observer.note_launched = note
    steps = []

    def launch(*, takes_s):
        def run():
            clock.time_s += takes_s
            done_s = steps[-1] if steps else 0.0
            steps.append(max(clock.time_s, done_s) + 0.008)
            event = SimpleNamespace(query=lambda end_s=steps[-1]: clock.time_s >= end_s)
            return SimpleNamespace(copy_done=event)

        observer.launch(run, BATCH)
        return observer.newest

    first = launch(takes_s=0.001)
    clock.time_s += 0.0075  # the device is busy for half a millisecond more
    second = launch(takes_s=0.001)
    runs_dry = not (prefills_wait and has_prefill)
    assert seen == [False, runs_dry]
    assert first.is_exact is second.is_exact is not runs_dry
