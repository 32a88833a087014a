"""Policies on a real in-process SGLang scheduler: they change no token, every request is answered,
and nothing that they plan is refused."""

import random
import sys
import zlib
from pathlib import Path

import msgspec
import pytest

from cosched.engine.running import borrowed_by
from cosched.papers.bros.policy import BrosOptions, BrosPolicy
from cosched.schedule.builder import PlanBuilder
from tests.engine.conftest import (
    OFFLINE,
    assert_drained,
    kv_tokens,
    outputs,
    prompt,
    random_traffic,
    view_now,
    without_model,
)
from tests.factories import progress_of

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
    return outputs(engine)


AMPLE = {
    "names": ("echo-bs+e+s+m", "cosched", "bros", "batch_size:BatchSize"),
    "seed": 1,
    "flags": {},
}
OTHERS = {
    **AMPLE,
    "names": (*("echo-bs", "echo-bs+e", "echo-bs+e+s", "bros-late-last", "bros-rr", "bros-rt"),),
}
SCARCE = {
    "names": ("eco-srtf", "eco-multires"),
    "seed": 3,
    "flags": {"page_size": 16},
    "max_total_tokens": 992,
}


WITHOUT_OVERLAP = {**AMPLE, "names": ("hygen", "cosched", "own_policy:IdleOnly")}
OTHER_SCARCE = {**SCARCE, "names": ("eco-vllm", "eco-syncfastgen")}


@pytest.mark.parametrize(
    ("case", "overlap"),
    [
        pytest.param(AMPLE, True, id="ample memory"),
        pytest.param(WITHOUT_OVERLAP, False, id="ample memory, no overlap"),
        pytest.param(SCARCE, True, id="scarce memory"),
        pytest.param(OTHER_SCARCE, False, id="scarce memory, no overlap"),
        pytest.param(OTHERS, True, id="ample memory, others", marks=pytest.mark.long),
    ],
)
def test_what_is_answered_does_not_depend_on_the_policy(make_engine, monkeypatch, case, overlap):
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
        without_model(engine)
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


def test_the_example_preempts_offline_work_for_a_chat_and_loses_nothing(make_engine, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    engine = make_engine(policy="own_policy:IdleOnly")

    def act(iteration):
        if iteration == 0:
            engine.submit("job", prompt(1, 90), max_new_tokens=20, priority=OFFLINE)
        if iteration == 6:
            engine.submit("chat", prompt(2, 30), max_new_tokens=8)

    engine.run_until_idle(on_iteration=act, max_iterations=1000)
    assert_drained(engine)
    assert len(engine.replies["job"].output_ids) == 20
    assert engine.scheduler.cosched.counters.num_preemptions == 1


class Crowded:
    """A policy with a batch of so few requests that it must exchange."""

    def __init__(self, inner, batch_size):
        self._inner = inner
        self._size = batch_size
        self.initial = inner.initial
        self.num_exchanged = 0

    def plan(self, view, state):
        state = msgspec.structs.replace(state, batch_size=self._size)
        without = BrosPolicy(self._inner._settings, BrosOptions(replaces=False))
        plan, after = self._inner.plan(view, state)
        plain, _ = without.plan(view, state)
        if (plan.paused, plan.prefill) != (plain.paused, plain.prefill):
            self.num_exchanged += 1
        return plan, after


@pytest.mark.parametrize(
    ("name", "overlap", "page_size"),
    [
        ("bros", True, 1),
        ("bros-nobi", False, 16),
        pytest.param("bros", False, 16, marks=pytest.mark.long),
        pytest.param("bros-nobi", True, 1, marks=pytest.mark.long),
    ],
)
def test_forced_exchange_of_bros_changes_no_token(make_engine, overlap, page_size, name):
    flags = {"overlap": overlap, "page_size": page_size, "chunked_prefill_size": 256}
    answers = ask_all(make_engine(policy="sarathi", **flags), seed=3)
    targets = {"slo": {"ttft_ms": 60_000, "tpot_ms": 60_000}}
    engine = make_engine(policy=name, config=targets, max_total_tokens=992, **flags)
    controller = engine.scheduler.cosched
    controller.planner.policy = crowded = Crowded(controller.planner.policy, batch_size=2)
    assert ask_all(engine, seed=3) == answers
    assert crowded.num_exchanged > 10
    assert_drained(engine)


@pytest.mark.parametrize(
    ("page_size", "overlap"), [pytest.param(1, True, marks=pytest.mark.long), (16, False)]
)
def test_cosched_preempts_late_prefills_and_answers_all_requests(make_engine, page_size, overlap):
    """Most targets are missed from the start, and prompts have many chunks."""
    engine = make_engine(policy="cosched", overlap=overlap, page_size=page_size)
    preempted = set()

    def look():
        waiting = engine.scheduler.cosched.waiting.online
        preempted.update(tracked.rid for tracked in waiting if tracked.num_preemptions)

    random_traffic(
        engine,
        2,
        most_tokens=12,
        heads=(0,),
        longest_tail=800,
        wishes=lambda rng, num_tokens: {"ttft_slo_ms": rng.choice([1, 50, 5000])},
        also=look,
    )
    assert preempted, "no late prefill was preempted"


@pytest.mark.parametrize(
    "name", ["ecoserve", pytest.param("ecoserve-oracle", marks=pytest.mark.long)]
)
def test_ecoserve_serves_all_requests_where_lengths_are_badly_known(make_engine, name):
    """A standard deviation of 0.8 of the logarithm (decision 4)."""
    rng = random.Random(len(name))
    engine = make_engine(
        policy=name,
        config={"length": {"mode": "oracle-noise", "sigma": 0.8}},
        overlap=rng.random() < 0.5,
        page_size=rng.choice([1, 16]),
        max_total_tokens=1600,
        max_running_requests=16,
    )

    def wishes(rng, num_tokens):
        deadline_s = rng.choice([0.3, 1.0, 60.0])
        return {"output_tokens_hint": num_tokens, "deadline_s": deadline_s}

    random_traffic(engine, len(name), most_tokens=60, wishes=wishes)


@pytest.mark.parametrize(
    ("page_size", "overlap"), [pytest.param(1, True, marks=pytest.mark.long), (16, False)]
)
def test_guests_of_ecoserve_grow_in_what_their_hosts_were_promised(make_engine, page_size, overlap):
    engine = make_engine(
        policy="ecoserve-oracle",
        overlap=overlap,
        page_size=page_size,
        max_total_tokens=960,
        max_running_requests=16,
    )
    lengths = [260, 220, *range(20, 100, 5)]
    for i, num_output in enumerate(lengths):
        engine.submit(
            f"r{i}",
            prompt(i, 30),
            max_new_tokens=num_output,
            priority=OFFLINE,
            custom_params={"cosched": {"output_tokens_hint": num_output}},
        )
    taken, lenders = [], set()

    def look(iteration):
        engine.scheduler.invariant_checker.self_check_during_busy()
        running = [req.cosched for req in engine.scheduler.running_batch.reqs]
        taken.append(sum(borrowed_by(running).values()))
        lenders.update(tracked.lender.rid for tracked in running if tracked.lender is not None)
        view = view_now(engine.scheduler)
        assert view.progress() == progress_of(view)

    engine.run_until_idle(on_iteration=look, max_iterations=20_000)
    answers = {rid: len(reply.output_ids) for rid, reply in engine.replies.items()}
    assert answers == {f"r{i}": num_output for i, num_output in enumerate(lengths)}
    assert max(taken) >= 2 * page_size and lenders
    counters = engine.scheduler.cosched.counters
    assert counters.num_engine_refusals == counters.num_safe_plans == counters.num_preemptions == 0
    assert_drained(engine)


def share(request) -> float:
    """In [0, 1): another one for each token that it has."""
    return zlib.crc32(f"{request.rid}/{request.num_output_tokens // 4}".encode()) / 2**32


def wanted(request) -> int:
    """From what it has up to all that it may generate."""
    left = request.max_new_tokens - request.num_output_tokens
    return request.num_output_tokens + round(share(request) * left)


class Promising:
    """everybody in the order of arrival, with some room for the output, which changes now and then;
    when that is more than there is, the last that came stops"""

    initial = None

    def __init__(self, settings):
        pass

    def plan(self, view, state):
        builder = PlanBuilder(view)
        running = sorted(view.running, key=lambda request: request.arrival_seq)
        for request in running:
            if not request.num_output_tokens % 4:
                builder.promise(request, wanted(request))
        while len(running) > 1 and min(builder.ledger.kv.headroom, builder.ledger.kv.available) < 0:
            if running[-1].traits.can_preempt:
                builder.preempt(running[-1])
            del running[-1]
        if builder.ledger.kv.headroom < 0 and builder.ledger.kv.promises:
            return PlanBuilder(view).build(), state
        for request in builder.unfinished():
            builder.continue_prefill(request, sys.maxsize, unreserved=True)
        if not builder.num_preempted:
            for request in (*view.online, *view.offline_order()):
                builder.promise(request, wanted(request))
                if not builder.take(request, float("inf")):
                    del builder.ledger.kv.promises[request.rid]
                    break
        return builder.build(), state


@pytest.mark.parametrize(
    ("overlap", "mixed", "page_size"),
    [
        (True, False, 1),
        (False, True, 16),
        pytest.param(False, True, 1, marks=pytest.mark.long),
        pytest.param(True, False, 16, marks=pytest.mark.long),
    ],
)
def test_the_engine_admits_what_fits_beside_promises(make_engine, overlap, mixed, page_size):
    engine = without_model(
        make_engine(
            policy=f"{__name__}:Promising",
            overlap=overlap,
            mixed=mixed,
            page_size=page_size,
            max_total_tokens=1600,
            max_running_requests=8,
        )
    )
    promised = set()

    def look():
        running = engine.scheduler.running_batch.reqs
        promised.update((r.rid, r.cosched.promised) for r in running if r.cosched.promised)

    random_traffic(engine, 2 * page_size + mixed, most_tokens=60, also=look)
    assert len({rid for rid, _ in promised}) > 15 and len(promised) > 30, "and they changed"


class Nothing(Promising):
    """nobody is promised anything"""

    def plan(self, view, state):
        builder = PlanBuilder(view)
        for request in builder.unfinished():
            builder.continue_prefill(request, sys.maxsize)
        for request in view.offline_order():
            builder.promise(request, 0)
            if not builder.take(request, float("inf")):
                del builder.ledger.kv.promises[request.rid]
                break
        return builder.build(), state


def test_what_is_promised_decides_how_many_run(make_engine):
    """The engine's own rule sets a share of the limit aside."""

    def most_running(policy):
        engine = make_engine(policy=policy, max_total_tokens=600, max_running_requests=16)
        without_model(engine)
        for i in range(12):
            engine.submit(f"r{i}", prompt(i, 20), max_new_tokens=100, priority=OFFLINE)
        seen = [0]

        def act(iteration):
            seen.append(len(engine.scheduler.running_batch.reqs))

        engine.run_until_idle(on_iteration=act, max_iterations=20_000)
        assert_drained(engine)
        assert engine.scheduler.cosched.counters.num_engine_refusals == 0
        return max(seen)

    assert most_running(f"{__name__}:Nothing") == 12 > most_running("sarathi")
