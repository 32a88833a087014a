"""A request on which the engine fails is aborted; every other request gets the same tokens."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.engine.decision_log.read import read_log
from cosched.engine.faults import Isolation
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


def _poison_queued(engine, change):
    """Change the request when it is queued: bounds refuse it before that."""
    queue = engine.scheduler._add_request_to_queue

    def add(req, is_retracted=False):
        if req.rid == "poison":
            change(req)
        queue(req, is_retracted)

    engine.scheduler._add_request_to_queue = add


def poison_sampling(engine, monkeypatch):
    _poison_queued(engine, lambda req: setattr(req.sampling_params, "top_k", 2**40))


def poison_logprobs(engine, monkeypatch):
    def change(req):
        req.return_logprob, req.top_logprobs_num = True, 10**5

    _poison_queued(engine, change)


def poison_logprob_start(engine, monkeypatch):
    def change(req):
        req.return_logprob, req.logprob_start_len = True, -3

    _poison_queued(engine, change)


def poison_message(engine, monkeypatch):
    create = engine.scheduler._create_generation_req

    def fail(received, *args, **options):
        if received.rid == "poison":
            raise Broken("while it is built")
        return create(received, *args, **options)

    engine.scheduler._create_generation_req = fail


def poison_forward(engine, monkeypatch):
    worker = engine.scheduler.model_worker
    forward = worker.forward_batch_generation

    def fail(batch, *args, **options):
        if any(req.rid == "poison" for req in batch.reqs):
            raise Broken("in the forward pass")
        return forward(batch, *args, **options)

    monkeypatch.setattr(worker, "forward_batch_generation", fail)


def _poison_method(engine, monkeypatch, name, after):
    from sglang.srt.managers.schedule_batch import Req

    original = getattr(Req, name)
    calls = []

    def fail(req, *args, **options):
        if req.rid == "poison":
            calls.append(req)
            if len(calls) > after:
                raise Broken(f"in {name}")
        return original(req, *args, **options)

    monkeypatch.setattr(Req, name, fail)


def poison_end_at_first_token(engine, monkeypatch):
    _poison_method(engine, monkeypatch, "update_finish_state", 0)


def poison_end_at_fifth_token(engine, monkeypatch):
    _poison_method(engine, monkeypatch, "update_finish_state", 4)


def poison_admission(engine, monkeypatch):
    _poison_method(engine, monkeypatch, "init_next_round_input", 0)


POISONS = [
    poison_sampling,
    poison_logprobs,
    poison_logprob_start,
    poison_message,
    poison_forward,
    poison_end_at_first_token,
    poison_end_at_fifth_token,
    poison_admission,
]


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


@pytest.mark.parametrize("overlap", [False, True], ids=["plain loop", "overlap loop"])
@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.__name__)
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


@pytest.mark.parametrize("policy", ["sglang", "priority", "sarathi", "cosched", "bros", "ecoserve"])
@pytest.mark.parametrize("poison", [poison_sampling, poison_end_at_fifth_token])
def test_every_policy_survives_it(make_engine, monkeypatch, expected, poison, policy):
    engine = make_engine(policy=policy, overlap=True)
    replies = run_poisoned(engine, poison, monkeypatch)
    assert replies.pop("poison").finish_reason == "abort"
    assert {rid: reply.output_ids for rid, reply in replies.items()} == expected


def test_a_failure_that_no_request_causes_aborts_none(make_engine, monkeypatch, expected):
    engine = make_engine(policy="hygen", overlap=True)
    worker = engine.scheduler.model_worker
    forward = worker.forward_batch_generation
    calls = []

    def fail_now_and_then(batch, *args, **options):
        calls.append(batch)
        if len(calls) in (5, 30):
            raise Broken("for no reason")
        return forward(batch, *args, **options)

    monkeypatch.setattr(worker, "forward_batch_generation", fail_now_and_then)
    replies = run_poisoned(engine, lambda *_: None, monkeypatch)
    replies.pop("poison")
    assert {rid: reply.output_ids for rid, reply in replies.items()} == expected


def test_the_decision_log_goes_on_after_a_failure(make_engine, monkeypatch, tmp_path):
    path = tmp_path / "log"
    engine = make_engine(policy="hygen", overlap=True, config={"decision_log": str(path)})
    run_poisoned(engine, poison_forward, monkeypatch)
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
    from cosched.engine.shutdown import DRAIN_SIGNAL

    engine = make_engine()
    engine.scheduler.cosched_faults._guard.is_strict = False
    sent = []
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")  # set back afterwards
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: sent.append(number))

    def leak(engine, monkeypatch):
        def fail(batch, *args, **options):
            if any(req.rid == "poison" for req in batch.reqs):
                engine.scheduler.token_to_kv_pool_allocator.alloc(7)
                raise Broken("with a leak")
            return forward(batch, *args, **options)

        worker = engine.scheduler.model_worker
        forward = worker.forward_batch_generation
        monkeypatch.setattr(worker, "forward_batch_generation", fail)

    submit_all(engine, leak, monkeypatch)
    engine.run_until_idle(max_iterations=2000)
    assert sent == [DRAIN_SIGNAL]
    assert len(engine.replies) == NUM + 1
