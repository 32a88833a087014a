"""Offline requests that wait, are preempted and resume: timeouts, pauses, flushes, retractions."""

import pytest
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from tests.engine.conftest import OFFLINE, assert_drained, outputs, prompt


@pytest.mark.parametrize(
    ("policy", "timeout", "flags"),
    [
        ("sglang", envs.SGLANG_REQ_RUNNING_TIMEOUT, {}),
        ("hygen", envs.SGLANG_REQ_RUNNING_TIMEOUT, {}),
        ("sarathi", envs.SGLANG_REQ_WAITING_TIMEOUT, {"max_running_requests": 1}),
    ],
)
def test_timeouts_spare_offline_requests(make_engine, policy, timeout, flags):
    engine = make_engine(policy=policy, **flags)
    engine.submit("first", prompt(3, 50), max_new_tokens=30)
    engine.submit("on", prompt(1, 50), max_new_tokens=30)
    engine.submit("off", prompt(2, 50), max_new_tokens=30, priority=OFFLINE)
    with timeout.override(1e-9):

        def act(iteration):
            for request in engine.scheduler._poll_timeout_aborts():
                engine.send(request)

        engine.run_until_idle(on_iteration=act)
    assert engine.replies["on"].finish_reason == "abort"
    assert engine.replies["off"].finish_reason == "length"
    assert_drained(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_cache_can_be_flushed_while_paused_requests_wait(make_engine, overlap):
    """`flush_cache` needs an idle scheduler, or one that is paused by retraction."""

    def run(disturbed):
        engine = make_engine(policy="hygen", overlap=overlap, max_running_requests=2)
        scheduler = engine.scheduler
        flushed = []
        for index in range(6):
            engine.submit(f"r{index}", prompt(index, 60), max_new_tokens=10, priority=OFFLINE)

        def act(iteration):
            if not disturbed:
                return
            if iteration == 8:
                assert scheduler.flush_cache() is False  # requests run
                engine.send(PauseGenerationReqInput(mode="retract"))
            if iteration == 10:
                assert len(scheduler.waiting_queue) and scheduler._engine_paused
                flushed.append(scheduler.flush_cache())
                engine.send(ContinueGenerationReqInput(torch_empty_cache=False))

        engine.run_until_idle(on_iteration=act)
        assert_drained(engine)
        assert flushed == ([True] if disturbed else [])
        return outputs(engine)

    assert run(disturbed=True) == run(disturbed=False)
