"""The policies that predict times, on a real in-process SGLang scheduler and with times that are
really measured."""

import random
from pathlib import Path

import pytest

from tests.engine.conftest import assert_drained, kv_tokens, prompt

OFFLINE = -1
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def ask_all(engine, *, seed):
    """Two classes with shared prefixes, arriving over some iterations; all output tokens."""
    rng = random.Random(seed)
    requests = [
        (prompt(i % 3, 80) + prompt(50 + i, rng.randint(1, 120)), OFFLINE if i % 3 else 0)
        for i in range(16)
    ]

    def act(iteration):
        engine.scheduler.invariant_checker.self_check_during_busy()
        held, total = kv_tokens(engine.scheduler)
        assert held <= total
        for i in range(2 * iteration, min(2 * iteration + 2, len(requests))):
            tokens, priority = requests[i]
            engine.submit(f"r{i}", tokens, max_new_tokens=8, priority=priority)

    engine.run_until_idle(on_iteration=act, max_iterations=8000)
    assert_drained(engine)
    return {rid: reply.output_ids for rid, reply in engine.replies.items()}


AMPLE = {
    "names": (
        *("hygen", "echo-bs", "echo-bs+e", "echo-bs+e+s", "echo-bs+e+s+m", "cosched"),
        *("bros", "bros-late-last", "bros-rr", "bros-rt"),
        *("own_policy:IdleOnly", "batch_size:BatchSize"),  # of examples/
    ),
    "seed": 1,
    "flags": {},
}
SCARCE = {
    "names": ("eco-srtf", "eco-vllm", "eco-multires", "eco-syncfastgen"),
    "seed": 3,
    "flags": {"page_size": 16},
    "max_total_tokens": 992,
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("case", [AMPLE, SCARCE], ids=["ample memory", "scarce memory"])
def test_what_is_answered_does_not_depend_on_the_policy(make_engine, monkeypatch, overlap, case):
    monkeypatch.syspath_prepend(EXAMPLES)
    flags = {"overlap": overlap, **case["flags"]}
    answers = ask_all(make_engine(policy="sarathi", **flags), seed=case["seed"])
    assert len(answers) == 16 and all(len(tokens) == 8 for tokens in answers.values())
    flags["max_total_tokens"] = case.get("max_total_tokens", 2000)
    for name in case["names"]:
        engine = make_engine(policy=name, **flags)
        assert ask_all(engine, seed=case["seed"]) == answers, name
        assert engine.scheduler.cosched.counters.num_engine_refusals == 0, name
        assert_drained(engine)


@pytest.mark.parametrize(
    ("ordered", "unordered"), [("hygen", "hygen-fcfs"), ("echo-bs+e+s", "echo-bs+e")]
)
def test_shared_heads_are_computed_once_in_prefix_order_only(make_engine, ordered, unordered):
    def computed(policy):
        engine = make_engine(policy=policy, max_total_tokens=700, max_running_requests=3)
        for i in range(30):
            tokens = prompt(i % 6, 150) + prompt(60 + i, 10)
            engine.submit(f"r{i}", tokens, max_new_tokens=2, priority=OFFLINE)
        engine.run_until_idle(max_iterations=8000)
        assert len(engine.replies) == 30
        return engine.scheduler.cosched.counters.offline_prefill_tokens

    in_order, as_they_came = computed(ordered), computed(unordered)
    # Six heads of 150 tokens and thirty ends of 10; the cache holds four heads.
    assert in_order < 1.6 * (6 * 150 + 30 * 10)
    assert as_they_came > 1.5 * in_order
