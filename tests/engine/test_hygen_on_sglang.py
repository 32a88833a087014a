"""HyGen and its pool on a real in-process SGLang scheduler, with times that are really measured."""

from tests.engine.conftest import prompt

OFFLINE = -1


def test_the_state_tells_of_the_pool_and_of_planning(make_engine):
    engine = make_engine(policy="hygen", max_running_requests=2)
    for i in range(8):
        tokens = prompt(1, 30) + prompt(60 + i, 10)
        engine.submit(f"r{i}", tokens, max_new_tokens=20, priority=OFFLINE)
    states = []

    def act(iteration):
        if iteration >= 10 and not states:
            states.append(engine.scheduler.cosched.state())

    engine.run_until_idle(on_iteration=act, max_iterations=8000)
    states.append(engine.scheduler.cosched.state())
    (during, after) = (state.to_dict() for state in states)
    waiting, running = during["num_waiting_offline"], during["num_running_offline"]
    assert waiting + running == 8 and running > 0
    pool = during["pool"]
    assert pool["num_requests"] == waiting
    assert pool["num_tokens"] == sum(bucket["num_tokens"] for bucket in pool["buckets"])
    assert 0 < pool["expected_hit_ratio"] < pool["sharing_ratio"] < 0.75
    assert pool["oldest_age_s"] > 0
    assert 0 < after["planning_us"]["p50"] <= after["planning_us"]["p99"]
    assert after["pool"]["num_requests"] == after["num_running_offline"] == 0


def served(engine, act=lambda iteration: None):
    """Who was answered, in this order."""
    order = []

    def note(iteration):
        act(iteration)
        order.extend(rid for rid in engine.replies if rid not in order)

    engine.run_until_idle(on_iteration=note, max_iterations=8000)
    return [*order, *(rid for rid in engine.replies if rid not in order)]


def test_requests_of_another_cache_salt_or_extra_key_share_nothing(make_engine):
    engine = make_engine(policy="hygen", max_running_requests=1)
    names = ["salt", "key", "plain"]
    fields = {"salt": {"cache_salt": "s"}, "key": {"extra_key": "s"}, "plain": {}}
    for i in range(4):
        for name in names:
            tokens = prompt(1, 150) + prompt(60 + i, 10)
            engine.submit(f"{name}{i}", tokens, max_new_tokens=1, priority=OFFLINE, **fields[name])
    assert served(engine) == [f"{name}{i}" for name in names for i in range(4)]
    assert engine.scheduler.cosched.counters.offline_prefill_tokens == 3 * (150 + 4 * 10)


def test_what_an_earlier_job_left_in_the_cache_is_used_first(make_engine):
    engine = make_engine(policy="hygen", max_running_requests=1)
    engine.submit("early", prompt(3, 150), max_new_tokens=1, priority=OFFLINE)
    engine.run_until_idle(max_iterations=8000)
    for i in range(3):
        for head in (1, 2, 3):
            tokens = prompt(head, 150) + prompt(60 + i, 10)
            engine.submit(f"{head}/{i}", tokens, max_new_tokens=1, priority=OFFLINE)
    expected = [f"{head}/{i}" for head in (3, 1, 2) for i in range(3)]
    assert served(engine)[1:] == expected
