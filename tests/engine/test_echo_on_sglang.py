"""Echo's scheduler on a real in-process SGLang scheduler, with times that are really measured."""

import random

import pytest

from tests.engine.conftest import assert_drained, kv_tokens, prompt

OFFLINE = -1


def ask_all(engine, *, seed):
    """Two classes with shared heads and uneven lengths; returns all output tokens."""
    rng = random.Random(seed)

    def act(iteration):
        engine.scheduler.invariant_checker.self_check_during_busy()
        held, total = kv_tokens(engine.scheduler)
        assert held <= total
        for i in range(2 * iteration, min(2 * iteration + 2, 24)):
            tokens = prompt(i % 3, 80) + prompt(50 + i, rng.randint(1, 120))
            engine.submit(f"r{i}", tokens, max_new_tokens=8, priority=OFFLINE if i % 3 else 0)

    engine.run_until_idle(on_iteration=act, max_iterations=8000)
    assert_drained(engine)
    return {rid: reply.output_ids for rid, reply in engine.replies.items()}


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_answered_does_not_depend_on_the_policy(make_engine, overlap):
    answers = ask_all(make_engine(policy="echo-bs", overlap=overlap), seed=1)
    assert len(answers) == 24 and all(len(tokens) == 8 for tokens in answers.values())
    assert ask_all(make_engine(policy="echo-bs+e", overlap=overlap), seed=1) == answers
    assert ask_all(make_engine(policy="echo-bs+e+s", overlap=overlap), seed=1) == answers


def test_shared_heads_are_computed_once_by_the_scheduler_only(make_engine):
    def computed(policy):
        engine = make_engine(policy=policy, max_total_tokens=700, max_running_requests=3)
        for i in range(30):
            tokens = prompt(i % 6, 150) + prompt(60 + i, 10)
            engine.submit(f"r{i}", tokens, max_new_tokens=2, priority=OFFLINE)
        engine.run_until_idle(max_iterations=8000)
        assert len(engine.replies) == 30
        return engine.scheduler.cosched.counters.offline_prefill_tokens

    chosen, as_they_came = computed("echo-bs+e+s"), computed("echo-bs+e")
    # Six heads of 150 tokens and thirty ends of 10; the cache holds four heads.
    assert chosen < 1.6 * (6 * 150 + 30 * 10)
    assert as_they_came > 1.5 * chosen


def test_its_pool_has_length_buckets_unless_the_configuration_says_otherwise(make_engine):
    def config(engine):
        return engine.scheduler.cosched.waiting.offline.config

    assert config(make_engine(policy="echo-bs+e+s")).num_buckets == 4
    assert config(make_engine(policy="hygen")).num_buckets == 1
