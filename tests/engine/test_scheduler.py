"""Admission, preemption, aborts and the offline pool on a real in-process SGLang scheduler."""

import pytest

from cosched.core.request import RequestClass
from cosched.engine import port
from cosched.engine.read_state import state_of
from cosched.engine.tracked import TrackedRequest
from tests.crossed import crossed
from tests.engine.conftest import (
    assert_drained,
    prompt,
    random_traffic,
    view_now,
    without_model,
)

OFFLINE = -1


def rids(reqs):
    return [req.rid for req in reqs]


def running(engine):
    return set(rids(engine.scheduler.running_batch.reqs))


def waiting(engine):
    return rids(engine.scheduler.waiting_queue)


@crossed(overlap=[False, True], mixed=[True, False])
def test_online_is_admitted_while_a_chunked_offline_prefill_is_under_way(
    make_engine, overlap, mixed
):
    engine = make_engine(overlap=overlap, mixed=mixed)
    engine.submit("off", prompt(1, 600), max_new_tokens=4, priority=OFFLINE)
    seen = {}

    def act(iteration):
        scheduler = engine.scheduler
        if iteration == 3:
            assert scheduler.chunked_req is not None and scheduler.chunked_req.rid == "off"
            engine.submit("on", prompt(2, 200), max_new_tokens=4)
        if iteration == 4:
            seen["chunked"] = scheduler.chunked_req.rid
            seen["waiting"] = waiting(engine)
        if "on" in engine.replies and "first" not in seen:
            seen["first"] = iteration
            seen["off_done"] = "off" in engine.replies

    engine.run_until_idle(on_iteration=act)
    assert seen["chunked"] == "on" and seen["waiting"] == ["off"]
    # 200 tokens are four chunks of 64: admitted at once, nothing offline in between.
    assert seen["first"] <= 3 + 4 + (2 if overlap else 1)
    assert not seen["off_done"]
    assert len(engine.replies["off"].output_ids) == 4
    assert_drained(engine)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_online_is_admitted_when_kv_memory_is_what_is_missing(make_engine, overlap):
    engine = make_engine(overlap=overlap, max_total_tokens=1000, chunked_prefill_size=512)
    for i in range(3):
        engine.submit(f"off{i}", prompt(i, 200), max_new_tokens=100, priority=OFFLINE)
    log = []

    def act(iteration):
        if iteration == 6:
            assert running(engine) == {"off0", "off1", "off2"}
            assert engine.scheduler.get_num_allocatable_reqs(3) > 0, "slots are not what is short"
            engine.submit("on", prompt(9, 500), max_new_tokens=20)
        log.append((iteration, running(engine), waiting(engine)))

    engine.run_until_idle(on_iteration=act)
    _, _, waits = log[7]
    assert "on" not in waits and waits, "the online request waits, or nothing was stopped for it"
    assert {len(engine.replies[f"off{i}"].output_ids) for i in range(3)} == {100}
    assert_drained(engine)


def test_a_stopped_request_keeps_class_arrival_and_tokens_and_resumes_from_the_tree(make_engine):
    engine = make_engine(max_running_requests=1, chunked_prefill_size=512)
    engine.submit("off", prompt(1, 200), max_new_tokens=30, priority=OFFLINE)
    seen = {}

    def act(iteration):
        scheduler = engine.scheduler
        if iteration == 10:
            req = scheduler.running_batch.reqs[0]
            seen["before"] = TrackedRequest.of(req)
            seen["arrival"] = (seen["before"].arrival_s, seen["before"].arrival_seq)
            seen["num_output"] = len(req.output_ids)
            engine.submit("on", prompt(2, 50), max_new_tokens=3)
        if iteration == 11:
            tracked = scheduler.cosched.waiting.get("off")
            assert tracked is seen["before"]
            assert tracked.request_class is RequestClass.OFFLINE
            assert (tracked.arrival_s, tracked.arrival_seq) == seen["arrival"]
            assert tracked.num_output_tokens == seen["num_output"] > 0
            assert tracked.req.retraction_count == 1
            view = view_now(scheduler)
            seen["match"] = view.match(tracked)
            seen["length"] = tracked.num_prompt_tokens + tracked.num_output_tokens

    engine.run_until_idle(on_iteration=act)
    assert seen["match"].cached == seen["length"] - 1, "all but the last token is still there"
    assert len(engine.replies["off"].output_ids) == 30
    assert_drained(engine)


@crossed(state=["queued", "prefilling", "paused", "running", "preempted"], overlap=[False, True])
def test_abort_frees_everything_in_every_state(make_engine, overlap, state):
    engine = make_engine(overlap=overlap, max_running_requests=2)
    long = 600 if state in ("prefilling", "paused") else 100
    engine.submit("victim", prompt(1, long), max_new_tokens=60, priority=OFFLINE)
    engine.submit("other", prompt(2, 100), max_new_tokens=60, priority=OFFLINE)
    if state == "queued":
        engine.submit("third", prompt(3, 100), max_new_tokens=60, priority=OFFLINE)
    aborted = "third" if state == "queued" else "victim"
    reached = []

    def act(iteration):
        scheduler = engine.scheduler
        if reached:
            return
        if state in ("paused", "preempted") and iteration == 5:
            for k in range(2):
                engine.submit(f"on{k}", prompt(20 + k, 100), max_new_tokens=30)
        chunked = scheduler.chunked_req
        where = {
            "queued": aborted in waiting(engine) and iteration > 3,
            "prefilling": chunked is not None and chunked.rid == aborted and iteration > 2,
            "paused": aborted in waiting(engine) and iteration > 5,
            "running": aborted in running(engine) and iteration > 6,
            "preempted": aborted in waiting(engine) and iteration > 5,
        }
        if where[state]:
            reached.append(iteration)
            engine.abort(aborted)

    engine.run_until_idle(on_iteration=act)
    assert reached, f"never reached the state {state}"
    assert engine.replies[aborted].finish_reason == "abort"
    others = set(engine.replies) - {aborted}
    assert {engine.replies[rid].finish_reason for rid in others} == {"length"}
    assert_drained(engine)


def test_pool_counts_in_idleness_loads_flush_and_server_info(make_engine):
    from sglang.srt.managers.io_struct import GetInternalStateReq

    engine = make_engine(max_running_requests=1, chunked_prefill_size=512)
    for i in range(5):
        engine.submit(f"off{i}", prompt(i, 100), max_new_tokens=20, priority=OFFLINE)
    checked = []

    def act(iteration):
        scheduler = engine.scheduler
        if iteration != 5:
            return
        checked.append(iteration)
        assert len(scheduler.waiting_queue) == 4
        assert not scheduler.is_fully_idle() and not scheduler.is_fully_idle(for_health_check=True)
        assert scheduler.flush_cache() is False
        loads = scheduler.load_inquirer.get_loads()
        assert loads.num_waiting_reqs == 4 and loads.num_running_reqs == 1
        assert loads.num_total_tokens >= 400
        assert scheduler.load_inquirer._get_num_pending_tokens() == 400
        state = scheduler.get_internal_state(GetInternalStateReq()).internal_state["cosched"]
        assert state["policy"] == "sarathi"
        assert state["num_waiting_offline"] == 4 and state["num_waiting_online"] == 0
        assert state["num_running_offline"] == 1

    engine.run_until_idle(on_iteration=act)
    assert checked
    assert engine.scheduler.flush_cache() is True
    assert_drained(engine)


@pytest.mark.parametrize(
    "policy", ["sglang", pytest.param("priority", marks=pytest.mark.long), "sarathi"]
)
def test_a_full_queue_turns_online_away_and_never_offline(make_engine, policy):
    switches = ["--enable-priority-scheduling"] if policy == "priority" else []
    engine = make_engine(
        policy=policy, max_running_requests=1, max_queued_requests=2, switches=switches
    )

    def act(iteration):
        if iteration == 0:
            for i in range(6):
                engine.submit(f"off{i}", prompt(i, 50), max_new_tokens=30, priority=-100)
        if iteration == 4:
            for i in range(5):
                engine.submit(f"on{i}", prompt(20 + i, 50), max_new_tokens=5, priority=0)

    engine.run_until_idle(on_iteration=act)
    reasons = {rid: reply.finish_reason for rid, reply in engine.replies.items()}
    assert [reasons[f"off{i}"] for i in range(6)] == ["length"] * 6
    assert [reasons[f"on{i}"] for i in range(5)].count("abort") == 3
    assert_drained(engine)


def test_when_decodes_run_out_of_memory_offline_gives_way(make_engine):
    engine = make_engine(
        max_total_tokens=700, chunked_prefill_size=512, schedule_conservativeness=0.01
    )
    # What may end early is not counted in full (0.5.23 counts the output of `ignore_eos` so).
    without_model(engine)
    may_end = {"ignore_eos": False}
    engine.submit("on", prompt(1, 100), max_new_tokens=200, **may_end)
    for i in range(4):
        engine.submit(f"off{i}", prompt(2 + i, 60), max_new_tokens=150, priority=OFFLINE, **may_end)
    engine.run_until_idle()
    assert engine.replies["on"].num_retractions == 0
    assert sum(engine.replies[f"off{i}"].num_retractions for i in range(4)) > 0
    assert [len(engine.replies[f"off{i}"].output_ids) for i in range(4)] == [150] * 4
    assert_drained(engine)


@pytest.mark.parametrize(
    "seed",
    [0, 1, pytest.param(2, marks=pytest.mark.long), 3, 4, pytest.param(5, marks=pytest.mark.long)],
)
def test_random_traffic_leaks_nothing_and_answers_everything(make_engine, seed):
    engine = make_engine(
        overlap=bool(seed % 2),
        mixed=seed % 3 != 0,
        page_size=(1, 16)[seed // 3],
        max_total_tokens=1600,
        max_running_requests=6,
    )
    random_traffic(engine if seed in (1, 4) else without_model(engine), seed, most_tokens=25)


def test_the_state_tells_of_the_pool_and_of_planning(make_engine):
    engine = make_engine(policy="hygen", max_running_requests=2)
    for i in range(8):
        tokens = prompt(1, 30) + prompt(60 + i, 10)
        engine.submit(f"r{i}", tokens, max_new_tokens=20, priority=OFFLINE)
    states = []

    def act(iteration):
        if iteration >= 10 and not states:
            states.append(state_of(engine.scheduler.cosched))

    engine.run_until_idle(on_iteration=act, max_iterations=8000)
    states.append(state_of(engine.scheduler.cosched))
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


@pytest.mark.parametrize("policy", ["cosched", pytest.param("hygen", marks=pytest.mark.long)])
def test_tenants_of_a_real_scheduler_share_it_and_keep_their_limits(make_engine, policy):
    """The first tenant's job comes first; the last one's is done long before it."""
    limits = {"keys": {"k": {"name": "limited", "max_running_offline": 2}}}
    config = {"claims": limits, "pool": {"tenant_lag_s": 0.02}}
    engine = make_engine(policy=policy, config=config)
    names = ["many"] * 60 + ["limited"] * 6 + ["few/night"] * 6
    for i, name in enumerate(names):
        custom = {"cosched_server": {"name": name}}
        engine.submit(f"{i:02}", prompt(i, 60), max_new_tokens=8, priority=-1, custom_params=custom)
    done, most_limited = [], 0

    def look(iteration):
        nonlocal most_limited
        running = [req.cosched.tenant for req in port.under_way(engine.scheduler)]
        most_limited = max(most_limited, running.count("limited"))
        done.extend(rid for rid, reply in engine.replies.items() if reply.finish_reason)

    engine.run_until_idle(on_iteration=look, max_iterations=5000)
    assert 1 <= most_limited <= 2
    ends = {rid: place for place, rid in reversed([*enumerate(dict.fromkeys(done))])}
    assert max(ends.get(f"{i:02}", 99) for i in range(66, 72)) < 45
    assert_drained(engine)
    pool = engine.scheduler.cosched.waiting.offline
    assert not pool.under_way and not any(t.num_active for t in pool.tenants.values())
