"""A request on which the engine fails is aborted; every other request gets the same tokens."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.engine.faults import Isolation
from cosched.engine.log.read import read_log
from tests.crossed import crossed
from tests.engine.conftest import assert_drained, prompt

OFFLINE = -1
NUM = 7


class Broken(Exception):
    pass


@given(
    num=st.integers(1, 200),
    data=st.data(),
    names_it=st.booleans(),
)
def test_halving_aborts_the_culprits_and_no_other_request(num, data, names_it):
    rids = [f"r{i}" for i in range(num)]
    culprits = set(data.draw(st.lists(st.sampled_from(rids), max_size=3)))
    isolation = Isolation()
    running, aborted, num_failures = list(rids), [], 0

    def run(batch):
        """The batch fails when one of them is in it."""
        nonlocal running, num_failures
        bad = [rid for rid in batch if rid in culprits]
        if not bad:
            return False
        num_failures += 1
        aborted.extend(isolation.failed(batch, (), bad[0] if names_it else None))
        running = []
        return True

    run(running)
    for _ in range(4000):
        if not isolation.is_active:
            break
        batch = [*running, *isolation.group]
        if not run(batch):
            running = batch
            isolation.passed()
    assert not isolation.is_active
    assert sorted(aborted) == sorted(culprits)
    assert num_failures <= len(culprits) * (2 * math.ceil(math.log2(max(num, 2))) + 4)


def test_requests_that_fail_only_together_do_not_run_in_circles():
    isolation = Isolation()
    rids = ["a", "b", "c", "d"]
    running, aborted = [], list(isolation.failed(rids))
    for _ in range(200):
        if not isolation.is_active:
            break
        batch = [*running, *isolation.group]
        if {"a", "b"} <= set(batch):
            aborted += isolation.failed(batch)
            running = []
        else:
            running = batch
            isolation.passed()
    assert not isolation.is_active
    assert {"a", "b"} & set(aborted)


def failing(function, is_poisoned, message):
    """`function`, which fails where `is_poisoned` says so of its arguments."""

    def call(*args, **options):
        if is_poisoned(*args):
            raise Broken(message)
        return function(*args, **options)

    return call


def has_poison(batch, *args):
    return any(req.rid == "poison" for req in batch.reqs)


def in_the_queue(**values):
    """Change the request when it is queued: bounds refuse it before that."""

    def poison(engine, monkeypatch):
        queue = engine.scheduler._add_request_to_queue

        def add(req, is_retracted=False):
            if req.rid == "poison":
                for name, value in values.items():
                    holder = req if hasattr(req, name) else req.sampling_params
                    setattr(holder, name, value)
            queue(req, is_retracted)

        engine.scheduler._add_request_to_queue = add

    return poison


def in_the_message(engine, monkeypatch):
    scheduler = engine.scheduler
    create = scheduler._create_generation_req
    scheduler._create_generation_req = failing(
        create, lambda received, *_: received.rid == "poison", "while it is built"
    )


def in_the_forward(engine, monkeypatch):
    worker = engine.scheduler.model_worker
    forward = failing(worker.forward_batch_generation, has_poison, "in the forward pass")
    monkeypatch.setattr(worker, "forward_batch_generation", forward)


def in_a_method(name, *, after=0):
    """From its call after these on."""

    def poison(engine, monkeypatch):
        from sglang.srt.managers.schedule_batch import Req

        calls = []

        def is_due(req, *_):
            if req.rid == "poison":
                calls.append(req)
            return req.rid == "poison" and len(calls) > after

        monkeypatch.setattr(Req, name, failing(getattr(Req, name), is_due, f"in {name}"))

    return poison


SAMPLING = in_the_queue(top_k=2**40)
FIFTH_TOKEN = in_a_method("update_finish_state", after=4)
POISONS = {
    "sampling": SAMPLING,
    "logprobs": in_the_queue(return_logprob=True, top_logprobs_num=10**5),
    "start of logprobs": in_the_queue(return_logprob=True, logprob_start_len=-3),
    "message": in_the_message,
    "forward": in_the_forward,
    "end at the first token": in_a_method("update_finish_state"),
    "end at the fifth token": FIFTH_TOKEN,
    "admission": in_a_method("init_next_round_input"),
}


def submit_all(engine, poison=None, monkeypatch=None):
    for i in range(NUM):
        priority = OFFLINE if i % 2 else 0
        engine.submit(f"r{i}", prompt(i, 20 + 25 * i), max_new_tokens=10 + i, priority=priority)
        if poison is not None and i == 3:
            engine.submit("poison", prompt(50, 90), max_new_tokens=12, priority=OFFLINE)
            poison(engine, monkeypatch)


EXPECTED = {}


@pytest.fixture
def expected(make_engine):
    """The tokens without a failure."""
    if not EXPECTED:
        engine = make_engine()
        submit_all(engine)
        engine.run_until_idle(max_iterations=2000)
        EXPECTED.update({rid: reply.output_ids for rid, reply in engine.replies.items()})
    return EXPECTED


def run_poisoned(engine, poison, monkeypatch, **options):
    engine.scheduler.cosched_faults._guard.is_strict = False
    submit_all(engine, poison, monkeypatch)
    engine.run_until_idle(max_iterations=3000, **options)
    assert_drained(engine)
    return engine.replies


@crossed(poison=POISONS, overlap={"overlap loop": True, "plain loop": False})
def test_only_the_request_that_fails_is_aborted(
    make_engine, monkeypatch, expected, poison, overlap
):
    engine = make_engine(policy="hygen", overlap=overlap)
    replies = run_poisoned(engine, poison, monkeypatch)
    assert replies["poison"].finish_reason == "abort"
    assert "the engine" in replies.pop("poison").message
    assert {rid: reply.output_ids for rid, reply in replies.items()} == expected
    assert {reply.finish_reason for reply in replies.values()} == {"length"}
    assert not engine.scheduler.cosched_faults.is_isolating
    assert sum(engine.scheduler.cosched.guard.failures.values()) > 0


@crossed(
    policy=["sglang", "priority", "sarathi", "cosched", "bros", "ecoserve"],
    poison={"sampling": SAMPLING, "fifth token": FIFTH_TOKEN},
)
def test_every_policy_survives_it(make_engine, monkeypatch, expected, poison, policy):
    engine = make_engine(policy=policy, overlap=True)
    replies = run_poisoned(engine, poison, monkeypatch)
    assert replies.pop("poison").finish_reason == "abort"
    assert {rid: reply.output_ids for rid, reply in replies.items()} == expected


def test_a_failure_that_no_request_causes_aborts_none(make_engine, monkeypatch, expected):
    engine = make_engine(policy="hygen", overlap=True)
    worker, calls = engine.scheduler.model_worker, []
    forward = failing(
        worker.forward_batch_generation,
        lambda batch, *_: calls.append(batch) or len(calls) in (5, 30),
        "for no reason",
    )
    monkeypatch.setattr(worker, "forward_batch_generation", forward)
    replies = run_poisoned(engine, lambda *_: None, monkeypatch)
    replies.pop("poison")
    assert {rid: reply.output_ids for rid, reply in replies.items()} == expected


def test_the_decision_log_goes_on_after_a_failure(make_engine, monkeypatch, tmp_path):
    path = tmp_path / "log"
    engine = make_engine(policy="hygen", overlap=True, config={"decision_log": str(path)})
    run_poisoned(engine, in_the_forward, monkeypatch)
    decisions = [entry.decision for entry in read_log(path, report=pytest.fail)]
    assert [d.iteration for d in decisions] == list(range(len(decisions)))
    outcomes = [d.outcome for d in decisions]
    assert "failed" in outcomes and "ran" in outcomes[outcomes.index("failed") :]
    assert {rid for d in decisions for rid in d.aborted} <= {"poison"}


def test_a_device_that_failed_ends_the_scheduler(make_engine, monkeypatch):
    engine = make_engine()
    engine.scheduler.cosched_faults._guard.is_strict = False

    def fail(batch, *args, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.scheduler.model_worker, "forward_batch_generation", fail)
    engine.submit("a", prompt(1, 20), max_new_tokens=4)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.run_until_idle(max_iterations=50)


def test_a_server_whose_memory_leaks_in_a_failure_drains(make_engine, monkeypatch):
    from cosched.engine import faults
    from cosched.engine.faults import DRAIN_SIGNAL

    engine = make_engine()
    engine.scheduler.cosched_faults._guard.is_strict = False
    sent = []
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")  # set back afterwards
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: sent.append(number))

    def leak(engine, monkeypatch):
        def leaks(batch, *args):
            if has_poison(batch):
                engine.scheduler.token_to_kv_pool_allocator.alloc(7)
            return has_poison(batch)

        worker = engine.scheduler.model_worker
        forward = failing(worker.forward_batch_generation, leaks, "with a leak")
        monkeypatch.setattr(worker, "forward_batch_generation", forward)

    submit_all(engine, leak, monkeypatch)
    engine.run_until_idle(max_iterations=2000)
    assert sent == [DRAIN_SIGNAL]
    assert len(engine.replies) == NUM + 1
