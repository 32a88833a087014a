"""What Prometheus is told, on a real scheduler."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine.feature import Feature
from cosched.engine.features.class_counters import ClassCounters
from cosched.engine.features.device_cost import DeviceCost
from cosched.engine.figures import FIGURES, values_at
from cosched.engine.read_state import offline_progress, state_of
from tests.crossed import crossed
from tests.engine.conftest import assert_drained, prompt, use_stepping_clock, without_model


@pytest.fixture
def export(make_engine):
    """`export(**engine)` -> (engine, `value(name, **labels)`)."""
    from prometheus_client import CollectorRegistry

    from cosched.engine.features.exporter import MetricsExporter

    def start(**options):
        engine = make_engine(**options)
        registry = CollectorRegistry()
        controller = engine.scheduler.cosched
        state = partial(state_of, controller)
        exporter = MetricsExporter(state, {"tp_rank": "0"}, registry=registry)
        controller.features[ClassCounters].listener = exporter
        controller.features.add(exporter)

        def value(name, **labels):
            return registry.get_sample_value(f"cosched:{name}", {"tp_rank": "0", **labels})

        return engine, value

    return start


ONLINE, OFFLINE = {"request_class": "online"}, {"request_class": "offline"}


@crossed(policy=["sarathi", "hygen"], overlap=[False, True])
def test_both_classes_are_counted(export, policy, overlap):
    engine, value = export(policy=policy, overlap=overlap, max_running_requests=4)
    for i in range(5):
        engine.submit(f"on{i}", prompt(i, 50), max_new_tokens=1 + 3 * i, priority=0)
        engine.submit(f"off{i}", prompt(50 + i, 100), max_new_tokens=10, priority=-1)
    engine.run_until_idle(max_iterations=3000)
    assert value("ttft_seconds_count", **ONLINE) == value("e2e_seconds_count", **ONLINE) == 5
    assert value("tpot_seconds_count", **ONLINE) == 4, "one reply has one token"
    assert value("tpot_seconds_count", **OFFLINE) == value("e2e_seconds_count", **OFFLINE) == 5
    assert value("e2e_seconds_sum", **OFFLINE) > value("ttft_seconds_sum", **OFFLINE) > 0
    assert value("output_tokens_total", **ONLINE) == sum(1 + 3 * i for i in range(5))
    assert value("output_tokens_total", **OFFLINE) == 50
    assert value("prefill_tokens_total", **OFFLINE) >= 5
    for kind in ("waiting_requests", "running_requests"):
        assert value(kind, **ONLINE) == value(kind, **OFFLINE) == 0
    counters = engine.scheduler.cosched.counters
    assert value("preemptions_total") == counters.num_preemptions
    assert value("engine_refusals_total") == counters.num_engine_refusals == 0
    assert value("offline_paused") == 0 and value("offline_max_running") == float("inf")
    assert_drained(engine)


def test_what_no_client_gets_is_not_counted(export):
    """SGLang computes a token for ``max_new_tokens: 0``, and a request of its own before the
    samples of ``n``."""
    config = {"slo": {"ttft_ms": 1e7, "tpot_ms": 1e7}}
    engine, value = export(policy="hygen", config=config)
    engine.submit("none", prompt(1, 40), max_new_tokens=0, priority=0)
    engine.submit("before", prompt(2, 40), max_new_tokens=0, priority=0)
    for rid in ("s1", "s2"):
        engine.submit(rid, prompt(2, 40), max_new_tokens=5, priority=0)
    for received in engine._inbox[-3:]:
        received.sampling_params.n = 2
    engine.run_until_idle(max_iterations=500)
    assert value("output_tokens_total", **ONLINE) == 10
    assert value("e2e_seconds_count", **ONLINE) == 3
    assert value("ttft_seconds_count", **ONLINE) == value("tpot_seconds_count", **ONLINE) == 2
    assert value("slo_met_total", target="all", **ONLINE) == 2
    assert value("slo_met_total", target="ttft", **ONLINE) == 2


def test_the_work_of_offline_requests_counts_once_they_have_ended(export):
    engine, value = export(policy="hygen")
    engine.submit("chat", prompt(1, 50), max_new_tokens=20, priority=0)
    engine.run_until_idle(max_iterations=500)
    assert value("offline_work_seconds_total") == 0
    # Learned times change from one request to the next on a machine that does other work.
    engine.scheduler.cosched.predictor.observe = lambda batch, seconds: None

    def work_s(rid, first, *, num_output):
        before = value("offline_work_seconds_total")
        engine.submit(rid, prompt(first, 100), max_new_tokens=num_output, priority=-1)
        engine.run_until_idle(max_iterations=500)
        return value("offline_work_seconds_total") - before

    short = work_s("short", 100, num_output=1)
    assert short > 0
    assert work_s("long", 300, num_output=40) > short
    assert work_s("again", 100, num_output=1) < short, "its prompt is in the cache"


def test_work_that_cannot_be_predicted_yet_is_at_most_what_it_cost(export):
    engine, value = export(policy="hygen")
    for i in range(3):
        engine.submit(f"off{i}", prompt(20 * i, 8), max_new_tokens=16, priority=-1)
    engine.run_until_idle(max_iterations=200)
    controller = engine.scheduler.cosched
    assert not controller.predictor.is_known
    [cost_s] = controller.features[DeviceCost].account.by_class()["offline"].values()
    assert 0 < value("offline_work_seconds_total") <= cost_s + 1e-6


def test_what_has_begun_of_offline_requests_is_told_for_forecasts(make_engine):
    engine = make_engine(policy="hygen", max_running_requests=2)
    engine.submit("chat", prompt(1, 50), max_new_tokens=200, priority=0)
    for i in range(3):
        engine.submit(f"off{i}", prompt(100 + i, 100 + i), max_new_tokens=40, priority=-1)
    controller = engine.scheduler.cosched
    assert offline_progress(controller).begun == ()
    engine.run(lambda: any(one[1] for one in offline_progress(controller).begun))
    progress = offline_progress(controller)
    for num_prompt, num_output, limit in progress.begun:
        assert num_prompt in (100, 101, 102) and 0 <= num_output < 40 and limit == 40
    assert progress.tail_decode_s > 0 and progress.prefill_token_s >= 0
    engine.run_until_idle(max_iterations=2000)
    assert offline_progress(controller).begun == ()


def test_targets_met_and_missed(export):
    config = {"slo": {"ttft_ms": 1e7, "tpot_ms": 1e7}, "claims": {"floor_ratio": 0.0}}
    engine, value = export(policy="hygen", config=config)

    def submit(rid, priority, **targets):
        custom = {"cosched": targets} if targets else None
        engine.submit(
            rid, prompt(len(rid), 30), max_new_tokens=5, priority=priority, custom_params=custom
        )

    submit("patient", 0)
    submit("a", 0, ttft_slo_ms=1e-6)
    submit("bc", 0, tpot_slo_ms=1e-6)
    submit("offline", -1)
    submit("by then", -1, deadline_s=1e6)
    submit("at once", -1, deadline_s=1e-6)
    engine.run_until_idle(max_iterations=500)

    def judged(request_class, target):
        labels = {"request_class": request_class, "target": target}
        return [value(f"slo_{verdict}_total", **labels) for verdict in ("met", "missed")]

    assert judged("online", "ttft") == [2, 1]
    assert judged("online", "tpot") == [2, 1]
    assert judged("online", "all") == [1, 2]
    assert judged("offline", "deadline") == [1, 1]
    state = state_of(engine.scheduler.cosched)
    assert state.attainment == {"ttft": (2, 1), "tpot": (2, 1), "all": (1, 2), "deadline": (1, 1)}
    assert state.times_s["online_missed_ttft"][1] == 1 < state.times_s["online_ttft"][1]
    assert sum(state.histograms["ttft"].values()) == state.times_s["online_ttft"][1]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_requests_cost_is_counted_by_key_and_class_and_told_at_the_end(export, overlap):
    from sglang.srt.managers.io_struct import unwrap_from_pickle

    engine, value = export(policy="cosched", overlap=overlap)
    told = {}

    class Outbox:
        def send_output(self, output, request=None):
            info = unwrap_from_pickle(getattr(output, "customized_info", None)) or {}
            for rid, values in zip(output.rids, info.get("device_seconds", ()), strict=False):
                told.setdefault(rid, []).extend(values)
            before.send_output(output, request)

    before = engine.outbox
    engine.send_to(Outbox())
    names = ["acme", "acme/nightly", ""]
    for i in range(12):
        custom = {"cosched_server": {"name": names[i % 3], "device_seconds": i < 3}}
        engine.submit(
            f"r{i}",
            prompt(i, 40),
            max_new_tokens=5 + i,
            priority=-(i % 2),
            custom_params=custom,
            stream=i % 2 == 0,
        )
    engine.run_until_idle(max_iterations=500)
    state = state_of(engine.scheduler.cosched)
    shares = [s for by_tenant in state.device_s.values() for s in by_tenant.values()]
    assert sum(shares) == pytest.approx(state.busy_s, abs=1e-5)  # rounded to the microsecond
    assert {name for by_tenant in state.device_s.values() for name in by_tenant} == set(names)
    acme = {"request_class": "offline", "key": "acme"}
    of_acme = [s for name, s in state.device_s["offline"].items() if name.startswith("acme")]
    assert value("device_seconds_total", **acme) == pytest.approx(sum(of_acme)) and min(shares) > 0
    last = {rid: values[-1] for rid, values in told.items() if any(values)}
    assert last.keys() == {"r0", "r1", "r2"} and sum(last.values()) < state.busy_s
    assert [len(told[rid]) for rid in sorted(last)] == [5, 6, 7], "one entry for each token"


@pytest.mark.parametrize(("core", "first", "second"), [("python", "a", "b"), ("rust", "b", "a")])
def test_two_keys_share_the_cost_of_a_prefix(make_engine, monkeypatch, core, first, second):
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    engine = make_engine(policy="cosched", chunked_prefill_size=512, real_time=True)
    # As the predictor assumes before it has learned.
    use_stepping_clock(without_model(engine).scheduler, s_per_iteration=0.015, s_per_token=5e-4)

    def send(iteration):
        if iteration in (0, 3, 6):
            engine.submit(
                f"r{iteration}",
                prompt(1, 400) + prompt(2 + iteration, 10),
                max_new_tokens=80 if iteration < 6 else 1,
                custom_params={"cosched_server": {"name": second if iteration else first}},
            )

    engine.run_until_idle(on_iteration=send, max_iterations=500)
    controller = engine.scheduler.cosched
    costs, busy_s = state_of(controller).device_s["online"], controller.observer.busy_s
    assert sum(costs.values()) == pytest.approx(busy_s, abs=1e-5)
    assert costs[first] == pytest.approx(costs[second], rel=0.05)


def test_who_is_late_is_counted_and_told_with_its_first_token(export):
    """A target of a nanosecond is over before anybody plans."""
    config = {"claims": {"floor_ratio": 0.0}}
    engine, value = export(policy="cosched", config=config, real_time=True)
    told = {}

    class Outbox:
        def send_output(self, output, request=None):
            info = getattr(output, "customized_info", None)
            for name, values in (unwrap_from_pickle(info) or {}).items():
                assert name == "cosched_late"
                for rid, of_request in zip(output.rids, values, strict=True):
                    told.setdefault(rid, []).extend(v for v in of_request if v)
            before.send_output(output, request)

    from sglang.srt.managers.io_struct import unwrap_from_pickle

    before = engine.outbox
    engine.send_to(Outbox())
    for rid, stream in (("piece by piece", True), ("whole", False)):
        custom = {"cosched": {"ttft_slo_ms": 1e-6}}
        engine.submit(
            rid, prompt(len(rid), 30), max_new_tokens=60, custom_params=custom, stream=stream
        )
    engine.submit("patient", prompt(3, 30), max_new_tokens=5)
    engine.run_until_idle(max_iterations=500)
    assert {rid: reasons for rid, reasons in told.items() if reasons} == {
        "piece by piece": ["overdue"],
        "whole": ["overdue"],
    }
    assert len(engine.replies["whole"].output_ids) == 60
    assert value("late_total", reason="overdue") == 2 and value("late_total", reason="crowded") == 0
    assert value("late_met_total", reason="overdue") == 0
    assert state_of(engine.scheduler.cosched).late["overdue"] == (2, 0)


def test_what_is_aborted_running_or_waiting_is_no_served_request(export):
    engine, value = export(policy="hygen", max_running_requests=1)
    engine.submit("gone", prompt(1, 30), max_new_tokens=100, priority=0)
    for i in range(3):
        engine.submit(f"gone{i}", prompt(9 + i, 30), max_new_tokens=5, priority=-1)
    engine.run_until_idle(
        on_iteration=lambda n: engine.abort("gone") if n == 10 else None, max_iterations=300
    )
    assert value("ttft_seconds_count", **ONLINE) == 1
    assert value("e2e_seconds_count", **ONLINE) == value("tpot_seconds_count", **ONLINE) == 0
    assert 0 < value("output_tokens_total", **ONLINE) < 100
    for name in ("aborted_total", "cancelled_total"):
        assert (value(name, **ONLINE), value(name, **OFFLINE)) == (1, 3)


@pytest.mark.parametrize(("policy", "is_limited"), [("hygen", True), ("sarathi", False)])
def test_how_much_of_the_time_that_plans_give_is_used(export, policy, is_limited):
    slo = {"slo": {"ttft_ms": 1e5, "tpot_ms": 1e4}}
    engine, value = export(policy=policy, config=slo)
    engine.submit("on", prompt(1, 30), max_new_tokens=20, priority=0)
    engine.run_until_idle(max_iterations=300)
    given_s, used_s = (
        value(f"iteration_{name}_seconds_total") for name in ("budget", "budget_used")
    )
    state = state_of(engine.scheduler.cosched)
    assert (given_s, used_s) == (state.budget_s, state.budget_used_s)
    if is_limited:
        # Targets are far away, and the model is tiny.
        assert 0 < used_s < given_s / 10
        assert used_s <= value("iteration_measured_seconds_total") + 1e-3
    else:
        assert given_s == used_s == 0


def test_levels_say_what_the_operator_did(export):
    from cosched.core.view import OfflineLimits
    from cosched.engine.offline_gate import limits_to_message

    engine, value = export(policy="hygen", config={"max_offline_waiting": 2})
    gate = engine.scheduler.cosched_offline
    assert gate.set(limits_to_message(OfflineLimits(paused=True, max_running=3)))
    for i in range(5):
        engine.submit(f"off{i}", prompt(i, 30), max_new_tokens=5, priority=-1)
    engine.submit("on", prompt(9, 30), max_new_tokens=5, priority=0)
    engine.run_until_idle(max_iterations=300)
    assert value("offline_paused") == 1 and value("offline_max_running") == 3
    assert value("waiting_requests", **OFFLINE) == 2
    assert value("offline_turned_away_total") == 3


def test_a_log_that_is_off_is_seen(export):
    engine, value = export(policy="hygen", config={"decision_log": "/dev/full"})
    assert value("log_switched_off", log="decision") == 0
    engine.submit("on", prompt(9, 30), max_new_tokens=5, priority=0)
    engine.run_until_idle(max_iterations=300)
    assert value("log_switched_off", log="decision") == 1


def test_tiers_are_counted_each(export):
    tiers = [
        {"name": "high", "priority": 10, "ttft_ms": 1e-3},
        {"name": "low", "priority": 0, "ttft_ms": 1e6, "tpot_ms": 1e6},
    ]
    engine, value = export(policy="cosched", config={"tiers": tiers})
    for i, priority in enumerate((10, 12, 0, -1)):
        engine.submit(f"r{i}", prompt(i, 50), max_new_tokens=3, priority=priority)
    engine.run_until_idle(max_iterations=500)
    assert value("tier_slo_missed_total", tier="high", target="ttft") == 2
    assert value("tier_slo_met_total", tier="low", target="all") == 1, "the offline one has no tier"
    assert value("tier_requests", tier="low", state="running") == 0
    state = state_of(engine.scheduler.cosched).tiers
    assert [*state] == ["high", "low"] and state["high"].times_s["ttft"][1] == 2
    assert sum(state["high"].histograms["ttft"].values()) == 2


def test_no_plan_waits_for_metrics(make_engine, monkeypatch):
    """They are shown with results, while the next iteration runs."""
    engine = make_engine(policy="cosched", overlap=True)
    controller = engine.scheduler.cosched
    done, plan = [], controller.plan

    def planned(*args, **fields):
        done.append("plan")
        made = plan(*args, **fields)
        done.append("planned")
        return made

    class Shows(Feature):
        place = "shows"

        def on_report(self, *, is_idle):
            done.append("show")

    monkeypatch.setattr(controller, "plan", planned)
    controller.features.add(Shows())
    engine.submit("r", prompt(1, 50), max_new_tokens=20)
    engine.run_until_idle(max_iterations=200)
    assert done.count("show") >= 15
    assert {after for before, after in pairwise(done) if before == "plan"} == {"planned"}


def test_each_figure_is_in_the_state(make_engine):
    tiers = [{"name": "high", "priority": 1}, {"name": "low", "priority": 0}]
    config = {"tiers": tiers, "shared_prefix": {"mode": "on"}}
    state = state_of(make_engine(policy="cosched", config=config).scheduler.cosched).to_dict()
    known = dict.fromkeys(("pool", "chat", "alone"))
    for metric, paths, _ in FIGURES:
        for path in paths.values():
            part = path.partition(".")[0]
            assert part in state
            is_unknown = part in known or path.startswith(("kv.host", "failures"))
            assert is_unknown or [*values_at(state, path)], metric.name
