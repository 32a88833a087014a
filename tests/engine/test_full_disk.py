"""A disk that is full under a log of the scheduler costs the log, never the server."""

from __future__ import annotations

from unittest import mock

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from tests.engine.conftest import assert_drained, prompt


@pytest.mark.parametrize("log", ["iteration_log", "decision_log"])
def test_the_log_is_switched_off_with_one_warning(make_engine, log):
    from cosched.engine import decisions, observe

    # SGLang replaces logging's handlers.
    with (
        mock.patch.object(decisions.logger, "warning") as of_decisions,
        mock.patch.object(observe.logger, "warning") as of_iterations,
    ):
        engine = make_engine(policy="hygen", overlap=True, config={log: "/dev/full"})
        for i in range(4):
            engine.submit(f"r{i}", prompt(i, 50), max_new_tokens=20, priority=-i)
        engine.run_until_idle(max_iterations=500)
    assert all(len(engine.replies[f"r{i}"].output_ids) == 20 for i in range(4))
    assert_drained(engine)
    calls = [*of_decisions.call_args_list, *of_iterations.call_args_list]
    assert [call.args[0] % call.args[1:] for call in calls] == [
        f"cosched: the {log.replace('_', ' ')} '/dev/full' is switched off until the next start: "
        "No space left on device"
    ]
    state = engine.scheduler.cosched.state()
    assert state.logs_off == (log.removesuffix("_log"),)


def test_a_log_that_fails_halfway_keeps_what_it_has(make_engine, tmp_path):
    from cosched.engine.decision_log.read import read_log

    path = tmp_path / "log"
    engine = make_engine(policy="hygen", overlap=True, config={"decision_log": str(path)})
    log = engine.scheduler.cosched.decisions

    def fail_later(iteration):
        if iteration == 10:
            log._parts._file.close()
            log._parts._file._file = open("/dev/full", "wb", buffering=0)

    for i in range(2):
        engine.submit(f"r{i}", prompt(i, 50), max_new_tokens=20, priority=-i)
    engine.run_until_idle(on_iteration=fail_later, max_iterations=500)
    assert log.is_off
    assert all(len(engine.replies[f"r{i}"].output_ids) == 20 for i in range(2))
    numbers = [entry.decision.iteration for entry in read_log(path, report=pytest.fail)]
    assert 3 < len(numbers) < 12 and numbers == list(range(len(numbers)))
