"""Requests that the engine treats specially: penalties, adapters, logprobs, beams, alignment, large
pages. None of them may end, hang or starve the scheduler."""

import random

import pytest
from sglang.srt.managers.io_struct import (
    CloseSessionReqInput,
    OpenSessionReqInput,
    SessionParams,
)

from cosched.engine import port
from cosched.engine.features.device_cost import DeviceCost
from cosched.lab.local_engine import made_up
from tests.adapters import FLAGS as LORA_FLAGS
from tests.adapters import load_adapters, make_adapters, without_pinned_memory
from tests.engine.conftest import OFFLINE, assert_drained, outputs, prompt
from tests.engine.test_partial_decode import hold_at_random

PENALTIES = (
    {"frequency_penalty": 1.5},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {},
)


def submit(engine, rid, *args, params, **fields):
    """params: more sampling parameters."""
    engine.submit(rid, *args, **fields)
    for name, value in params.items():
        setattr(engine._inbox[-1].sampling_params, name, value)


def submit_with_penalties(engine, rid, index, tokens, *, count, priority):
    params = PENALTIES[index % 5]
    submit(engine, rid, tokens, max_new_tokens=count, priority=priority, params=params)


def penalized_answers(engine, *, max_iterations=3000, when=lambda iteration: None):
    rng = random.Random(5)
    for i in range(10):
        tokens = prompt(i, rng.randint(10, 90))
        priority = OFFLINE if i % 2 else 0
        submit_with_penalties(engine, f"r{i}", i, tokens, count=24, priority=priority)
    engine.run_until_idle(max_iterations=max_iterations, on_iteration=when)
    assert_drained(engine)
    return outputs(engine)


@pytest.mark.parametrize("mixed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_penalties_count_the_same_tokens_with_pauses(make_engine, mixed):
    expected = penalized_answers(make_engine(mixed=mixed))
    engine = make_engine(mixed=mixed)
    policy = hold_at_random(engine, seed=2)
    assert penalized_answers(engine) == expected
    assert policy.num_held > 20


def test_penalties_survive_a_preemption(make_engine):
    def run(engine):
        for i in range(4):
            submit_with_penalties(engine, f"off{i}", i, prompt(i, 60), count=40, priority=OFFLINE)

        def act(iteration):
            if iteration in (10, 20):
                for i in range(2):
                    rid = f"on{iteration}-{i}"
                    submit_with_penalties(
                        engine, rid, i, prompt(iteration + i, 60), count=8, priority=0
                    )

        engine.run_until_idle(max_iterations=3000, on_iteration=act)
        assert_drained(engine)
        return outputs(engine)

    expected = run(make_engine(max_running_requests=8))
    engine = make_engine(max_running_requests=4)
    assert run(engine) == expected
    assert engine.scheduler.cosched.counters.num_preemptions > 1


@pytest.fixture
def lora_engine(make_engine, tmp_path):
    """An engine with adapters A, B and C. Two fit at once, including the model itself."""

    def make(**flags):
        engine = make_engine(
            switches=LORA_FLAGS, max_loras_per_batch=2, max_total_tokens=4000, **flags
        )
        folders = make_adapters(tmp_path, "ABC")
        return engine, load_adapters(engine.scheduler, folders)

    with without_pinned_memory():
        yield make


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.long)])
def test_adapters_of_paused_requests_stay_in_use(lora_engine, overlap):
    engine, ids = lora_engine(overlap=overlap)
    hold_at_random(engine, seed=4)
    for i in range(15):
        priority = OFFLINE if i % 2 else 0
        engine.submit(
            f"r{i}", prompt(i, 40), max_new_tokens=20, priority=priority, lora_id=ids["ABC"[i % 3]]
        )
    engine.run_until_idle(max_iterations=4000)
    assert all(len(reply.output_ids) == 20 for reply in engine.replies.values())
    assert_drained(engine)
    assert engine.scheduler.cosched.counters.num_engine_refusals == 0


def test_an_online_request_replaces_an_adapter_of_offline_requests(lora_engine):
    engine, ids = lora_engine(max_running_requests=8)
    for i in range(4):
        lora_id = ids["AB"[i % 2]]
        engine.submit(
            f"off{i}", prompt(i, 40), max_new_tokens=60, priority=OFFLINE, lora_id=lora_id
        )
    ended = {}

    def act(iteration):
        if iteration == 15:
            engine.submit("on", prompt(9, 40), max_new_tokens=3, priority=0, lora_id=ids["C"])
        for rid, reply in engine.replies.items():
            if reply.finish_reason:
                ended.setdefault(rid, iteration)

    engine.run_until_idle(on_iteration=act, max_iterations=2000)
    assert ended["on"] < min(ended[f"off{i}"] for i in range(4))
    assert all(len(reply.output_ids) in (3, 60) for reply in engine.replies.values())


def test_a_request_that_the_engine_keeps_refusing_causes_no_preemptions(make_engine):
    engine = make_engine(max_total_tokens=20000, max_running_requests=4)
    scheduler = engine.scheduler
    scheduler.enable_lora = True
    scheduler.lora_drainer = None
    scheduler.can_schedule_lora_req = lambda req, loras: req.rid != "blocked"
    for i in range(12):
        engine.submit(f"off{i}", prompt(100 + i, 60), max_new_tokens=60, priority=OFFLINE)

    def act(iteration):
        if iteration == 20:
            engine.submit("blocked", prompt(3, 50), max_new_tokens=5, priority=0)
        if iteration == 200:
            scheduler.enable_lora = False

    engine.run_until_idle(on_iteration=act, max_iterations=2000)
    counters = scheduler.cosched.counters
    # Twice as long each time, up to 64 plans: 2 + 4 + ... + 64 + 64 cover the 180 iterations.
    assert 1 <= counters.num_engine_refusals <= 10
    assert counters.num_preemptions <= counters.num_engine_refusals
    assert len(engine.replies["blocked"].output_ids) == 5


@pytest.mark.parametrize(
    ("policy", "overlap"),
    [
        ("sarathi", True),
        ("hygen", False),
        pytest.param("echo-bs+e+s", False, marks=pytest.mark.long),
    ],
)
def test_decodes_continue_beside_prefills_that_cannot_be_mixed_with_them(
    make_engine, policy, overlap
):
    """SGLang does not mix batches with logprobs."""
    engine = make_engine(
        policy=policy, overlap=overlap, max_total_tokens=40000, max_running_requests=64
    )
    engine.submit("online", prompt(1, 20), max_new_tokens=20, priority=0)
    engine._inbox[-1].return_logprob = True
    # More prefill than the 60 iterations take.
    for i in range(15):
        engine.submit(f"off{i}", prompt(100 + i, 300), max_new_tokens=10, priority=OFFLINE)
    ended, prefilling = [], []

    def act(iteration):
        reply = engine.replies.get("online")
        if reply is not None and reply.finish_reason and not ended:
            ended.append(iteration)
        if not engine.replies.keys() >= {f"off{i}" for i in range(15)}:
            prefilling.append(iteration)

    engine.run_until_idle(on_iteration=act, max_iterations=6000)
    assert ended[0] <= 60 < prefilling[-1]
    assert_drained(engine)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_idle_engine_that_refuses_a_plan_cuts_the_prompts_itself(make_engine, overlap):
    """A rule of the engine that cosched does not know must not block the scheduler."""
    engine = make_engine(
        policy="hygen", overlap=overlap, max_total_tokens=20000, chunked_prefill_size=1024
    )
    engine.scheduler.truncation_align_size = 512  # after its limits were read
    for i in range(3):
        engine.submit(f"r{i}", prompt(i, 1500), max_new_tokens=4, priority=OFFLINE)
    engine.run_until_idle(max_iterations=600)
    assert all(len(reply.output_ids) == 4 for reply in engine.replies.values())
    assert_drained(engine)


@pytest.mark.parametrize(("policy", "priority"), [("hygen", 0), ("echo-bs+e+s", OFFLINE)])
def test_prompts_are_cut_where_the_engine_aligns_them(make_engine, policy, priority):
    """Deterministic inference cuts prompts only at multiples of some thousand tokens."""
    engine = make_engine(policy=policy, max_total_tokens=20000, chunked_prefill_size=1024)
    engine.scheduler.truncation_align_size = 512
    controller = engine.scheduler.cosched
    controller.caps = port.caps_of(engine.scheduler)
    for i in range(3):
        engine.submit(f"r{i}", prompt(i, 1500), max_new_tokens=4, priority=priority)
    engine.run_until_idle(max_iterations=500)
    assert all(len(reply.output_ids) == 4 for reply in engine.replies.values())
    assert controller.counters.num_engine_refusals == 0


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.long)])
def test_beams_are_never_preempted_or_paused(make_engine, overlap):
    engine = make_engine(policy="sarathi", overlap=overlap, max_running_requests=6)
    hold_at_random(engine, seed=1)
    custom = {"cosched_server": {"name": "acme/x"}, "cosched": {"deadline_s": 500}}
    params = {"beam_width": 3, "n": 1, "custom_params": custom}
    fields = {"priority": OFFLINE, "stream": False, "params": params}
    submit(engine, "beam", prompt(1, 60), max_new_tokens=60, **fields)
    engine.submit("off", prompt(2, 100), max_new_tokens=60, priority=OFFLINE)

    def act(iteration):
        if iteration == 10:
            for i in range(4):
                engine.submit(f"on{i}", prompt(10 + i, 60), max_new_tokens=20, priority=0)

    engine.run_until_idle(on_iteration=act, max_iterations=600)
    assert engine.replies["beam"].finish_reason == "length"
    assert_drained(engine)
    costs = engine.scheduler.cosched.features[DeviceCost].account.by_class()
    assert costs["offline"]["acme/x"] > 0, "SGLang gives beams sampling parameters of their own"


@pytest.mark.parametrize(
    ("policy", "seed"), [pytest.param("sarathi", 2, marks=pytest.mark.long), ("hygen", 1)]
)
def test_decodes_find_their_pages_beside_prefills(make_engine, policy, seed):
    """A decode may need a new page, which SGLang does not check in mixed batches."""
    page = 64
    engine = make_engine(
        policy=policy,
        overlap=True,
        page_size=page,
        max_total_tokens=page * 96,
        max_running_requests=24,
        chunked_prefill_size=page * 16,
        schedule_conservativeness=1.0 if seed == 1 else 0.3,
    )
    engine.replace_forward(lambda batch, **options: made_up([5] * len(batch.reqs)))
    rng = random.Random(seed)
    for i in range(30):
        engine.submit(f"off{i}", prompt(100 + i, page * 2), max_new_tokens=140, priority=OFFLINE)

    def act(iteration):
        if iteration % 7 == 3 and iteration < 140:
            tokens = prompt(300 + iteration, rng.randint(page, page * 10))
            engine.submit(f"on{iteration}", tokens, max_new_tokens=30, priority=0)

    engine.run_until_idle(on_iteration=act, max_iterations=8000)
    assert_drained(engine)


@pytest.mark.parametrize("priority", [0, OFFLINE])
def test_a_session_that_holds_most_of_the_memory_continues(make_engine, priority):
    """Only its first prompt is in the tree, and there is too little memory to compute the rest
    again."""
    engine = make_engine(switches=("--enable-streaming-session",))
    scheduler = engine.scheduler
    scheduler.open_session(
        OpenSessionReqInput(capacity_of_str_len=5000, session_id="s", streaming=True)
    )
    for turn, length in enumerate((50, 1200, 100)):
        engine.submit(f"s{turn}", prompt(turn, length), max_new_tokens=4, priority=priority)
        engine._inbox[-1].session_params = SessionParams(id="s")
        engine.submit(f"behind{turn}", prompt(10 + turn, 60), max_new_tokens=4, priority=priority)
        engine.run_until_idle(max_iterations=300)
        assert len(engine.replies[f"s{turn}"].output_ids) == 4
        assert len(engine.replies[f"behind{turn}"].output_ids) == 4
    assert scheduler.cosched.counters.num_engine_refusals == 0
    scheduler.close_session(CloseSessionReqInput(session_id="s"))
    assert_drained(engine)


@pytest.mark.parametrize("policy", ["hygen", "sglang"])
def test_a_prompt_that_leaves_no_page_is_refused(make_engine, policy):
    engine = make_engine(policy=policy, page_size=16, max_total_tokens=640)
    longest = engine.scheduler.max_req_input_len - 1
    for rid, length in (("fits", longest), ("long", longest + 1), ("behind", 60)):
        engine.submit(rid, prompt(len(rid), length), max_new_tokens=50)
    engine.run_until_idle(max_iterations=300)
    assert engine.replies["fits"].finish_reason == "length"
    assert engine.replies["long"].finish_reason == "abort"
    assert len(engine.replies["behind"].output_ids) == 50
    assert_drained(engine)
