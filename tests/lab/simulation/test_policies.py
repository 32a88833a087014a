"""What policies reach in virtual time, each in the situation that it must master."""

import random
from dataclasses import replace

import pytest

from cosched.core.request import RequestClass, Slo
from cosched.lab.cost_models.registry import make_cost_model
from cosched.lab.simulation.run import cost_model_of, execute, execute_requests, load_requests
from cosched.lab.simulation.run_spec import CostSpec, WorkloadSpec
from cosched.lab.simulation.setting import setting_of
from cosched.papers.echo.policy import EchoPolicy
from cosched.papers.hygen.policy import HygenPolicy
from cosched.policies import POLICIES
from cosched.predict.calibration import Calibrator
from cosched_traces.workload import Segment, TraceRequest
from tests.batch.replay import errors
from tests.schedule.limits import decoding_in, has_offline_work, offline_limit_s, seconds_of
from tests.simulated import (
    ROOFLINE,
    busy_spec,
    make_spec,
    offline,
    plans_asked_twice,
    requests_file,
)

# -- a policy is a function of what it is given ---------------------------------------------------

CHEAP = {"duration_s": 2.0}
MANY_PREFIXES = {"offline": WorkloadSpec(name="mmlu-like", num_requests=300), **CHEAP}
ONCE = {
    "offline": WorkloadSpec(name="documents", num_requests=120),
    "cost": replace(ROOFLINE, prefix_reads="once"),
}
OVERLOADED = {"online": WorkloadSpec(name="azure-like", rate=25.0), "duration_s": 3.0}


@pytest.mark.parametrize(
    ("policy", "overlap", "changes", "happens"),
    [
        ("hygen", True, {}, lambda plan: plan.preempt and plan.skipped),
        ("hygen", False, MANY_PREFIXES, lambda plan: plan.prefill),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("hygen", True, ONCE, lambda plan: plan.prefill),
                ("hygen", True, {"config": (("predictor_error", 0.2),)}, lambda plan: plan.paused),
                (
                    "hygen-throttled",
                    False,
                    {"config": (("offline_rate", 4.0),)},
                    lambda plan: plan.skipped,
                ),
                ("sarathi", True, CHEAP, lambda plan: plan.prefill),
            )
        ),
        ("cosched", True, OVERLOADED, lambda plan: plan.late),
        ("echo-bs+e+s", True, MANY_PREFIXES, lambda plan: plan.prefill),
        ("bros", True, CHEAP, lambda plan: plan.prefill),
    ],
)
def test_a_policy_asked_twice_about_one_view_plans_the_same(
    monkeypatch, policy, overlap, changes, happens
):
    plans = plans_asked_twice(replace(busy_spec(policy, overlap=overlap), **changes), monkeypatch)
    assert len(plans) > 50 and any(map(happens, plans))


@pytest.mark.parametrize(("name", "policy"), [("hygen", HygenPolicy), ("echo-bs+e+s", EchoPolicy)])
def test_offline_work_keeps_the_deadlines_of_online_requests(monkeypatch, name, policy):
    """The time of each plan as the predictor has it, and the limit from the requests alone."""
    shares = []
    plan_of = policy.plan

    def plan(self, view, state):
        plan, after = plan_of(self, view, state)
        is_alone = len(decoding_in(plan, view)) + len(plan.prefill) == 1  # runs however long
        if has_offline_work(plan, view) and not is_alone:
            limit_s = offline_limit_s(view, self._settings.slo, self._settings.budgets)
            assert seconds_of(plan, view) <= limit_s + 1e-9
            shares.append(seconds_of(plan, view) / limit_s)
        return plan, after

    monkeypatch.setattr(policy, "plan", plan)
    execute(make_spec(name, duration_s=2.0))
    assert len(shares) > 50
    assert sum(share > 0.8 for share in shares) > 10, "the limits mattered"


# -- more chat than the device can do -------------------------------------------------------------

OVERLOAD = make_spec(
    "cosched",
    machine={"kv_tokens": 120_000, "chunk_tokens": 2048, "max_running_requests": 64},
    online=WorkloadSpec(name="azure-like", rate=24.0),
    offline=None,
    duration_s=6.0,
)


def test_more_are_in_time_than_in_the_order_of_arrival_and_decodes_keep_their_pace():
    ours, by_arrival = (
        execute(replace(OVERLOAD, setting=setting_of(name))).summary.online
        for name in ("cosched", "cosched-fcfs")
    )
    assert ours.attainment.joint.num_met > 2 * by_arrival.attainment.joint.num_met > 0
    assert ours.attainment.tpot.ratio > 0.97
    assert ours.num_finished >= by_arrival.num_finished


def test_a_flood_that_no_policy_can_keep_tpot_for_is_done_as_soon_as_under_stock():
    """Decodes alone take longer than the target. A pace that cannot be kept only makes more
    iterations."""
    slow = CostSpec(name="roofline", slower=8.0, slower_after_s=0.0)
    requests = [
        TraceRequest(
            rid=f"r{i}",
            request_class=RequestClass.ONLINE,
            arrival_s=0.0,
            num_output_tokens=15 + i % 30,
            segments=(Segment(i, 400),),
        )
        for i in range(150)
    ]

    def seconds(name):
        spec = replace(OVERLOAD, cost=slow, setting=setting_of(name), duration_s=500.0)
        return max(record.finish_s for record in execute_requests(spec, requests, []).records)

    assert seconds("cosched") < 1.03 * seconds("s0")


def test_waits_for_the_last_moment_teach_the_predictor_nothing(monkeypatch):
    """If a wait that was too long counted as time of the batch, the next one would be longer, and
    every deadline would be counted by it."""
    taught = []
    observe = Calibrator.observe

    def watch(self, batch, seconds):
        taught.append((batch, seconds))
        observe(self, batch, seconds)

    monkeypatch.setattr(Calibrator, "observe", watch)
    state = execute(replace(OVERLOAD, config=(("predictor_error", 0.2),))).cosched
    assert state["num_dry"] > 0, "some waits are too long"
    assert len(taught) > 0.9 * state["num_iterations"]
    cost_model = cost_model_of(OVERLOAD)
    for batch, seconds in taught:
        assert seconds == pytest.approx(cost_model.iteration_s(batch), abs=1e-9)


# -- memory too small for what runs ---------------------------------------------------------------


def short_of_memory(kv_tokens, **changes):
    # SGLang's estimate of the output to come, far too low: memory runs out for certain.
    machine = {"kv_tokens": kv_tokens, "chunk_tokens": 1024, "schedule_conservativeness": 0.3}
    return make_spec("hygen", machine=machine, **{"online": None, **changes})


def test_decoding_recovers_after_long_contexts_were_preempted(tmp_path):
    """Preemptions must not feed on each other (SGLang issue 26248)."""
    rng = random.Random(0)
    rows = [(rng.randint(2700, 3300), rng.randint(550, 650)) for _ in range(8)]
    long = requests_file(tmp_path / "long.csv", rows)
    enough, short = (
        execute(short_of_memory(kv_tokens, offline=long, duration_s=200.0))
        for kv_tokens in (32_000, 20_000)
    )
    summary = short.summary.offline
    assert all(record.is_finished for record in short.records)
    assert 1 <= summary.num_preemptions <= len(rows)
    # A third of the memory is missing, so a third of the requests must wait.
    assert short.end_s <= 1.8 * enough.end_s
    assert summary.num_recomputed_tokens <= 0.1 * sum(map(sum, rows))


def test_recomputing_is_bounded_where_bursts_push_out_offline_contexts(tmp_path):
    rng = random.Random(0)
    rows = [(rng.randint(3500, 4500), rng.randint(300, 600)) for _ in range(60)]
    bursts = [
        (round(burst * 1.5, 3), rng.randint(2000, 3000), rng.randint(5, 15))
        for burst in range(20)
        for _ in range(3)
    ]
    spec = short_of_memory(
        13_000,
        online=requests_file(tmp_path / "on.csv", bursts),
        offline=requests_file(tmp_path / "off.csv", rows),
        duration_s=30.0,
        slo=Slo(ttft_s=1.0, tpot_s=0.05),
    )
    num_recomputed = {}
    for share in (0.02, 1.0):
        kv = {"eviction": "lru", "recompute_share": share}
        summary = execute(replace(spec, config=(("kv", kv),))).summary.offline
        assert summary.num_finished >= 2, "it goes on all the same"
        num_recomputed[share] = summary.num_recomputed_tokens
    assert num_recomputed[1.0] > 50_000, "or the test shows nothing"
    assert num_recomputed[0.02] < num_recomputed[1.0] / 3


@pytest.mark.parametrize(("name", "most_again"), [("bros", 0.02), ("cosched", 0.04)])
def test_long_prompts_are_not_computed_again_where_memory_is_short(tmp_path, name, most_again):
    """Every 2.5 s chats of some 8,000 tokens, 20 ms apart; two short ones behind."""
    rows = []
    for burst in range(3):
        start_s = 1 + 2.5 * burst
        rows += [(start_s + 0.02 * i, 8000 + 300 * i, 80) for i in range(3)]
        rows += [(start_s + 0.1 + 0.3 * i, 600, 150) for i in range(2)]
    spec = make_spec(
        name,
        machine={"kv_tokens": 26_000},
        online=requests_file(tmp_path / "bursts.csv", rows),
        slo=Slo(ttft_s=1.0, tpot_s=0.05),
        duration_s=8.0,
    )
    online = execute(spec).summary.online
    assert online.num_prompt_tokens > 20_000 and online.num_finished >= 5
    assert online.num_recomputed_tokens <= most_again * online.num_prompt_tokens
    assert online.num_preemptions <= online.num_requests


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("eco-multires", "oracle"),
        ("eco-synccoupled", "histogram"),
        *(
            pytest.param(name, mode, marks=pytest.mark.long)
            for name in POLICIES
            if name.startswith("eco-") and name != "eco-multires"
            for mode in ("oracle", "histogram")
            if (name, mode) != ("eco-synccoupled", "histogram")
        ),
    ],
)
def test_coupled_schedulers_serve_far_more_at_once_than_fits(tmp_path, name, mode):
    """1,216 tokens of memory, 30 to 500 for each request."""
    rng = random.Random(0)
    rows = [(rng.randint(10, 300), rng.randint(20, 200)) for _ in range(24)]
    spec = make_spec(
        name,
        machine={
            "kv_tokens": 1_216,
            "chunk_tokens": None,
            "page_size": 32 if mode == "oracle" else 1,
            "max_running_requests": 64,
        },
        online=WorkloadSpec(name="alpaca", rate=1.0),
        offline=requests_file(tmp_path / "job.csv", rows),
        duration_s=120.0,
    ).configured(length={"mode": mode})
    result = execute(spec)
    assert len(offline(result)) == 24 and all(r.is_finished for r in offline(result))
    assert result.summary.online.num_finished > 3
    told = result.cosched
    assert not told["failures"] and not told["num_engine_refusals"] and not told["num_safe_plans"]
    if name in ("eco-vllm", "eco-fastgen", "eco-syncfastgen", "eco-srtf", "eco-fastserve"):
        assert told["num_preemptions"]
    elif mode == "oracle":
        assert not told["num_preemptions"], "what is set aside is enough"


# -- jobs -----------------------------------------------------------------------------------------


def test_a_job_meets_a_window_that_it_would_miss_in_its_turn_and_chat_does_not_notice():
    """The job rises when what is left of it needs all the time that is left."""
    window_s, num_in_job = 20.0, 60
    spec = make_spec(
        "cosched",
        machine={"kv_tokens": 60_000, "chunk_tokens": 1024},
        online=WorkloadSpec(name="azure-like", rate=2.0),
        offline=WorkloadSpec(name="bros-offline", num_requests=260, client="all"),
        duration_s=window_s,
        # Two seconds before its end are far too late for a job that takes eight. One bucket: in its
        # turn the job is the last.
    ).configured(pool={"deadline_margin_s": 2.0, "num_buckets": 1})

    def served(deadline_s):
        online, offline = load_requests(spec)
        job = [replace(r, slo=Slo(deadline_s=deadline_s)) for r in offline[-num_in_job:]]
        result = execute_requests(spec, online, [*offline[:-num_in_job], *job])
        rids = {request.rid for request in job}
        num_ended = sum(r.finish_s is not None for r in result.records if r.rid in rids)
        summary = result.summary
        return num_ended, summary.online.attainment.joint.ratio, summary.offline.tokens_per_s

    num_ended, met, rate = served(window_s)
    num_in_turn, met_in_turn, rate_in_turn = served(None)
    assert num_ended == num_in_job and num_in_turn < num_in_job / 4
    assert met >= met_in_turn - 0.01 and rate > 0.95 * rate_in_turn


def test_more_is_served_the_less_is_read_again():
    """Questions on documents: each context is read, or from the cache, or once for all."""
    spec = make_spec(
        "hygen",
        machine={"kv_tokens": 300_000, "chunk_tokens": None, "max_running_requests": 64},
        online=None,
        offline=WorkloadSpec(name="documents", num_requests=120),
        duration_s=12.0,
    )
    each, cached, once = (
        execute(replace(spec, cost=replace(ROOFLINE, prefix_reads=way))).summary
        for way in ("each", "cached", "once")
    )
    served = [summary.offline.tokens_per_s for summary in (each, cached, once)]
    assert served[0] < served[1] < served[2]
    # A predictor that took every context to be read would be far above.
    assert once.iterations.prediction_error_ratio.p50 < 0.05


@pytest.mark.parametrize(
    ("job", "limit", "num_lines"),
    [
        ("documents", 150, 80),
        pytest.param("bros-offline", 128, 400, marks=pytest.mark.long),
    ],
)
def test_a_job_is_done_about_when_its_forecast_says(job, limit, num_lines):
    """Its records through the code of the forecasts (`tests.batch.replay`)."""
    spec = make_spec(
        "cosched",
        machine={"kv_tokens": 60_000, "chunk_tokens": 1024},
        online=WorkloadSpec(name="azure-like", rate=1.0),
        # All at once: in prefix order the beginning of so small a job is one document.
        offline=WorkloadSpec(name=job, num_requests=num_lines, client="all"),
        duration_s=600.0,
    )
    cost_model = make_cost_model("roofline", model=spec.machine.model, gpu=spec.machine.gpu)
    records, shares = execute(spec).records, (0.4, 0.6, 0.8, 0.9)
    _, found = errors(records, cost_model=cost_model, limit=limit, shares=shares)
    assert all(abs(one) < 0.15 for one in found)
    assert abs(found[-1]) < 0.1
