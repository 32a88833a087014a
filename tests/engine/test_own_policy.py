"""The examples of docs/policies/own_policy.md, on SGLang's scheduler and in a simulation."""

import pytest

from cosched.config import ENV_VAR
from cosched.core.request import RequestClass
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute
from cosched.lab.simulation.setting import setting_of
from cosched.lab.simulation.store import ResultStore
from tests.engine.conftest import assert_drained, prompt
from tests.engine.test_policies_on_sglang import EXAMPLES, OFFLINE

NAME = "own_policy:IdleOnly"


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def test_a_chat_stops_what_runs_offline_and_nothing_is_lost(make_engine):
    engine = make_engine(policy=NAME)

    def act(iteration):
        if iteration == 0:
            engine.submit("job", prompt(1, 90), max_new_tokens=20, priority=OFFLINE)
        if iteration == 6:
            engine.submit("chat", prompt(2, 30), max_new_tokens=8)

    engine.run_until_idle(on_iteration=act, max_iterations=1000)
    assert_drained(engine)
    assert len(engine.replies["job"].output_ids) == 20
    assert engine.scheduler.cosched.counters.num_preemptions == 1


def test_offline_work_waits_for_the_end_of_chat_in_a_simulation(monkeypatch, tmp_path):
    monkeypatch.setenv(ENV_VAR, "")
    spec = RunSpec(
        setting=setting_of(NAME),
        machine=Machine(kv_tokens=20_000, chunk_tokens=512, max_running_requests=32),
        online=WorkloadSpec(name="alpaca", rate=2.0),
        offline=WorkloadSpec(name="bros-offline", num_requests=60),
        cost=CostSpec(name="roofline"),
        duration_s=4.0,
    )
    result = execute(spec)
    assert result.cosched["policy"] == NAME
    online = [r for r in result.records if r.request_class is RequestClass.ONLINE]
    offline = [r for r in result.records if r.request_class is RequestClass.OFFLINE]
    assert any(r.first_token_s is not None for r in offline)
    for record in offline:
        if record.first_token_s is None:
            continue
        # One that is at work when a chat arrives ends its iteration; none begins beside it.
        chats = [
            r
            for r in online
            if r.finish_s is not None and r.first_token_s < record.first_token_s < r.finish_s
        ]
        assert not chats, (record.rid, record.first_token_s)
    ResultStore(tmp_path).put(result)
    assert ResultStore(tmp_path).get(spec) is not None
