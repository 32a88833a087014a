"""The next iteration is planned as late as the device allows, and when requests came that the
scheduler saw between two iterations."""

import pickle
import random
from types import SimpleNamespace

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.batch import BatchShape
from cosched.engine import port
from cosched.engine.clock import EngineClock
from cosched.engine.features.plan_timing import PlanTiming
from cosched.engine.intake import Arrivals
from cosched.engine.iteration import Iteration
from cosched.engine.read_state import state_of


class ByHand:
    def __init__(self):
        self.time_s = 100.0
        self.waits = []

    def now_s(self):
        return self.time_s

    def wait_until(self, time_s, is_over):
        self.waits.append(time_s - self.time_s)
        self.time_s = time_s
        return is_over()


class Device:
    """What is under way is predicted to take so long, and takes so long."""

    def __init__(self, clock):
        self.clock = clock
        self.predicted_s = self.done_s = 0.0
        self.latest_shape = BatchShape(decodes=(5, 7))
        self.dry = []

    def launch(self, *, predicted_s, takes_s):
        self.predicted_s = self.clock.time_s + predicted_s
        self.done_s = self.clock.time_s + takes_s

    def expected_end_s(self, now_s):
        return max(now_s, self.predicted_s)

    def has_run_dry(self):
        return self.clock.time_s >= self.done_s

    def ran_dry(self, *, just_now):
        self.dry.append(just_now)


def make(*, is_known=True):
    clock = ByHand()
    device = Device(clock)
    moment = PlanTiming(
        observer=device,
        clock=clock,
        is_known=lambda shape: is_known,
        meanwhile=lambda: clock.waits.append("work"),
    )
    clock.waits.clear()
    return clock, device, moment


def launching(moment):
    iteration = Iteration()
    moment.on_launched(iteration, object())
    return iteration.came_late


@pytest.mark.parametrize(
    ("predicted_s", "is_known", "waits"),
    [
        (0.05, True, ["work", 0.04]),
        pytest.param(1.0, True, ["work", 0.9], id="a tenth is left for a wrong prediction"),
        pytest.param(0.0099, True, [], id="there is no time to wait"),
        pytest.param(5.0, False, [], id="not known how long iterations take"),
    ],
)
def test_a_plan_waits_until_it_takes_the_rest_of_the_iteration(predicted_s, is_known, waits):
    clock, device, moment = make(is_known=is_known)
    device.launch(predicted_s=predicted_s, takes_s=0.05)
    moment.lead_s = 0.01
    moment.on_receive()
    assert clock.waits[:-1] == waits[:-1] and clock.waits[-1:] == pytest.approx(waits[-1:])


def test_what_holds_up_a_plan_is_done_within_the_wait():
    """A fit of the predictor takes milliseconds, and must not delay the plan after the wait."""
    clock, device, _ = make()

    def work():
        clock.time_s += 0.015

    moment = PlanTiming(observer=device, clock=clock, is_known=lambda shape: True, meanwhile=work)
    began_s = clock.time_s
    device.launch(predicted_s=0.05, takes_s=0.05)
    moment.lead_s = 0.01
    moment.on_receive()
    assert clock.time_s - began_s == pytest.approx(0.04)


def test_nobody_waits_for_an_iteration_of_a_kind_that_was_not_seen():
    """A policy that has prompts in every iteration never sees decodes alone, and needs not."""
    clock, device, moment = make()
    known = []
    moment = PlanTiming(
        observer=device,
        clock=clock,
        is_known=lambda shape: known.append(shape) or not shape.decodes,
        meanwhile=lambda: None,
    )
    device.launch(predicted_s=0.05, takes_s=0.05)
    moment.on_receive()
    assert known == [device.latest_shape] and not clock.waits
    device.latest_shape = BatchShape()
    moment.on_receive()
    assert len(clock.waits) == 1


@pytest.mark.parametrize("predicted_s", [0.05, 0.055, 0.2])
def test_when_a_device_runs_dry_is_known_while_somebody_waits_and_not_while_a_plan_is_made(
    predicted_s,
):
    clock, device, moment = make()
    moment.lead_s = 0.01
    device.launch(predicted_s=predicted_s, takes_s=0.05)
    moment.on_receive()
    clock.time_s += 0.009
    is_late = predicted_s > 0.05
    assert launching(moment) is moment.launched(is_dry=device.has_run_dry()) is is_late
    assert device.dry == ([True] if predicted_s == 0.2 else [False] if is_late else [])
    assert moment.num_dry == is_late
    assert launching(moment) is False and len(device.dry) == is_late


@pytest.mark.parametrize("seed", range(3))
def test_one_launch_in_a_hundred_comes_too_late(seed):
    draw = random.Random(seed)
    clock, device, moment = make()
    for _ in range(40_000):
        seconds = draw.uniform(0.03, 0.06)
        device.launch(predicted_s=seconds, takes_s=seconds * draw.gauss(1.0, 0.03))
        moment.on_receive()
        clock.time_s += draw.uniform(0.002, 0.006)  # planning and building a batch
        launching(moment)
        clock.time_s += 0.001  # before the first kernel
        moment.launched(is_dry=device.has_run_dry())
        clock.time_s = max(clock.time_s, device.done_s)
    assert moment.num_waits > 39_000
    assert 0.005 < moment.num_dry / moment.num_waits < 0.02
    assert 0.007 < moment.lead_s < 0.017


@pytest.mark.parametrize("seed", range(3))
def test_mispredicted_prefills_do_not_keep_decodes_from_waiting(seed):
    """An iteration that ends long before its predicted end is no reason to plan short ones early,
    whether it ended in the wait or in the short time of the plan after it."""
    draw = random.Random(seed)
    clock, device, moment = make()

    def run(*, predicted_s, takes_s):
        device.launch(predicted_s=predicted_s, takes_s=takes_s)
        moment.on_receive()
        clock.time_s += 0.002
        launching(moment)
        moment.launched(is_dry=device.has_run_dry())
        clock.time_s = max(clock.time_s, device.done_s)

    for _ in range(200):
        run(predicted_s=draw.uniform(0.03, 0.3), takes_s=0.025)
    num_dry = moment.num_dry
    assert num_dry >= 10
    for _ in range(2000):
        clock.waits.clear()
        run(predicted_s=0.01, takes_s=0.01)
    assert clock.waits == ["work", pytest.approx(0.006, abs=0.003)]
    assert moment.num_dry - num_dry <= 0.02 * 2000


def test_a_sleep_ends_with_what_it_waits_for_or_with_its_time():
    clock = EngineClock()
    asked = []

    def over_when_asked_thrice():
        asked.append(True)
        return len(asked) == 3

    began_s = clock.now_s()
    assert clock.wait_until(began_s + 600.0, over_when_asked_thrice)
    assert len(asked) == 3
    assert not clock.wait_until(clock.now_s() + 0.002, lambda: False)
    assert clock.now_s() >= began_s + 0.002
    assert not clock.wait_until(began_s, lambda: pytest.fail("it has passed"))


@pytest.mark.parametrize(
    ("changes", "steps_together", "alone"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"pp_size": 2}, False, False),
        ({"disaggregation_mode": "decode"}, False, False),
    ],
)
def test_only_a_scheduler_whose_loop_is_its_own_waits(changes, steps_together, alone):
    args = SimpleNamespace(**{"pp_size": 1, "disaggregation_mode": "null"} | changes)
    scheduler = SimpleNamespace(server_args=args, attn_dp_enabled=steps_together)
    assert port.waits_alone(scheduler) is alone


@pytest.mark.parametrize(
    ("policy", "overlap", "config", "waits"),
    [
        ("cosched", True, {}, True),
        ("hygen", True, {}, True),
        ("hygen", False, {}, False),
        ("hygen", True, {"plan_early": True}, False),
        ("cosched-early", True, {}, False),
        ("sarathi", True, {}, False),
    ],
)
def test_who_plans_at_the_last_moment(make_engine, policy, overlap, config, waits):
    engine = make_engine(policy=policy, overlap=overlap, config=config)
    controller = engine.scheduler.cosched
    assert (controller.features.get(PlanTiming) is not None) is waits
    state = state_of(controller)
    assert (state.lead_s > 0) is waits


def test_where_the_forward_runs_in_the_schedulers_own_thread_nobody_waits(make_engine):
    """It is over when its call is."""
    engine = make_engine(policy="hygen", overlap=True)
    for i in range(4):
        engine.submit(f"r{i}", [5 + i] * 30, max_new_tokens=20)
    engine.run_until_idle()
    state = state_of(engine.scheduler.cosched)
    assert state.num_plans > 20 and state.num_waits == 0
    assert all(reply.finish_reason for reply in engine.replies.values())


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
