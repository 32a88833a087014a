"""The object that stands in for SGLang's waiting queue behaves as its list would."""

import random
import threading
from types import SimpleNamespace

import pytest

from cosched.engine.waiting import WaitingQueue, online_requests
from cosched.pool.pool import ArrivalQueue


@pytest.fixture(autouse=True)
def without_disaggregation(monkeypatch):
    """SGLang knows its configuration once an engine has been made in this process, not before."""
    plain = SimpleNamespace(disaggregation_mode="null")
    monkeypatch.setattr("cosched.engine.port.request.get_disagg", lambda: plain)


class Ticks:
    def __init__(self):
        self.now = 0.0

    def now_s(self):
        self.now += 1.0
        return self.now


def make_req(rid, priority, length=10):
    return SimpleNamespace(
        rid=rid,
        priority=priority,
        seqlen=length,
        output_ids=[],
        retraction_count=0,
        origin_input_ids=[7] * length,
        sampling_params=SimpleNamespace(
            custom_params=None,
            max_new_tokens=5,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            min_new_tokens=0,
            ignore_eos=False,
        ),
        beam_group=None,
        session=None,
        input_embeds=None,
        multimodal_inputs=None,
        return_logprob=False,
        lora_id=None,
        skip_radix_cache_insert=False,
    )


def make_queue():
    return WaitingQueue(pool=ArrivalQueue(), clock=Ticks())


def test_any_sequence_of_operations_gives_what_a_list_gives():
    rng = random.Random(0)
    queue, model, out = make_queue(), [], []
    for step in range(1200):
        verb = rng.choice(["append", "append", "pop", "remove", "return"])
        if verb == "append":
            req = make_req(f"r{step}", rng.choice([None, 0, -1, -100]), rng.randint(1, 50))
            queue.append(req)
            model.append(req)
        elif verb == "return" and out:
            req = out.pop(rng.randrange(len(out)))
            queue.append(req)  # it takes its old place
            model.append(req)
            model.sort(key=lambda r: r.cosched.arrival_seq)
        elif model and verb == "pop":
            index = rng.randrange(len(model))
            req = model.pop(index)
            assert queue.pop(index) is req
            out.append(req)
        elif model and verb == "remove":
            req = model.pop(rng.randrange(len(model)))
            assert req in queue
            queue.remove(req)
            assert req not in queue
            out.append(req)
        assert list(queue) == model and len(queue) == len(model)
        assert queue.num_tokens == sum(req.seqlen for req in model)
        offline = [r for r in model if r.priority is not None and r.priority < 0]
        assert [t.req for t in queue.offline] == offline
        assert online_requests(queue) == [r for r in model if r not in offline]
        if model:
            index = rng.randrange(-len(model), len(model))
            assert queue[index] is model[index]


def test_what_is_still_to_come_is_what_the_newest_line_said():
    queue = make_queue()
    for rid, behind in (("a", 9), ("b", 8)):
        req = make_req(rid, -1)
        req.sampling_params.custom_params = {"cosched_server": {"behind": behind}}
        queue.append(req)
    first = queue.pop(0)
    assert queue.num_behind == 8
    queue.append(first)  # preempted
    assert queue.num_behind == 8
    queue.append(make_req("online", 0))
    assert queue.num_behind == 8
    queue.append(make_req("c", -1))
    assert queue.num_behind == 0


def test_an_engine_in_this_process_leaves_no_thread_behind(make_engine):
    """SGLang's watchdog would kill the parent of this process minutes after the last run."""
    before = threading.active_count()
    engine = make_engine()
    engine.submit("a", [5, 6, 7], max_new_tokens=2)
    engine.run_until_idle()
    assert not [t.name for t in threading.enumerate() if "watchdog" in str(t).lower()]
    assert threading.active_count() <= before + 1


def test_everything_can_be_aborted_by_position_from_a_large_queue():
    queue = make_queue()
    for index in range(20_000):
        queue.append(make_req(f"r{index}", -1))
    for index in reversed(range(20_000)):  # as SGLang aborts; quadratic it would take minutes
        queue.pop(index)
    assert len(queue) == 0 and queue.num_tokens == 0


def test_requests_are_found_by_the_beginning_of_their_ids():
    queue = make_queue()
    rids = ["b", "a10", "a1", "a2", "a", "", "a1\U0010ffff"]
    for rid in rids:
        queue.append(make_req(rid, -1 if rid < "a2" else 0))
    for prefix in ["", "a", "a1", "a10", "b", "c", "a3", "\U0010ffff"]:
        found = [req.rid for req in queue.beginning_with(prefix)]
        assert found == [rid for rid in rids if rid.startswith(prefix)], prefix
    queue.pop(2)
    assert [req.rid for req in queue.beginning_with("a1")] == ["a10", "a1\U0010ffff"]


def test_preempted_requests_are_found_without_a_walk_through_all():
    queue = make_queue()
    for i in range(5):
        queue.append(make_req(f"r{i}", -1))
    assert [*queue.preempted] == []
    req = queue.pop(2)
    req.output_ids = [1, 2]
    queue.append(req)
    assert [tracked.req for tracked in queue.preempted] == [req]
    queue.remove(req)
    assert [*queue.preempted] == []
