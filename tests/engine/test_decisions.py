"""The decision log: what is written, that writing it changes nothing, and that a full disk costs
the log, never the server."""

import json
from dataclasses import replace
from unittest import mock

import pytest
from sglang.srt.managers.io_struct import AbortReq

from cosched.config import Config, parse_config
from cosched.core.plan import Plan, Preemption, SkipReason
from cosched.engine.features import log_decisions
from cosched.engine.features.log_decisions import LogDecisions
from cosched.engine.log.parts import NUM_PARTS, parts_of
from cosched.engine.log.read import read_log
from cosched.engine.read_state import state_of
from cosched.errors import ConfigError
from cosched.lab.metrics.records import record_line
from cosched.lab.simulation.run import execute
from cosched.simulate import main as simulate
from tests.engine.conftest import assert_drained, prompt
from tests.factories import FakeView, decoding, offline, online
from tests.recorded import Recorder, batch_of
from tests.simulated import busy_spec


def entries_of(path):
    """Every entry of a log that must have no bad line."""
    bad = []
    entries = list(read_log(path, report=bad.append))
    assert bad == []
    return entries


def read(path):
    return [entry.decision for entry in entries_of(path)]


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def overlap(request):
    return request.param


@pytest.fixture(scope="module")
def recorded(overlap, tmp_path_factory):
    """(result, log) of a run on the virtual engine."""
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    return execute(short_spec(overlap), decision_log=path), path


def short_spec(overlap):
    return replace(busy_spec("hygen", overlap=overlap), duration_s=3.0)


def test_the_log_changes_no_result(recorded, overlap):
    logged, _ = recorded
    silent = execute(short_spec(overlap))
    assert [record_line(r) for r in logged.records] == [record_line(r) for r in silent.records]
    assert logged.to_dict() == silent.to_dict()


def test_a_plan_is_replaced_only_where_that_may_spare_a_running_request(recorded, overlap):
    _, path = recorded
    decisions = read(path)
    assert len(decisions) > 100 and sum(len(d.plan.preempt) for d in decisions) >= 2
    replaced = [d for d in decisions if d.outcome == "replanned"]
    assert bool(replaced) == overlap, "without overlap all results are known"
    for decision in replaced:
        preempted = {preemption.rid for preemption in decision.plan.preempt}
        assert preempted & set(decision.running) or not decision.plan.prefill
    assert any(d.plan.preempt and d not in replaced for d in decisions)
    assert any(d.plan.paused for d in decisions)


def test_every_request_is_described_where_the_log_first_names_it(recorded):
    _, path = recorded
    described = set()
    for entry in entries_of(path):
        decision = entry.decision
        described |= {facts.rid for facts in decision.requests}
        named = {
            *decision.running,
            *decision.unfinished,
            *decision.plan.prefill,
            *decision.plan.skipped,
        }
        assert named <= described
    assert {entry.facts[rid].rid for rid in described} == described


class TestWhatIsWritten:
    def test_a_plan_what_it_was_made_from_and_what_came_of_it(self, tmp_path):
        recorder = Recorder(tmp_path / "log")
        running = [decoding(offline("paused", 30), 4), decoding(offline("gone", 20), 2)]
        new = online("new", 50, arrival_s=1 / 3, max_new_tokens=7, num_prefix_tokens=16)
        waits = offline("waits", 500)
        view = FakeView(running=tuple(running), online=[new], offline=[waits], now_s=0.5)
        plan = Plan(
            prefill={"new": 34},
            paused=frozenset({"paused"}),
            preempt=(Preemption(rid="gone"),),
            skipped={"waits": SkipReason.MEMORY_BUDGET},
            limits={"online": 0.05},
        )
        recorder.run(view, new, plan=plan)
        _, line = (tmp_path / "log").read_bytes().splitlines()
        record = json.loads(line)
        assert record.pop("kv")["total"] == 10_000
        facts = record.pop("requests")
        assert facts[2] == {
            "rid": "new",
            "class": "online",
            "arrival_s": 1 / 3,
            "num_prompt_tokens": 50,
            "max_new_tokens": 7,
        }
        assert [one["rid"] for one in facts] == ["paused", "gone", "new", "waits"]
        assert record == {
            "kind": "decision",
            "iteration": 0,
            "outcome": "ran",
            "now_s": 0.5,
            "free_slots": 62,
            "num_offline": 1,
            "running": ["paused", "gone"],
            "plan": {
                "prefill": {"new": 34},
                "paused": ["paused"],
                "preempt": [{"rid": "gone", "mode": "keep_kv"}],
                "skipped": {"waits": "memory_budget"},
                "limits": {"online": 0.05},
            },
            "cached": {"new": 16},
            "num_decodes": 1,
            "start_s": 0.5,
            "measured_s": 0.01,
            "planning_s": 100e-6,
        }

    def test_plans_are_written_in_their_order_when_their_results_are_known(self, tmp_path):
        recorder = Recorder(tmp_path / "log")
        first, second = decoding(online("a")), decoding(online("b"))
        recorder.plan(FakeView(running=(first,)))
        under_way = recorder.launch(batch_of(first))
        recorder.plan(FakeView(running=(second,)))
        recorder.launch(None)  # over before the one under way is
        assert read(recorder.path) == []
        recorder.end(under_way, batch_of(first), start_s=1.0, seconds=0.02)
        told = read(recorder.path)
        assert [(d.iteration, d.outcome) for d in told] == [(0, "ran"), (1, "no_batch")]
        assert [(d.start_s, d.measured_s) for d in told] == [(1.0, 0.02), (None, None)]

    def test_a_plan_that_was_replaced_is_marked(self, tmp_path):
        recorder = Recorder(tmp_path / "log")
        running = decoding(online("a"))
        recorder.plan(FakeView(running=(running,)))
        recorder.run(FakeView(running=(running,)), running)
        assert [d.outcome for d in read(recorder.path)] == ["replanned", "ran"]

    def test_what_the_engine_refused_is_named(self, tmp_path):
        taken, refused = online("taken", 10), online("refused", 10)
        recorder = Recorder(tmp_path / "log")
        plan = Plan(prefill={"taken": 10, "refused": 10})
        recorder.run(FakeView(online=[taken, refused]), taken, plan=plan)
        (decision,) = read(recorder.path)
        assert (decision.refused, decision.cached) == (["refused"], {"taken": 0})

    def test_a_request_that_ends_with_the_next_iteration_on_its_way_ends_once(self, tmp_path):
        request = decoding(online("a"), 6)
        recorder = Recorder(tmp_path / "log")
        under_way = []
        for _ in range(2):
            recorder.plan(FakeView(running=(request,)))
            under_way.append(recorder.launch(batch_of(request)))
        for iteration in under_way:
            recorder.end(iteration, batch_of(request, finishing=("a",)), start_s=0.0)
        assert [d.finished for d in read(recorder.path)] == [{"a": ("length", 6)}, {}]


class TestParts:
    def fill(self, path, num=400):
        recorder = Recorder(path, max_bytes=40_000)
        running = decoding(online("long-lived", 40, arrival_s=0.25), 3)
        for i in range(num):
            view = FakeView(running=(running,), offline=[offline(f"f{i}", 700)], now_s=float(i))
            plan = Plan(skipped={f"f{i}": SkipReason.TOKEN_BUDGET})
            recorder.run(view, running, plan=plan)
        return parts_of(path)

    def test_only_the_user_of_the_server_reads_its_parts(self, tmp_path):
        parts = self.fill(tmp_path / "log")
        assert {part.stat().st_mode & 0o777 for part in parts} == {0o600}

    def test_old_parts_go_and_the_rest_is_read_in_order(self, tmp_path):
        parts = self.fill(tmp_path / "log")
        assert len(parts) == NUM_PARTS
        assert sum(part.stat().st_size for part in parts) < 44_000
        numbers = [d.iteration for d in read(tmp_path / "log")]
        assert numbers[0] > 0
        assert numbers == list(range(numbers[0], 400))

    def test_each_part_can_be_read_alone(self, tmp_path):
        for part in self.fill(tmp_path / "log"):
            alone = tmp_path / "alone"
            alone.write_bytes(part.read_bytes())
            first, *_ = entries_of(alone)
            assert first.facts["long-lived"].arrival_s == 0.25

    def test_a_new_log_does_not_mix_with_an_older_one(self, tmp_path):
        (tmp_path / "log-book").write_text("mine")
        old = [part.read_bytes() for part in self.fill(tmp_path / "log")]
        recorder = Recorder(tmp_path / "log")
        recorder.run(FakeView())
        assert parts_of(tmp_path / "log") == [tmp_path / "log"]
        assert [d.iteration for d in read(tmp_path / "log")] == [0]
        kept = [part.read_bytes() for part in sorted(tmp_path.glob("log-0*"))]
        assert len(kept) == NUM_PARTS and kept == old
        assert read(sorted(tmp_path.glob("log-0*"))[-1])[-1].iteration == 399
        assert (tmp_path / "log-book").read_text() == "mine"

    def test_restarts_keep_within_the_size(self, tmp_path):
        for _ in range(3):
            self.fill(tmp_path / "log", num=150)
        assert sum(part.stat().st_size for part in tmp_path.iterdir()) < 54_000
        for _ in range(100):  # a server that does not get up
            Recorder(tmp_path / "log", max_bytes=40_000).run(FakeView())
        assert len(list(tmp_path.iterdir())) < 70
        assert sum(part.stat().st_size for part in tmp_path.iterdir()) < 54_000

    def test_a_folder_that_is_not_there_is_one_sentence(self, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot write the log .*absent"):
            Recorder(tmp_path / "absent" / "log")


def test_the_log_needs_a_policy_that_decides():
    with pytest.raises(ConfigError, match="decision_log: policy 'priority' leaves all decisions"):
        parse_config('{"policy": "priority", "decision_log": "x"}', source="test")
    with pytest.raises(ConfigError, match="decision_log_mb must be a positive number"):
        parse_config('{"decision_log_mb": 0}', source="test")
    assert Config().decision_log is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "sglang"], "policy 'sglang' leaves all decisions to SGLang"),
        (["--policy", "sarathi", "--find", "min-kv"], "--find makes many"),
    ],
)
def test_simulations_that_cannot_be_recorded_are_refused(arguments, message, tmp_path, capsys):
    log = ["--decision-log", str(tmp_path / "log")]
    with pytest.raises(SystemExit) as stop:
        simulate(["--online", "alpaca", "--online-rate", "1", "--duration", "1", *log, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_waiting_request_that_is_aborted_is_written(make_engine, tmp_path):
    config = {"decision_log": str(tmp_path / "log")}
    engine = make_engine(policy="hygen", max_running_requests=2, config=config)
    for i in range(5):
        engine.submit(f"r{i}", prompt(i, 30), max_new_tokens=6)

    def act(iteration):
        if iteration == 2:
            engine.scheduler.abort_request(AbortReq(rid="r4"))

    engine.run_until_idle(on_iteration=act)
    decisions = read(tmp_path / "log")
    assert [d.aborted for d in decisions if d.aborted] == [["r4"]]
    assert {rid for d in decisions for rid in d.finished} == {"r0", "r1", "r2", "r3"}


def test_a_full_disk_switches_the_log_off_with_one_warning(make_engine):
    # SGLang replaces logging's handlers.
    with mock.patch.object(log_decisions.logger, "warning") as warning:
        engine = make_engine(policy="hygen", overlap=True, config={"decision_log": "/dev/full"})
        for i in range(4):
            engine.submit(f"r{i}", prompt(i, 50), max_new_tokens=20, priority=-i)
        engine.run_until_idle(max_iterations=500)
    assert all(len(engine.replies[f"r{i}"].output_ids) == 20 for i in range(4))
    assert_drained(engine)
    assert [call.args[0] % call.args[1:] for call in warning.call_args_list] == [
        "cosched: the decision log '/dev/full' is switched off until the next start: "
        "No space left on device"
    ]
    state = state_of(engine.scheduler.cosched)
    assert state.logs_off == ("decision",)


def test_a_log_whose_disk_is_full_halfway_keeps_what_it_has(make_engine, tmp_path):
    path = tmp_path / "log"
    engine = make_engine(policy="hygen", overlap=True, config={"decision_log": str(path)})
    log = engine.scheduler.cosched.features.get(LogDecisions)

    def fail_later(iteration):
        if iteration == 10:
            log._parts._file.close()
            log._parts._file._file = open("/dev/full", "wb", buffering=0)

    for i in range(2):
        engine.submit(f"r{i}", prompt(i, 50), max_new_tokens=20, priority=-i)
    engine.run_until_idle(on_iteration=fail_later, max_iterations=500)
    assert log.is_off
    assert all(len(engine.replies[f"r{i}"].output_ids) == 20 for i in range(2))
    numbers = [decision.iteration for decision in read(path)]
    assert 3 < len(numbers) < 12 and numbers == list(range(len(numbers)))
